// Goes before every CUDA source of this package. After it the host declares the types and sizes that
// the source is compiled for, usually T, the dtype of the arrays. Sources compute in accumulator<T>::type: double for
// double, float for all others.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// NVRTC has no <math.h>.
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef NAN
#define NAN __int_as_float(0x7fffffff)
#endif

template <typename X> struct accumulator { typedef float type; };
template <> struct accumulator<double> { typedef double type; };

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename X> __device__ __forceinline__ X narrow(double x) { return (X)x; }
template <typename X> __device__ __forceinline__ X narrow(float x) { return (X)x; }
template <> __device__ __forceinline__ __half narrow<__half>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }
template <> __device__ __forceinline__ __half narrow<__half>(double x) { return __double2half(x); }
template <> __device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(double x) {
    return __double2bfloat16(x);
}

// exp(x) and x / y, as exact as values of type X can show.
template <typename X> __device__ __forceinline__ float exponential(float x) { return __expf(x); }
template <> __device__ __forceinline__ float exponential<float>(float x) { return expf(x); }
template <typename X> __device__ __forceinline__ double exponential(double x) { return exp(x); }
template <typename X> __device__ __forceinline__ float ratio(float x, float y) { return __fdividef(x, y); }
template <> __device__ __forceinline__ float ratio<float>(float x, float y) { return x / y; }
template <typename X> __device__ __forceinline__ double ratio(double x, double y) { return x / y; }

// A few neighbouring elements that move as one word of memory.
template <typename X, int N> struct alignas(sizeof(X) * N) pack { X at[N]; };

// The hardware's words of so many bytes: compilers split copies of other types.
template <int BYTES> struct word_of { struct type { uint4 low, high; }; };
template <> struct word_of<16> { typedef uint4 type; };
template <> struct word_of<8> { typedef uint2 type; };
template <> struct word_of<4> { typedef unsigned type; };
template <> struct word_of<2> { typedef unsigned short type; };
template <> struct word_of<1> { typedef unsigned char type; };

template <int N, typename X> __device__ __forceinline__ pack<X, N> load(const X* from) {
    typedef typename word_of<N * sizeof(X)>::type word;
    const word bits = *reinterpret_cast<const word*>(from);
    pack<X, N> value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

template <int N, typename X> __device__ __forceinline__ void store(X* to, const pack<X, N>& value) {
    typedef typename word_of<N * sizeof(X)>::type word;
    word bits;
    memcpy(&bits, &value, sizeof(bits));
    *reinterpret_cast<word*>(to) = bits;
}

// The same for what nobody reads while it would be in cache.
template <int N, typename X> __device__ __forceinline__ void store_past_cache(X* to, const pack<X, N>& value) {
    typedef typename word_of<N * sizeof(X)>::type word;
    word bits;
    memcpy(&bits, &value, sizeof(bits));
    __stcs(reinterpret_cast<word*>(to), bits);
}

// i / n for i >= 0, n > 0: a short division where that is enough.
__device__ __forceinline__ long long quotient(long long i, long long n) {
    return (i | n) >> 32 ? i / n : (long long)((unsigned)i / (unsigned)n);
}

// For all i in 0 ... count - 1, over all threads of a one-dimensional grid: use(i, fetch(i)), with U fetches under way.
template <int U, typename Fetch, typename Use>
__device__ __forceinline__ void each(long long count, Fetch fetch, Use use) {
    const long long step = (long long)blockDim.x * U;
    for (long long first = blockIdx.x * step + threadIdx.x; first < count; first += gridDim.x * step) {
        decltype(fetch(0ll)) item[U];
#pragma unroll
        for (int u = 0; u < U; ++u)
            if (first + u * blockDim.x < count) item[u] = fetch(first + u * blockDim.x);
#pragma unroll
        for (int u = 0; u < U; ++u)
            if (first + u * blockDim.x < count) use(first + u * blockDim.x, item[u]);
    }
}

// The sums of N values over the blockDim.x threads of a row, in every thread, always in the same order. Rows of one
// warp need no shared memory; longer ones are the whole block, of whole warps, and `shared` holds 32 N values.
template <int N, typename X> __device__ __forceinline__ void add_up(X (&value)[N], X* shared) {
#pragma unroll
    for (int n = 0; n < N; ++n)
        for (int offset = 16; offset > 0; offset /= 2) value[n] += __shfl_xor_sync(0xffffffffu, value[n], offset);
    if (blockDim.x <= 32) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; ++n)
        if (lane == 0) shared[n * 32 + warp] = value[n];
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; ++n) {
        value[n] = lane < warps ? shared[n * 32 + lane] : X(0);
        for (int offset = 16; offset > 0; offset /= 2) value[n] += __shfl_xor_sync(0xffffffffu, value[n], offset);
    }
}

// The same for one value.
template <typename X> __device__ __forceinline__ X add_up(X value, X* shared) {
    X values[1] = {value};
    add_up(values, shared);
    return values[0];
}

template <typename X> __device__ __forceinline__ X largest(X value, X* shared) {
    // The same for the maximum.
    for (int offset = 16; offset > 0; offset /= 2) value = max(value, __shfl_xor_sync(0xffffffffu, value, offset));
    if (blockDim.x <= 32) return value;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    __syncthreads();
    if (lane == 0) shared[warp] = value;
    __syncthreads();
    value = lane < warps ? shared[lane] : shared[0];
    for (int offset = 16; offset > 0; offset /= 2) value = max(value, __shfl_xor_sync(0xffffffffu, value, offset));
    return value;
}
