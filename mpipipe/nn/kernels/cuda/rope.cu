// Rotary positions on arrays (batch, seq, heads, dim) with any strides, in elements. Compiled for T, the dtype, and V,
// elements of one word of memory. V is 1, or it is even and divides dim, and the last strides are 1.
typedef accumulator<T>::type A;
typedef pack<A, 2> rotation;  // cosine and sine

// target = each pair of neighbours of x, as a complex number, times cosine + i sign sine. The table (seq, dim / 2) has
// a row for each position. target may be x. n counts words, or pairs where V is 1. Moves 2 T an element; the table
// stays in cache from head to head.
extern "C" __global__ void __launch_bounds__(256)
    apply_rope(const T* x, const rotation* table, T* target, long long n, A sign, long long seq, long long heads,
               long long dim, long long x0, long long x1, long long x2, long long x3, long long t0, long long t1,
               long long t2, long long t3) {
    constexpr int N = V > 1 ? V : 2;
    const long long words = dim / N;
    for (long long i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll) {
        const long long rows = quotient(i, words), tokens = quotient(rows, heads), b = quotient(tokens, seq);
        const long long s = tokens - b * seq, h = rows - tokens * heads, c = (i - rows * words) * N;
        const T* from = x + b * x0 + s * x1 + h * x2 + c * x3;
        T* to = target + b * t0 + s * t1 + h * t2 + c * t3;
        const pack<rotation, N / 2> rotations = load<N / 2>(table + (s * dim + c) / 2);
        pack<T, N> in, out;
        if (V > 1) in = load<N>(from);
        else for (int k = 0; k < N; ++k) in.at[k] = from[k * x3];
#pragma unroll
        for (int k = 0; k < N; k += 2) {
            const A first = widen(in.at[k]), second = widen(in.at[k + 1]);
            const A cosine = rotations.at[k / 2].at[0], sine = sign * rotations.at[k / 2].at[1];
            out.at[k] = narrow<T>(first * cosine - second * sine);
            out.at[k + 1] = narrow<T>(second * cosine + first * sine);
        }
        if (V > 1) store(to, out);
        else for (int k = 0; k < N; ++k) to[k * t3] = out.at[k];
    }
}
