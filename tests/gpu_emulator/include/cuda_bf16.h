#pragma once
#include "half_on_host.h"

HALF_TYPE(__nv_bfloat16, emulated_float_to_bfloat16, emulated_bfloat16_to_float)
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat16 __double2bfloat16(double x) { return __nv_bfloat16(x); }
inline float __bfloat162float(__nv_bfloat16 x) { return (float)x; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { __nv_bfloat16 b; b.bits = x; return b; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 x) { return {(float)x.x, (float)x.y}; }
inline float __low2float(__nv_bfloat162 x) { return (float)x.x; }
inline float __high2float(__nv_bfloat162 x) { return (float)x.y; }
