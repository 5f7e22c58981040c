// Goes before every GPU source of this package, for NVIDIA's compiler (NVRTC) and AMD's (hipRTC). After it the host
// declares the types and sizes that the source is compiled for, usually T, the dtype of the arrays. Sources compute in
// accumulator<T>::type: double for double, float for all others.
//
// A warp is a group of 32 neighbouring threads, everywhere. AMD's wavefronts have 64 threads, or 32: a warp is then a
// half of one. What the two platforms say differently stands in the first part of this file, and nowhere else.
#if defined(__HIP_PLATFORM_AMD__) || defined(__HIPCC__)
// No header of ROCm's: hipRTC has what is needed, and some of them include C++'s own, which it cannot find.
typedef _Float16 fp16;
struct alignas(2) bf16 { unsigned short bits; };

// To float by rounding to odd: a second rounding, to a narrower type, is then right (Boldo and Melquiond, "Emulation of
// a FMA and correctly rounded sums: proved algorithms using rounding to odd", IEEE Trans. Computers 57, 2008).
__device__ __forceinline__ float to_odd(double x) {
    const float near = (float)x;
    if (x != x || (double)near == x) return near;
    const bool away = (near < 0 ? -(double)near : (double)near) > (x < 0 ? -x : x);
    return __int_as_float((__float_as_int(near) - (away ? 1 : 0)) | 1);
}

__device__ __forceinline__ float from_half(fp16 x) { return (float)x; }
__device__ __forceinline__ float from_half(bf16 x) { return __int_as_float((int)x.bits << 16); }
__device__ __forceinline__ fp16 to_fp16(float x) { return (fp16)x; }
__device__ __forceinline__ fp16 to_fp16(double x) { return (fp16)to_odd(x); }
__device__ __forceinline__ bf16 to_bf16(float x) {
    // To nearest even: what falls away is at least the half of the last place that stays, or more where that is odd.
    const unsigned bits = (unsigned)__float_as_int(x);
    if (x != x) return bf16{0x7fff};
    return bf16{(unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
__device__ __forceinline__ bf16 to_bf16(double x) { return to_bf16(to_odd(x)); }

// The value that thread `lane` of the warp has, and the one of the thread whose number differs by the bits `mask`.
template <typename X> __device__ __forceinline__ X from_lane(X value, int lane) { return __shfl(value, lane, 32); }
template <typename X> __device__ __forceinline__ X from_partner(X value, int mask) { return __shfl_xor(value, mask, 32); }

// The threads of a wavefront run in step; reads before stay before, and writes behind stay behind.
__device__ __forceinline__ void wait_for_warp() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

// x + y, where x or y may be a product: its rounding stays, and no fused operation takes it up.
template <typename X> __device__ __forceinline__ X rounded_sum(X x, X y) {
#pragma clang fp contract(off)
    return x + y;
}

// A store of what nobody reads while it would be in cache; the compiler takes it for its own vectors only.
template <typename W> __device__ __forceinline__ void store_streaming(W* to, W bits) {
    __builtin_nontemporal_store(bits, to);
}
__device__ __forceinline__ void store_streaming(uint2* to, uint2 bits) {
    typedef unsigned words __attribute__((vector_size(8)));
    __builtin_nontemporal_store(words{bits.x, bits.y}, reinterpret_cast<words*>(to));
}
__device__ __forceinline__ void store_streaming(uint4* to, uint4 bits) {
    typedef unsigned words __attribute__((vector_size(16)));
    __builtin_nontemporal_store(words{bits.x, bits.y, bits.z, bits.w}, reinterpret_cast<words*>(to));
}
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef __half fp16;
typedef __nv_bfloat16 bf16;

__device__ __forceinline__ float from_half(fp16 x) { return __half2float(x); }
__device__ __forceinline__ float from_half(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ fp16 to_fp16(float x) { return __float2half_rn(x); }
__device__ __forceinline__ fp16 to_fp16(double x) { return __double2half(x); }
__device__ __forceinline__ bf16 to_bf16(float x) { return __float2bfloat16_rn(x); }
__device__ __forceinline__ bf16 to_bf16(double x) { return __double2bfloat16(x); }

// The value that thread `lane` of the warp has, and the one of the thread whose number differs by the bits `mask`.
template <typename X> __device__ __forceinline__ X from_lane(X value, int lane) {
    return __shfl_sync(0xffffffffu, value, lane);
}
template <typename X> __device__ __forceinline__ X from_partner(X value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
}

__device__ __forceinline__ void wait_for_warp() { __syncwarp(); }

// x + y, where x or y may be a product: its rounding stays, and no fused operation takes it up.
__device__ __forceinline__ float rounded_sum(float x, float y) { return __fadd_rn(x, y); }
__device__ __forceinline__ double rounded_sum(double x, double y) { return __dadd_rn(x, y); }

// A store of what nobody reads while it would be in cache.
template <typename W> __device__ __forceinline__ void store_streaming(W* to, W bits) { __stcs(to, bits); }
#endif

// The compilers at run time have no <math.h>.
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
__device__ __forceinline__ float widen(fp16 x) { return from_half(x); }
__device__ __forceinline__ float widen(bf16 x) { return from_half(x); }

template <typename X> __device__ __forceinline__ X narrow(double x) { return (X)x; }
template <typename X> __device__ __forceinline__ X narrow(float x) { return (X)x; }
template <> __device__ __forceinline__ fp16 narrow<fp16>(float x) { return to_fp16(x); }
template <> __device__ __forceinline__ bf16 narrow<bf16>(float x) { return to_bf16(x); }
template <> __device__ __forceinline__ fp16 narrow<fp16>(double x) { return to_fp16(x); }
template <> __device__ __forceinline__ bf16 narrow<bf16>(double x) { return to_bf16(x); }

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
    store_streaming(reinterpret_cast<word*>(to), bits);
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
        for (int offset = 16; offset > 0; offset /= 2) value[n] += from_partner(value[n], offset);
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
        for (int offset = 16; offset > 0; offset /= 2) value[n] += from_partner(value[n], offset);
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
    for (int offset = 16; offset > 0; offset /= 2) value = max(value, from_partner(value, offset));
    if (blockDim.x <= 32) return value;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    __syncthreads();
    if (lane == 0) shared[warp] = value;
    __syncthreads();
    value = lane < warps ? shared[lane] : shared[0];
    for (int offset = 16; offset > 0; offset /= 2) value = max(value, from_partner(value, offset));
    return value;
}
