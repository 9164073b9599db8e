// Sixteen float lanes on any machine: one AVX-512 register, two AVX2 registers, or four of 128 bits.
#pragma once

#include <cstdint>
#include <cstring>

// Tests reach the path of smaller machines anywhere with -DKVTIDE_WIDTH=4, which also drops the bf16 instructions.
#if !defined(KVTIDE_WIDTH) && defined(__AVX512F__)
#define KVTIDE_WIDTH 16
#elif !defined(KVTIDE_WIDTH) && defined(__AVX2__)
#define KVTIDE_WIDTH 8
#elif !defined(KVTIDE_WIDTH)
#define KVTIDE_WIDTH 4
#endif

#if KVTIDE_WIDTH == 16 && defined(__AVX512BF16__)
#include <immintrin.h>
#define KVTIDE_DPBF16 1
#else
#define KVTIDE_DPBF16 0
#endif

namespace kvtide {

constexpr int LANES = 16;
constexpr int PARTS = LANES / KVTIDE_WIDTH;

typedef float vf __attribute__((vector_size(4 * KVTIDE_WIDTH)));
typedef int32_t vi __attribute__((vector_size(4 * KVTIDE_WIDTH)));
typedef uint32_t vu __attribute__((vector_size(4 * KVTIDE_WIDTH)));

struct F16 {
    vf part[PARTS];
};

#define KVTIDE_EACH _Pragma("GCC unroll 4") for (int i = 0; i < PARTS; ++i)

inline F16 splat(float x) {
    F16 r;
    KVTIDE_EACH r.part[i] = x - (vf){};
    return r;
}

// Part by part: a copy of the whole would go through memory on machines with several parts.
inline F16 load(const float* from) {
    F16 r;
    KVTIDE_EACH std::memcpy(&r.part[i], from + KVTIDE_WIDTH * i, sizeof r.part[i]);
    return r;
}

inline void store(float* to, const F16& x) {
    KVTIDE_EACH std::memcpy(to + KVTIDE_WIDTH * i, &x.part[i], sizeof x.part[i]);
}

inline F16 add(const F16& a, const F16& b) {
    F16 r;
    KVTIDE_EACH r.part[i] = a.part[i] + b.part[i];
    return r;
}

inline F16 mul(const F16& a, const F16& b) {
    F16 r;
    KVTIDE_EACH r.part[i] = a.part[i] * b.part[i];
    return r;
}

// a * b + c, one rounding where the machine has it (-ffp-contract=fast).
inline F16 fma(const F16& a, const F16& b, const F16& c) {
    F16 r;
    KVTIDE_EACH r.part[i] = a.part[i] * b.part[i] + c.part[i];
    return r;
}

inline F16 max(const F16& a, const F16& b) {
    F16 r;
    KVTIDE_EACH r.part[i] = a.part[i] > b.part[i] ? a.part[i] : b.part[i];
    return r;
}

inline float reduce_max(const F16& x) {
    float t[LANES];
    store(t, x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) t[i] = t[i] > t[i + half] ? t[i] : t[i + half];
    return t[0];
}

inline float reduce_add(const F16& x) {
    float t[LANES];
    store(t, x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) t[i] += t[i + half];
    return t[0];
}

// Sixteen words, each a pair of bf16: the lower half is the even element. Both halves as floats.
inline void load_pairs(const uint16_t* from, F16& even, F16& odd) {
    KVTIDE_EACH {
        vu words;
        std::memcpy(&words, from + 2 * KVTIDE_WIDTH * i, sizeof words);
        even.part[i] = (vf)(words << 16);
        odd.part[i] = (vf)(words & 0xffff0000u);
    }
}

// e^x within 1 ulp or so (Cephes polynomial); 0 below the smallest normal number, -infinity included.
inline vf exp_part(vf x) {
    const vf lowest = -87.3f - (vf){}, highest = 88.3f - (vf){};
    vf c = x < lowest ? lowest : x;
    c = c > highest ? highest : c;
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    const vf shifted = c * 1.44269504088896341f + 12582912.0f;
    const vf n = shifted - 12582912.0f;
    const vf r = (c - n * 0.693359375f) - n * -2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const vf power = (vf)(((vi)shifted << 23) + (127 << 23));
    return x < lowest ? (vf){} : p * power;
}

inline F16 exp(const F16& x) {
    F16 r;
    KVTIDE_EACH r.part[i] = exp_part(x.part[i]);
    return r;
}

// tanh to a few ulp: a polynomial near zero, where the exponential form would cancel.
inline F16 tanh(const F16& x) {
    F16 r;
    KVTIDE_EACH {
        const vf v = x.part[i], size = v < 0.0f ? -v : v, z = v * v;
        vf p = z * -5.70498872745e-3f + 2.06390887954e-2f;
        p = p * z + -5.37397155531e-2f;
        p = p * z + 1.33314422036e-1f;
        p = p * z + -3.33332819422e-1f;
        const vf near_zero = p * z * v + v;
        const vf far = 1.0f - 2.0f / (exp_part(size + size) + 1.0f);
        r.part[i] = size < 0.625f ? near_zero : (v < 0.0f ? -far : far);
    }
    return r;
}

inline float bf16_to_float(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float r;
    std::memcpy(&r, &bits, sizeof r);
    return r;
}

// Round to nearest even; a NaN stays a NaN.
inline uint16_t float_to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if (x != x) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace kvtide
