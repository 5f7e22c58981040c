// Dropout with the random bits of Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11),
// as numpy.random.Philox counts: block b of 4 x 64 bits has the counter (b + 1, step, replica, microbatch), and element
// i the 16-bit integer i of the stream, lowest bits first. Compiled for T, the dtype, and V, elements of one word of
// memory.
typedef accumulator<T>::type A;
typedef unsigned long long u64;
typedef unsigned char flag;

struct Philox {
    u64 key0, key1, step, replica, microbatch;

    // Bit j: whether the j-th of the 16 integers of a block reaches the threshold.
    __device__ __forceinline__ unsigned reached(u64 block, unsigned threshold) const {
        u64 c[4] = {block + 1, step, replica, microbatch}, k0 = key0, k1 = key1;
#pragma unroll
        for (int round = 0; round < 10; ++round) {
            const u64 m0 = 0xD2E7470EE14C6C93ull, m1 = 0xCA5A826395121157ull;
            const u64 high0 = __umul64hi(m0, c[0]), high1 = __umul64hi(m1, c[2]);
            const u64 low0 = m0 * c[0], low1 = m1 * c[2];
            c[0] = high1 ^ c[1] ^ k0;
            c[1] = low1;
            c[2] = high0 ^ c[3] ^ k1;
            c[3] = low0;
            k0 += 0x9E3779B97F4A7C15ull;
            k1 += 0xBB67AE8584CAA73Bull;
        }
        unsigned bits = 0;
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            const unsigned drawn = c[j / 4] >> (j % 4 * 16) & 0xffff;
            bits |= (unsigned)(drawn >= threshold) << j;
        }
        return bits;
    }
};

// keep = whether the random integer of an element reaches the threshold; y = keep ? x factor : x 0. A warp has 32
// blocks of 16 elements: each lane draws one, and passes the bits to the lanes that load those elements. Moves 2 T and
// 1 byte an element.
extern "C" __global__ void __launch_bounds__(256)
    dropout(const T* x, T* y, flag* keep, long long n, u64 key0, u64 key1, u64 step, u64 replica, u64 microbatch,
            int threshold, A factor) {
    const Philox stream{key0, key1, step, replica, microbatch};
    const int lane = threadIdx.x % 32;
    const long long warps = gridDim.x * (256ll / 32);
    for (long long segment = blockIdx.x * (256ll / 32) + threadIdx.x / 32; segment * 512 < n; segment += warps) {
        const unsigned drawn = stream.reached(segment * 32 + lane, threshold);
#pragma unroll
        for (int j = 0; j < 16 / V; ++j) {
            const int place = (j * 32 + lane) * V;  // of a word within the segment
            const unsigned bits = from_lane(drawn, place / 16) >> (place % 16);
            const long long i = segment * 512 + place;
            if (i + V <= n) {
                const pack<T, V> in = load<V>(x + i);
                pack<T, V> out;
                pack<flag, V> kept;
#pragma unroll
                for (int k = 0; k < V; ++k) {
                    kept.at[k] = bits >> k & 1;
                    out.at[k] = narrow<T>(widen(in.at[k]) * (kept.at[k] ? factor : A(0)));
                }
                store(y + i, out);
                store(keep + i, kept);
            } else {
                for (int k = 0; i + k < n; ++k) {
                    keep[i + k] = bits >> k & 1;
                    y[i + k] = narrow<T>(widen(x[i + k]) * (bits >> k & 1 ? factor : A(0)));
                }
            }
        }
    }
}

struct dy_and_keep { pack<T, V> dy; pack<flag, V> keep; };

// dx = keep ? dy factor : dy 0. Moves 2 T and 1 byte an element.
extern "C" __global__ void __launch_bounds__(256)
    dropout_backward(const T* dy, const flag* keep, T* dx, long long n, A factor) {
    each<2>(n / V, [&](long long i) { return dy_and_keep{load<V>(dy + i * V), load<V>(keep + i * V)}; },
            [&](long long i, const dy_and_keep& in) {
                pack<T, V> out;
#pragma unroll
                for (int k = 0; k < V; ++k) out.at[k] = narrow<T>(widen(in.dy.at[k]) * (in.keep.at[k] ? factor : A(0)));
                store(dx + i * V, out);
            });
    const long long rest = n / V * V;
    each<1>(n - rest, [&](long long i) { return dy[rest + i]; },
            [&](long long i, T in) { dx[rest + i] = narrow<T>(widen(in) * (keep[rest + i] ? factor : A(0))); });
}
