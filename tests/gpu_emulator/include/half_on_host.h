// Rounding to 16-bit floats, to nearest even, as CUDA does it: a NaN becomes 0x7FFF.
#pragma once
#include <stdint.h>
#include <string.h>

inline float emulated_odd(double x) {
    // To float by rounding to odd: a second rounding to a narrower type is then right.
    float f = (float)x;
    if (x != x || (double)f == x) return f;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    const bool away = (f < 0 ? -(double)f : (double)f) > (x < 0 ? -x : x);
    if (away) bits--;  // towards zero
    bits |= 1;
    memcpy(&f, &bits, 4);
    return f;
}

inline uint16_t emulated_float_to_half(float f) {
    uint32_t x;
    memcpy(&x, &f, 4);
    const uint32_t sign = x >> 16 & 0x8000, magnitude = x & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return 0x7FFF;
    if (magnitude >= 0x47800000) return sign | 0x7C00;
    if (magnitude < 0x33000000) return sign;  // less than half of the smallest
    const int exponent = (int)(magnitude >> 23);
    const uint32_t mantissa = (magnitude & 0x7FFFFF) | 0x800000;
    const int shift = exponent < 113 ? 126 - exponent : 13;
    uint32_t result = mantissa >> shift;
    const uint32_t rest = mantissa & ((1u << shift) - 1), middle = 1u << (shift - 1);
    if (rest > middle || (rest == middle && result & 1)) result++;
    if (exponent >= 113) result += (uint32_t)(exponent - 113) << 10;  // the leading one counts for the last
    return (uint16_t)(sign | result);
}

inline float emulated_half_to_float(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16;
    uint32_t exponent = h >> 10 & 31, mantissa = h & 0x3FF, x;
    if (exponent == 31) {
        x = sign | 0x7F800000 | mantissa << 13;
    } else if (exponent) {
        x = sign | (exponent + 112) << 23 | mantissa << 13;
    } else if (mantissa) {
        exponent = 113;
        while (!(mantissa & 0x400)) mantissa <<= 1, exponent--;
        x = sign | exponent << 23 | (mantissa & 0x3FF) << 13;
    } else {
        x = sign;
    }
    float f;
    memcpy(&f, &x, 4);
    return f;
}

inline uint16_t emulated_float_to_bfloat16(float f) {
    uint32_t x;
    memcpy(&x, &f, 4);
    if ((x & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF;
    return (uint16_t)((x + 0x7FFF + (x >> 16 & 1)) >> 16);
}

inline float emulated_bfloat16_to_float(uint16_t b) {
    const uint32_t x = (uint32_t)b << 16;
    float f;
    memcpy(&f, &x, 4);
    return f;
}

// Conversions as CUDA has them; arithmetic is refused, since kernels here compute in float.
#define HALF_TYPE(name, encode, decode)                                                              \
    struct alignas(2) name {                                                                         \
        uint16_t bits;                                                                               \
        name() = default;                                                                            \
        name(float x) : bits(encode(x)) {}                                                           \
        name(double x) : bits(encode(emulated_odd(x))) {}                                            \
        name(int x) : name((double)x) {}                                                             \
        name(unsigned x) : name((double)x) {}                                                        \
        name(long long x) : name((double)x) {}                                                       \
        operator float() const { return decode(bits); }                                              \
    };                                                                                               \
    template <> struct emulated::type_word<name> { static const char* get() { return "h_" #name; } };   \
    name operator+(name, name) = delete;                                                             \
    name operator-(name, name) = delete;                                                             \
    name operator*(name, name) = delete;                                                             \
    name operator/(name, name) = delete;                                                             \
    bool operator<(name, name) = delete;                                                             \
    bool operator>(name, name) = delete;                                                             \
    bool operator==(name, name) = delete;                                                            \
    name& operator+=(name&, name) = delete;                                                          \
    struct alignas(4) name##2 { name x, y; };
