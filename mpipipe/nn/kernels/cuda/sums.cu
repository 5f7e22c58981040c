// Sums over rows, in two steps: the rows in chunks, then the chunks, each in a fixed order. Compiled for T, the dtype,
// and V, elements of one word of memory, which divides width.
typedef accumulator<T>::type A;

// partial (chunks, width): the sums of the columns of x (rows, width) over each chunk of `chunk` rows. Blocks of 32 x 8
// threads have 32 V columns and one chunk. Moves 1 T an element.
extern "C" __global__ void __launch_bounds__(256)
    sum_rows(const T* x, A* partial, long long rows, long long width, long long chunk) {
    constexpr int U = 4, STRIPES = 8, WIDE = 32 * V;
    __shared__ pack<A, V> shared[STRIPES][32];
    const long long left = blockIdx.x * (long long)WIDE, column = left + threadIdx.x * V;
    const long long stop = min(rows, (blockIdx.y + 1) * chunk);
    pack<A, V> sum;
#pragma unroll
    for (int k = 0; k < V; ++k) sum.at[k] = 0;
    if (column < width)
        for (long long row = blockIdx.y * chunk + threadIdx.y; row < stop; row += STRIPES * U) {
            pack<T, V> in[U];
#pragma unroll
            for (int u = 0; u < U; ++u)
                if (row + u * STRIPES < stop) in[u] = load<V>(x + (row + u * STRIPES) * width + column);
#pragma unroll
            for (int u = 0; u < U; ++u)
                if (row + u * STRIPES < stop)
                    for (int k = 0; k < V; ++k) sum.at[k] += widen(in[u].at[k]);
        }
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    const A* staged = &shared[0][0].at[0];
    for (int c = threadIdx.y * 32 + threadIdx.x; c < WIDE && left + c < width; c += 256) {
        A total = 0;
        for (int y = 0; y < STRIPES; ++y) total += staged[y * WIDE + c];
        partial[blockIdx.y * width + left + c] = total;
    }
}

// out (width) += the sums of the columns of parts (count, width). Blocks of 8 x 32 threads have 8 columns, 32 bytes of
// float: what memory gives at once. So 768 columns are 96 blocks. Moves 1 A an element of parts.
extern "C" __global__ void __launch_bounds__(256)
    add_parts(const A* parts, A* out, int count, long long width) {
    constexpr int COLUMNS = 8, STRIPES = 32;
    __shared__ A shared[STRIPES][COLUMNS + 1];
    const long long column = blockIdx.x * (long long)COLUMNS + threadIdx.x;
    A sum = 0;
    if (column < width)
#pragma unroll 8
        for (int row = threadIdx.y; row < count; row += STRIPES) sum += parts[row * width + column];
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || column >= width) return;
    A total = 0;
    for (int y = 0; y < STRIPES; ++y) total += shared[y][threadIdx.x];
    out[column] += total;
}
