// CUDA C++ or, with EMULATED_AMD, HIP C++ on the host: every thread of a block is a fiber, which runs alone until it comes to a barrier.
//
// Threads between two barriers run in an order that changes from round to round (forward, backward, shuffled), as do
// the blocks, so that a missing barrier shows. Warp functions hold the lanes of their mask together, and no others.
// Shared memory is NaN at the start of each block. Compiled with -fsanitize=..., whose reports end up here.
#pragma once
#include <float.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <tuple>
#include <type_traits>
#include <utility>

#define __global__ __attribute__((visibility("hidden")))
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __grid_constant__
#ifdef EMULATED_AMD
#define __HIPCC__ 1
#define __HIP_PLATFORM_AMD__ 1
#define warpSize 64
#else
#define __CUDA_ARCH__ 900
#define warpSize 32
#endif

// NVRTC has no <math.h>, <float.h> and <limits.h>: these names do not exist there (1 / 0 and __int_as_float do)
#undef INFINITY
#undef NAN
#undef HUGE_VAL
#undef HUGE_VALF
#undef M_PI
#undef M_SQRT2
#undef M_SQRT1_2
#undef M_2_SQRTPI
#undef FLT_MAX
#undef FLT_MIN
#undef FLT_EPSILON
#undef DBL_MAX
#undef DBL_EPSILON
#undef INT_MAX
#undef INT_MIN
#undef LLONG_MAX
#undef LLONG_MIN
#undef UINT_MAX

struct uint3 { unsigned x, y, z; };
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
#define VECTOR(T, name, align2, align4)                                                              \
    struct alignas(align2) name##2 { T x, y; };                                                      \
    struct name##3 { T x, y, z; };                                                                   \
    struct alignas(align4) name##4 { T x, y, z, w; };                                                \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                       \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                               \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
VECTOR(float, float, 8, 16)
VECTOR(double, double, 16, 16)
VECTOR(int, int, 8, 16)
VECTOR(long long, longlong, 16, 16)
VECTOR(unsigned char, uchar, 2, 4)
VECTOR(unsigned short, ushort, 4, 8)
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
#undef VECTOR

__attribute__((visibility("hidden"))) uint3 threadIdx, blockIdx;
__attribute__((visibility("hidden"))) dim3 blockDim, gridDim;

// -- fibers

namespace emulated {

constexpr int STACK = 128 << 10, MOST = 1024;  // as in compiler.py
enum State { READY, BLOCK, WARP, DONE };
enum Kind { SYNCWARP, SHUFFLE, BALLOT, SYNCTHREADS };

struct Fiber {
    void* sp;
    uint3 index;
    State state;
    Kind kind;
    int stack;
    uint64_t mask;  // of a warp function: its lanes
    int source;     // of a shuffle: the lane that is read
    uint64_t value, result;
};

// The compiler's checks are for the kernels; here they would take half of the time.
#define EMULATED static __attribute__((unused, no_sanitize("undefined")))
struct Warp { uint64_t alive, waiting; };  // lanes that have not ended, lanes in a warp function

EMULATED Fiber fibers[MOST];
EMULATED Warp warps[MOST / 32];
EMULATED int threads, running, alive, at_barrier, free_stacks[MOST], free_count;
EMULATED char* stacks;
EMULATED void* scheduler_sp;
EMULATED char problem[512];
EMULATED uint64_t randomness;
EMULATED void (*body)(void*);
EMULATED void* body_data;
EMULATED unsigned long long switches;

EMULATED void complain(const char* format, long long a = 0, long long b = 0, const char* text = "") {
    if (problem[0]) return;
    int n = snprintf(problem, sizeof problem, "block (%u, %u, %u), thread (%u, %u, %u): ", blockIdx.x, blockIdx.y,
                     blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z);
    n += snprintf(problem + n, sizeof problem - n, format, a, b);
    snprintf(problem + n, sizeof problem - n, "%s", text);
}

EMULATED unsigned draw() {
    randomness = randomness * 6364136223846793005ull + 1442695040888963407ull;
    return (unsigned)(randomness >> 33);
}

#if defined(__x86_64__)
extern "C" void emulated_switch(void** save, void* load);
asm(R"(
.text
.local emulated_switch
.type emulated_switch, @function
emulated_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulated_switch, .-emulated_switch
)");
inline void switch_to(void** save, void* load) {
    switches++;
    emulated_switch(save, load);
    asm volatile("" ::: "memory");
}
EMULATED void* new_stack(char* bottom, void (*start)()) {
    void** top = (void**)((uintptr_t)(bottom + STACK) & ~(uintptr_t)15);
    *--top = nullptr;
    *--top = (void*)start;  // where the first `ret` goes; the stack is then as behind a call
    for (int i = 0; i < 6; i++) *--top = nullptr;
    return top;
}
#else
}  // namespace emulated
#include <ucontext.h>
namespace emulated {
EMULATED ucontext_t contexts[MOST], *scheduler_context;
EMULATED int context_count;
inline void switch_to(void** save, void* load) {
    ucontext_t here;
    *save = &here;
    switches++;
    swapcontext(&here, (ucontext_t*)load);
    asm volatile("" ::: "memory");
}
EMULATED void* new_stack(char* bottom, void (*start)()) {
    ucontext_t* context = &contexts[(bottom - stacks) / STACK];
    getcontext(context);
    context->uc_stack.ss_sp = bottom;
    context->uc_stack.ss_size = STACK;
    context->uc_link = nullptr;
    makecontext(context, start, 0);
    return context;
}
#endif

EMULATED void leave(State state) {
    fibers[running].state = state;
    switch_to(&fibers[running].sp, scheduler_sp);
}

EMULATED void abandon() {
    // The launch ends here; what is on the stack is lost.
    leave(DONE);
    abort();
}

EMULATED void at_invalid_address(int, siginfo_t* info, void*) {
    complain("an address that is no memory: %llx", (long long)info->si_addr);
    abandon();
}

EMULATED void fiber_main() {
    body(body_data);
    leave(DONE);
    abort();
}

EMULATED void release_warp(int first, uint64_t mask) {
    // Let the lanes of `mask` go on once all that still run have come to the same function.
    Warp& whole = warps[first / warpSize];
    if ((whole.waiting & mask) != (whole.alive & mask)) return;
    const int end = first + warpSize < threads ? first + warpSize : threads;
    Kind kind = SYNCWARP;
    bool some = false;
    for (int i = first; i < end; i++)
        if (mask >> (i - first) & 1 && fibers[i].state != DONE) {
            if (fibers[i].mask != mask) return;
            if (some && fibers[i].kind != kind) {
                complain("the lanes of a warp are in different functions");
                return;
            }
            kind = fibers[i].kind;
            some = true;
        }
    uint64_t ballot = 0;
    for (int i = first; i < end; i++)
        if (mask >> (i - first) & 1 && fibers[i].state == WARP && fibers[i].value) ballot |= 1ull << (i - first);
    for (int i = first; i < end; i++) {
        Fiber& fiber = fibers[i];
        if (!(mask >> (i - first) & 1) || fiber.state != WARP) continue;
        if (kind == BALLOT) fiber.result = ballot;
        if (kind == SHUFFLE) {
            const int j = first + fiber.source;
            const bool there = mask >> fiber.source & 1 && j < end && fibers[j].state != DONE;
            fiber.result = there ? fibers[j].value : ~0ull;  // undefined in CUDA
        }
    }
    for (int i = first; i < end; i++)
        if (mask >> (i - first) & 1 && fibers[i].state == WARP) fibers[i].state = READY;
    whole.waiting &= ~mask;
}

EMULATED uint64_t warp(Kind kind, uint64_t mask, uint64_t value, int source = 0) {
    const int first = running & ~(warpSize - 1);
    Fiber& fiber = fibers[running];
    if (!(mask >> (running - first) & 1)) complain("a lane that is not in the mask %llx of its warp function", mask);
    fiber.kind = kind;
    fiber.mask = mask;
    fiber.value = value;
    fiber.source = source;
    leave(WARP);
    return fiber.result;
}

// -- shared memory: a slot for each declaration, between guards

constexpr int ARENA = 256 << 10, GUARD = 64, SLOTS = 64;
struct Slot { const void* key; int start, size; };
alignas(128) EMULATED unsigned char arena[ARENA];
EMULATED Slot slots[SLOTS];
EMULATED int slot_count, arena_used, dynamic_bytes;

EMULATED void* place(const void* key, int size, int align) {
    for (int i = 0; i < slot_count; i++)
        if (slots[i].key == key) return arena + slots[i].start;
    int start = (arena_used + GUARD + align - 1) / align * align;
    if (slot_count == SLOTS || start + size + GUARD > ARENA) {
        complain("too much shared memory");
        return arena;
    }
    slots[slot_count++] = {key, start, size};
    arena_used = start + size + GUARD;
    return arena + start;
}

EMULATED void* dynamic() {
    static char key;
    return place(&key, dynamic_bytes, 128);
}

EMULATED void check_shared() {
    int end = 0, total = 0;
    for (int i = 0; i <= slot_count; i++) {
        int next = i < slot_count ? slots[i].start : arena_used;
        for (int j = end; j < next; j++)
            if (arena[j] != 0xFF) {
                complain("a write beside an array in shared memory (array %lld)", i);
                break;
            }
        if (i < slot_count) {
            end = next + slots[i].size;
            if (slots[i].size != dynamic_bytes) total += slots[i].size;
        }
    }
    if (total > 48 << 10) complain("%lld bytes of static shared memory, more than 48 KiB", total);
}

// -- one launch

EMULATED void run_fiber(int i) {
    Fiber& fiber = fibers[i];
    if (fiber.stack < 0) {
        fiber.stack = free_stacks[--free_count];
        fiber.sp = new_stack(stacks + (long long)fiber.stack * STACK, fiber_main);
    }
    running = i;
    threadIdx = fiber.index;
    switch_to(&scheduler_sp, fiber.sp);
    const int first = i & ~(warpSize - 1);
    Warp& whole = warps[first / warpSize];
    const uint64_t lane = 1ull << (i - first);
    if (fiber.state == DONE) {
        free_stacks[free_count++] = fiber.stack;
        alive--;
        whole.alive &= ~lane;
        for (int j = first; whole.waiting && j < first + warpSize && j < threads; j++)  // they may wait for this one alone
            if (fibers[j].state == WARP) release_warp(first, fibers[j].mask);
    } else if (fiber.state == BLOCK) {
        at_barrier++;
    } else {
        whole.waiting |= lane;
        release_warp(first, fiber.mask);
    }
}

EMULATED void run_block() {
    slot_count = arena_used = 0;
    int count = 0;
    free_count = 0;
    for (int i = threads - 1; i >= 0; i--) free_stacks[free_count++] = i;
    for (unsigned z = 0; z < blockDim.z; z++)
        for (unsigned y = 0; y < blockDim.y; y++)
            for (unsigned x = 0; x < blockDim.x; x++, count++) {
                fibers[count] = Fiber();
                fibers[count].index = {x, y, z};
                fibers[count].state = READY;
                fibers[count].stack = -1;
            }
    for (int i = 0; i < threads; i += warpSize)
        warps[i / warpSize] = {threads - i < warpSize ? (1ull << (threads - i)) - 1 : ~0ull >> (64 - warpSize), 0};
    alive = threads;
    at_barrier = 0;
    int order[MOST];
    while (alive && !problem[0]) {
        const unsigned way = draw() % 3;
        int ready = 0;
        for (int i = 0; i < threads; i++)
            if (fibers[i].state == READY) order[ready++] = i;
        if (way == 1) std::reverse(order, order + ready);
        if (way == 2)
            for (int i = ready - 1; i > 0; i--) std::swap(order[i], order[(uint64_t)draw() * (i + 1) >> 31]);
        for (int i = 0; i < ready && !problem[0]; i++)
            while (fibers[order[i]].state == READY && !problem[0]) run_fiber(order[i]);
        if (alive && at_barrier == alive) {
            uint64_t total = 0;
            for (int i = 0; i < threads; i++) total += fibers[i].state == BLOCK && fibers[i].value;
            for (int i = 0; i < threads; i++)
                if (fibers[i].state == BLOCK) {
                    fibers[i].result = total | (uint64_t)at_barrier << 32;
                    fibers[i].state = READY;
                }
            at_barrier = 0;
        } else if (!ready && !problem[0]) {
            for (int i = 0; i < threads; i++)
                if (fibers[i].state == WARP) {
                    threadIdx = fibers[i].index;
                    complain("a warp function with the mask %llx waits for lanes that never come", fibers[i].mask);
                }
            complain("%lld of %lld threads wait at a barrier for the others", at_barrier, alive);
        }
    }
    check_shared();
    memset(arena, 0xFF, arena_used);
}

EMULATED const char* launch(void (*function)(void*), void* data, const unsigned* shape, int dynamic, uint64_t seed,
                            char* memory) {
    if (!stacks) memset(arena, 0xFF, ARENA);
    stacks = memory;  // STACK * MOST bytes
    gridDim = dim3(shape[0], shape[1], shape[2]);
    blockDim = dim3(shape[3], shape[4], shape[5]);
    threads = shape[3] * shape[4] * shape[5];
    dynamic_bytes = dynamic;
    body = function;
    body_data = data;
    randomness = seed;
    problem[0] = 0;
    struct sigaction ours = {}, before;
    ours.sa_sigaction = at_invalid_address;
    ours.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &ours, &before);
    const uint64_t blocks = (uint64_t)shape[0] * shape[1] * shape[2];
    const unsigned way = draw() % 3;
    uint64_t step = 1;
    if (way == 2 && blocks > 2)  // a step without a common divisor comes by every block
        for (step = blocks / 2 + draw() % (blocks / 2);; step++) {
            uint64_t a = blocks, b = step;
            while (b) std::swap(a %= b, b);
            if (a == 1) break;
        }
    for (uint64_t i = 0; i < blocks && !problem[0]; i++) {
        const uint64_t block = way == 1 ? blocks - 1 - i : (uint64_t)((unsigned __int128)i * step % blocks);
        blockIdx = {(unsigned)(block % shape[0]), (unsigned)(block / shape[0] % shape[1]),
                    (unsigned)(block / shape[0] / shape[1])};
        run_block();
    }
    sigaction(SIGSEGV, &before, nullptr);
    return problem[0] ? problem : nullptr;
}

// -- parameters: their types in words, and a call through an array of pointers

template <typename X> struct type_word {
    static const char* get() {
        static char text[32];
        const char kind = std::is_same<X, bool>::value ? 'b' : std::is_floating_point<X>::value ? 'f'
                        : std::is_unsigned<X>::value ? 'u' : std::is_integral<X>::value || std::is_enum<X>::value ? 'i' : 'V';
        snprintf(text, sizeof text, "%c%d", kind, (int)sizeof(X));
        return text;
    }
};
template <> struct type_word<void> { static const char* get() { return "void"; } };
template <typename X> struct type_word<X*> {
    static const char* get() {
        static char text[48];
        snprintf(text, sizeof text, "*%s", type_word<std::remove_cv_t<X>>::get());
        return text;
    }
};

template <typename... P> const char* signature(void (*)(P...)) {
    static char text[2048];
    if (!text[0]) (void)std::initializer_list<int>{(strcat(strcat(text, type_word<std::remove_cv_t<P>>::get()), " "), 0)...};
    return text;
}

template <auto F> struct entry;
template <typename... P, void (*F)(P...)> struct entry<F> {
    template <size_t... I> static void call(void** a, std::index_sequence<I...>) {
        F(*(std::remove_cv_t<P>*)a[I]...);
    }
    static void run(void* data) { call((void**)data, std::index_sequence_for<P...>()); }
};
#define EMULATED_ENTRY(f)                                                                                       \
    extern "C" const char* emulated_signature_##f() { return emulated::signature(&f); }                        \
    extern "C" const char* emulated_launch_##f(void** arguments, const unsigned* shape, int dynamic,           \
                                               unsigned long long seed, char* stacks) {                        \
        return emulated::launch(&emulated::entry<&f>::run, arguments, shape, dynamic, seed, stacks);           \
    }

}  // namespace emulated

// -- barriers and warp functions

inline uint64_t emulated_barrier(int value) {
    emulated::fibers[emulated::running].value = value != 0;
    emulated::leave(emulated::BLOCK);
    return emulated::fibers[emulated::running].result;
}
inline void __syncthreads() { emulated_barrier(0); }
inline int __syncthreads_count(int p) { return (int)(emulated_barrier(p) & 0xFFFFFFFFu); }
inline int __syncthreads_or(int p) { return __syncthreads_count(p) > 0; }
inline int __syncthreads_and(int p) {
    const uint64_t both = emulated_barrier(p);
    return (both & 0xFFFFFFFFu) == both >> 32;
}
template <typename X> X emulated_shuffle(uint64_t mask, X value, int source) {
    static_assert(sizeof(X) <= 8, "a shuffle moves 8 bytes at most");
    uint64_t cell = 0;
    memcpy(&cell, &value, sizeof(X));
    cell = emulated::warp(emulated::SHUFFLE, mask, cell, source);
    memcpy(&value, &cell, sizeof(X));
    return value;
}
inline int emulated_lane() { return emulated::running & (warpSize - 1); }
#ifdef EMULATED_AMD
#include "hip_on_host.h"
#else
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulated::warp(emulated::SYNCWARP, mask, 0); }
inline unsigned __ballot_sync(unsigned mask, int p) { return (unsigned)emulated::warp(emulated::BALLOT, mask, p != 0); }
inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
inline int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, !p) == 0; }

template <typename X> X __shfl_sync(unsigned mask, X value, int source, int width = 32) {
    return emulated_shuffle(mask, value, (emulated_lane() & ~(width - 1)) | (source & (width - 1)));
}
template <typename X> X __shfl_up_sync(unsigned mask, X value, unsigned delta, int width = 32) {
    const int lane = emulated_lane(), source = lane - (int)delta;
    return emulated_shuffle(mask, value, source < (lane & ~(width - 1)) ? lane : source);
}
template <typename X> X __shfl_down_sync(unsigned mask, X value, unsigned delta, int width = 32) {
    const int lane = emulated_lane(), source = lane + (int)delta;
    return emulated_shuffle(mask, value, source > (lane | (width - 1)) ? lane : source);
}
template <typename X> X __shfl_xor_sync(unsigned mask, X value, int bits, int width = 32) {
    const int lane = emulated_lane(), source = lane ^ bits;
    return emulated_shuffle(mask, value, source > (lane | (width - 1)) ? lane : source);
}
template <typename X> void __stcs(X* p, X value) { *p = value; }
template <typename X> void __stcg(X* p, X value) { *p = value; }
template <typename X> void __stwt(X* p, X value) { *p = value; }
#endif
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __trap() {
    emulated::complain("__trap");
    emulated::abandon();
}

// -- arithmetic

#define SMALLER(X) inline X min(X a, X b) { return b < a ? b : a; } inline X max(X a, X b) { return a < b ? b : a; }
SMALLER(int) SMALLER(unsigned) SMALLER(long) SMALLER(unsigned long) SMALLER(long long) SMALLER(unsigned long long)
#undef SMALLER
inline float min(float a, float b) { return fminf(a, b); }  // of a number and a NaN the number, as CUDA
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(float a, double b) { return fmin(a, b); }
inline double min(double a, float b) { return fmin(a, b); }
inline double max(float a, double b) { return fmax(a, b); }
inline double max(double a, float b) { return fmax(a, b); }

inline float rsqrtf(float x) { return (float)(1 / sqrt((double)x)); }
inline double rsqrt(double x) { return 1 / sqrt(x); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline float exp10f(float x) { return powf(10, x); }
inline double exp10(double x) { return pow(10, x); }
inline double normcdf(double x) { return 0.5 * erfc(-x * 0.70710678118654752440); }
inline float normcdff(float x) { return (float)normcdf((double)x); }
inline float erfcxf(float x) { return (float)(exp((double)x * x) * erfc((double)x)); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanhf(float x) { return tanhf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dsub_rn(double x, double y) { return x - y; }
inline double __ddiv_rn(double x, double y) { return x / y; }
inline double __dsqrt_rn(double x) { return sqrt(x); }
inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }
inline double sinpi(double x) { return sin(3.14159265358979323846 * x); }
inline double cospi(double x) { return cos(3.14159265358979323846 * x); }
inline float __int2float_rn(int x) { return (float)x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }
inline int __float2int_rn(float x) { return (int)rintf(x); }
inline int __float2int_rd(float x) { return (int)floorf(x); }
inline float __double2float_rn(double x) { return (float)x; }

template <typename To, typename From> To emulated_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline int __float_as_int(float x) { return emulated_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return emulated_bits<unsigned>(x); }
inline float __int_as_float(int x) { return emulated_bits<float>(x); }
inline float __uint_as_float(unsigned x) { return emulated_bits<float>(x); }
inline long long __double_as_longlong(double x) { return emulated_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return emulated_bits<double>(x); }
inline unsigned __umulhi(unsigned x, unsigned y) { return (unsigned)((uint64_t)x * y >> 32); }
inline int __mulhi(int x, int y) { return (int)((int64_t)x * y >> 32); }
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
    return (unsigned long long)((unsigned __int128)x * y >> 64);
}
inline long long __mul64hi(long long x, long long y) { return (long long)((__int128)x * y >> 64); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)((((uint64_t)high << 32 | low) << (shift & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((uint64_t)high << 32 | low) >> (shift & 31));
}
inline float __saturatef(float x) { return x != x ? 0 : x < 0 ? 0 : x > 1 ? 1 : x; }

template <typename X> X __ldg(const X* p) { return *p; }
template <typename X> X __ldcs(const X* p) { return *p; }
template <typename X> X __ldca(const X* p) { return *p; }
template <typename X> X __ldcg(const X* p) { return *p; }

// atomics of integers only: sums of floats in any order differ from run to run
#define ATOMIC(X)                                                                                     \
    inline X atomicAdd(X* p, X v) { X old = *p; *p = old + v; return old; }                           \
    inline X atomicMax(X* p, X v) { X old = *p; *p = max(old, v); return old; }                       \
    inline X atomicMin(X* p, X v) { X old = *p; *p = min(old, v); return old; }                       \
    inline X atomicOr(X* p, X v) { X old = *p; *p = old | v; return old; }                            \
    inline X atomicAnd(X* p, X v) { X old = *p; *p = old & v; return old; }                           \
    inline X atomicExch(X* p, X v) { X old = *p; *p = v; return old; }                                \
    inline X atomicCAS(X* p, X expected, X v) { X old = *p; if (old == expected) *p = v; return old; }
ATOMIC(int) ATOMIC(unsigned) ATOMIC(unsigned long long)
#undef ATOMIC

// -- reports of the compiler's checks (-fsanitize): the first one is the launch's error

struct EmulatedLocation { const char* file; unsigned line, column; };
struct EmulatedTypeCheck { EmulatedLocation where; void* type; unsigned char log_alignment, kind; };
#define REPORT(name, text)                                                                                     \
    extern "C" __attribute__((visibility("hidden"), used)) inline void __ubsan_handle_##name(                  \
        EmulatedLocation* where, size_t, size_t) {                                                             \
        emulated::complain("line %lld: " text, where->line);                                                   \
        emulated::abandon();                                                                                   \
    }
REPORT(out_of_bounds, "an index outside its array")
REPORT(shift_out_of_bounds, "a shift by more than the width")
REPORT(divrem_overflow, "a division by zero")
REPORT(add_overflow, "an integer overflow")
REPORT(sub_overflow, "an integer overflow")
REPORT(mul_overflow, "an integer overflow")
REPORT(negate_overflow, "an integer overflow")
REPORT(vla_bound_not_positive, "an array of negative size")
REPORT(float_cast_overflow, "a number that the integer type does not hold")
REPORT(load_invalid_value, "an invalid bool")
#undef REPORT
extern "C" __attribute__((visibility("hidden"), used)) inline void __ubsan_handle_type_mismatch_v1(
    EmulatedTypeCheck* check, size_t pointer) {
    if (!pointer) emulated::complain("line %lld: a null pointer", check->where.line);
    else emulated::complain("line %lld: an address that is no multiple of %lld", check->where.line,
                            1ll << check->log_alignment);
    emulated::abandon();
}
extern "C" __attribute__((visibility("hidden"), used)) inline void __ubsan_handle_pointer_overflow(
    EmulatedLocation* where, size_t base, size_t) {
    emulated::complain("line %lld: a pointer far outside of its array", where->line);
    emulated::abandon();
}
extern "C" __attribute__((visibility("hidden"), used)) inline void __ubsan_handle_builtin_unreachable(
    EmulatedLocation* where) {
    emulated::complain("line %lld: unreachable", where->line);
    emulated::abandon();
}
