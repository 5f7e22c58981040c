#pragma once
#include "half_on_host.h"

HALF_TYPE(__half, emulated_float_to_half, emulated_half_to_float)
typedef __half half;
typedef __half2 half2;
inline __half __float2half_rn(float x) { return __half(x); }
inline __half __float2half(float x) { return __half(x); }
inline __half __double2half(double x) { return __half(x); }
inline float __half2float(__half x) { return (float)x; }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(unsigned short x) { __half h; h.bits = x; return h; }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline float2 __half22float2(__half2 x) { return {(float)x.x, (float)x.y}; }
inline float __low2float(__half2 x) { return (float)x.x; }
inline float __high2float(__half2 x) { return (float)x.y; }
