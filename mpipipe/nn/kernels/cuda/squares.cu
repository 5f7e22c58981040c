// Sums of squares in float64 of pieces of a flat array, in two steps: chunks of pieces, then the chunks of each piece.
// Compiled for T, the dtype, and V, elements of one word of memory.

// partial[i] = the sum over the chunk flat[start : stop] of the table (chunks, 2), on one block; chunks start anywhere.
// Moves 1 T an element.
extern "C" __global__ void __launch_bounds__(256)
    square_chunks(const T* flat, const long long* chunks, double* partial) {
    __shared__ double shared[32];
    constexpr int U = 4;
    const T* from = flat + chunks[blockIdx.x * 2];
    const long long count = chunks[blockIdx.x * 2 + 1] - chunks[blockIdx.x * 2];
    const long long skew = (reinterpret_cast<unsigned long long>(from) / sizeof(T)) % V;
    const long long head = min(count, skew ? V - skew : 0ll), words = (count - head) / V;
    double sum = 0;
    for (long long first = threadIdx.x; first < words; first += 256 * U) {
        pack<T, V> in[U];
#pragma unroll
        for (int u = 0; u < U; ++u)
            if (first + u * 256 < words) in[u] = load<V>(from + head + (first + u * 256) * V);
#pragma unroll
        for (int u = 0; u < U; ++u)
            if (first + u * 256 < words)
                for (int k = 0; k < V; ++k) {
                    const double value = widen(in[u].at[k]);
                    sum += value * value;
                }
    }
    for (long long i = threadIdx.x; i < count - words * V; i += 256) {
        const double value = widen(from[i < head ? i : words * V + i]);
        sum += value * value;
    }
    sum = add_up(sum, shared);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// out[i] = the sum of partial[ends[i] : ends[i + 1]], on one block. Moves 8 bytes a chunk.
extern "C" __global__ void __launch_bounds__(128)
    add_chunks(const double* partial, const long long* ends, double* out) {
    __shared__ double shared[32];
    double sum = 0;
    for (long long i = ends[blockIdx.x] + threadIdx.x; i < ends[blockIdx.x + 1]; i += 128) sum += partial[i];
    sum = add_up(sum, shared);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}
