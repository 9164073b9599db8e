// XXH3 of 64 bits, seed 0, with the default secret; of bytes that lie still, or of bytes while they are copied.
//
// Algorithm and constants: Yann Collet's xxHash, doc/xxhash_spec.md, XXH3 algorithm overview. Little-endian machines.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

#if KVTIDE_WIDTH >= 8
#include <immintrin.h>
#endif

namespace kvtide {

// Where hashed bytes go as well: nowhere, through the caches, or past them (64-byte aligned; `fence` afterwards).
enum class Copy { NONE, CACHED, STREAMED };

constexpr bool CAN_STREAM = KVTIDE_WIDTH >= 8;

constexpr int64_t STRIPE = 64, STRIPES_PER_ROUND = 16, PREFETCH_AHEAD = 1024;

alignas(64) constexpr uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

constexpr uint64_t P32_1 = 0x9E3779B1, P32_2 = 0x85EBCA77, P32_3 = 0xC2B2AE3D;
constexpr uint64_t P64_1 = 0x9E3779B185EBCA87, P64_2 = 0xC2B2AE3D27D4EB4F, P64_3 = 0x165667B19E3779F9,
                   P64_4 = 0x85EBCA77C2B2AE63, P64_5 = 0x27D4EB2F165667C5;

inline uint64_t read64(const uint8_t* from) {
    uint64_t x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

inline uint64_t read32(const uint8_t* from) {
    uint32_t x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

inline uint64_t fold(uint64_t a, uint64_t b) {
    const unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

inline uint64_t avalanche(uint64_t h) {
    h = (h ^ h >> 37) * 0x165667919E3779F9;
    return h ^ h >> 32;
}

inline uint64_t avalanche64(uint64_t h) {
    h = (h ^ h >> 33) * P64_2;
    h = (h ^ h >> 29) * P64_3;
    return h ^ h >> 32;
}

inline uint64_t rotate(uint64_t x, int by) { return x << by | x >> (64 - by); }

inline uint64_t mix16(const uint8_t* from, const uint8_t* secret) {
    return fold(read64(from) ^ read64(secret), read64(from + 8) ^ read64(secret + 8));
}

// At most 240 bytes.
inline uint64_t xxh3_short(const uint8_t* from, int64_t n) {
    const uint8_t* end = from + n;
    if (n == 0) return avalanche64(read64(SECRET + 56) ^ read64(SECRET + 64));
    if (n <= 3) {
        const uint64_t mixed = (uint32_t)from[0] << 16 | (uint32_t)from[n / 2] << 24 | end[-1] | (uint32_t)n << 8;
        return avalanche64(mixed ^ (read32(SECRET) ^ read32(SECRET + 4)));
    }
    if (n <= 8) {
        uint64_t h = (read32(end - 4) + (read32(from) << 32)) ^ (read64(SECRET + 8) ^ read64(SECRET + 16));
        h = (h ^ rotate(h, 49) ^ rotate(h, 24)) * 0x9FB21C651E98DF25;
        h = (h ^ ((h >> 35) + (uint64_t)n)) * 0x9FB21C651E98DF25;
        return h ^ h >> 28;
    }
    if (n <= 16) {
        const uint64_t low = read64(from) ^ (read64(SECRET + 24) ^ read64(SECRET + 32));
        const uint64_t high = read64(end - 8) ^ (read64(SECRET + 40) ^ read64(SECRET + 48));
        return avalanche((uint64_t)n + __builtin_bswap64(low) + high + fold(low, high));
    }
    uint64_t h = (uint64_t)n * P64_1;
    if (n <= 128) {
        for (int64_t i = (n - 1) / 32; i >= 0; --i)
            h += mix16(from + 16 * i, SECRET + 32 * i) + mix16(end - 16 * (i + 1), SECRET + 32 * i + 16);
        return avalanche(h);
    }
    for (int64_t i = 0; i < 8; ++i) h += mix16(from + 16 * i, SECRET + 16 * i);
    h = avalanche(h);
    for (int64_t i = 8; i < n / 16; ++i) h += mix16(from + 16 * i, SECRET + 16 * (i - 8) + 3);
    return avalanche(h + mix16(end - 16, SECRET + 136 - 17));
}

// The eight sums of a long hash. `stripe` takes 64 bytes and stores them before it looks at them, so that no compiler
// can read `from`, which may change meanwhile, a second time. AVX-512 would not help: memory is slower than this.
struct Sums {
#if KVTIDE_WIDTH >= 8
    __m256i a[2];

    void load(const uint64_t* from) {
        for (int i = 0; i < 2; ++i) a[i] = _mm256_loadu_si256((const __m256i*)from + i);
    }
    void store(uint64_t* to) const {
        for (int i = 0; i < 2; ++i) _mm256_storeu_si256((__m256i*)to + i, a[i]);
    }

    template <Copy MODE>
    void stripe(const uint8_t* from, uint8_t* to, const uint8_t* secret) {
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            const __m256i x = _mm256_loadu_si256((const __m256i*)from + i);
            if constexpr (MODE == Copy::CACHED) _mm256_storeu_si256((__m256i*)to + i, x);
            if constexpr (MODE == Copy::STREAMED) _mm256_stream_si256((__m256i*)to + i, x);
            const __m256i key = _mm256_xor_si256(x, _mm256_loadu_si256((const __m256i*)secret + i));
            const __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
            a[i] = _mm256_add_epi64(a[i], _mm256_shuffle_epi32(x, _MM_SHUFFLE(1, 0, 3, 2)));
            a[i] = _mm256_add_epi64(a[i], product);
        }
    }

    void scramble(const uint8_t* secret) {
        const __m256i prime = _mm256_set1_epi32((int)P32_1);
        for (int i = 0; i < 2; ++i) {
            __m256i x = _mm256_xor_si256(a[i], _mm256_srli_epi64(a[i], 47));
            x = _mm256_xor_si256(x, _mm256_loadu_si256((const __m256i*)secret + i));
            const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), prime);
            a[i] = _mm256_add_epi64(_mm256_mul_epu32(x, prime), _mm256_slli_epi64(high, 32));
        }
    }
#else
    uint64_t a[8];

    void load(const uint64_t* from) { std::memcpy(a, from, sizeof a); }
    void store(uint64_t* to) const { std::memcpy(to, a, sizeof a); }

    template <Copy MODE>
    void stripe(const uint8_t* from, uint8_t* to, const uint8_t* secret) {
        uint64_t x[8], y[8];
        std::memcpy(x, from, sizeof x);
        std::memcpy(y, secret, sizeof y);
        if constexpr (MODE != Copy::NONE) std::memcpy(to, x, sizeof x);
        for (int i = 0; i < 8; ++i) {
            const uint64_t key = x[i] ^ y[i];
            a[i] += x[i ^ 1] + (uint64_t)(uint32_t)key * (key >> 32);
        }
    }

    void scramble(const uint8_t* secret) {
        for (int i = 0; i < 8; ++i) a[i] = (a[i] ^ a[i] >> 47 ^ read64(secret + 8 * i)) * P32_1;
    }
#endif
};

// More than 240 bytes. What is hashed is what was stored at `to`: every byte of `from` is read once. AHEAD: what follows
// `from` in memory is read next, and asked for.
template <Copy MODE, bool AHEAD>
uint64_t xxh3_long(const uint8_t* from, uint8_t* to, int64_t n) {
    alignas(64) uint64_t sums[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    const int64_t stripes = (n - 1) / STRIPE;  // the last 1 to 64 bytes are hashed as part of the last 64
    Sums all;
    all.load(sums);
    int64_t done = 0;
    for (; done + STRIPES_PER_ROUND < stripes; done += STRIPES_PER_ROUND) {
        for (int64_t i = 0; i < STRIPES_PER_ROUND; ++i) {
            const int64_t at = (done + i) * STRIPE;
            if constexpr (AHEAD) __builtin_prefetch(from + at + PREFETCH_AHEAD);
            all.stripe<MODE>(from + at, to + at, SECRET + 8 * i);
        }
        all.scramble(SECRET + 128);
    }
    for (int64_t i = 0; done + i < stripes - 1; ++i)
        all.stripe<MODE>(from + (done + i) * STRIPE, to + (done + i) * STRIPE, SECRET + 8 * i);
    // The last stripe but one, and the last, which may overlap it: both of one private copy.
    uint8_t end[2 * STRIPE];
    const int64_t start = (stripes - 1) * STRIPE, left = n - start;
    std::memcpy(end, from + start, left);
    asm volatile("" : "+m"(end));  // no second look at `from`
    if (MODE != Copy::NONE) std::memcpy(to + start, end, left);
    all.stripe<Copy::NONE>(end, nullptr, SECRET + 8 * (stripes - 1 - done));
    if (stripes - done == STRIPES_PER_ROUND) all.scramble(SECRET + 128);
    all.stripe<Copy::NONE>(end + left - STRIPE, nullptr, SECRET + 121);
    all.store(sums);
    uint64_t h = (uint64_t)n * P64_1;
    for (int i = 0; i < 4; ++i)
        h += fold(sums[2 * i] ^ read64(SECRET + 11 + 16 * i), sums[2 * i + 1] ^ read64(SECRET + 19 + 16 * i));
    return avalanche(h);
}

template <Copy MODE, bool AHEAD = true>
uint64_t xxh3(const uint8_t* from, uint8_t* to, int64_t n) {
    if (n > 240) return xxh3_long<MODE, AHEAD>(from, to, n);
    uint8_t all[240];
    std::memcpy(all, from, n);
    asm volatile("" : "+m"(all));
    if (MODE != Copy::NONE) std::memcpy(to, all, n);
    return xxh3_short(all, n);
}

}  // namespace kvtide
