// What HIP C++ says otherwise than CUDA C++: wavefronts of 64 lanes, and shuffles without a mask, which read a lane of
// the same `width` lanes. On a GPU what a shuffle reads of a lane that does not take part is undefined, so all lanes of
// such a group must come to it, and those of a wavefront to a wave barrier.
#pragma once
#include "include/cuda_fp16.h"

#define _Float16 __half

inline uint64_t emulated_group(int width) {
    const uint64_t all = width == 64 ? ~0ull : (1ull << width) - 1;
    return all << (emulated_lane() & ~(width - 1));
}
template <typename X> X __shfl(X value, int source, int width = warpSize) {
    const int base = emulated_lane() & ~(width - 1);
    return emulated_shuffle(emulated_group(width), value, base | (source & (width - 1)));
}
template <typename X> X __shfl_xor(X value, int bits, int width = warpSize) {
    const int lane = emulated_lane(), source = lane ^ bits;
    return emulated_shuffle(emulated_group(width), value, source > (lane | (width - 1)) ? lane : source);
}

// An order of the scheduler and of memory, told to the compiler by two names; lanes run one by one here, so they wait.
#define __builtin_amdgcn_fence(order, scope) static_cast<void>(0)
inline void __builtin_amdgcn_wave_barrier() { emulated::warp(emulated::SYNCWARP, ~0ull, 0); }

template <typename X> void __builtin_nontemporal_store(X value, X* to) { *to = value; }
