// The two products of attention over tiles: logits = q K^T and out += p V, a few query heads per load of K and V.
#pragma once

#include <type_traits>

#include "simd.h"
#include "tile.h"

namespace kvtide {

constexpr int CHUNK_TILES = 4;  // tiles per softmax update: their keys and values stay in the first-level cache
constexpr int CHUNK = CHUNK_TILES * TILE;
constexpr int HEAD_BLOCK = 4;  // query heads that share a load
constexpr int DIM_BLOCK = 4;   // vectors of 16 dims that the accumulators of a block cover

// How queries and weights are held: bf16 pairs where the machine multiplies those, floats otherwise.
template <class E>
using Operand = std::conditional_t<sizeof(E) == 2 && KVTIDE_DPBF16, uint16_t, float>;

inline void prefetch(const void* at) { __builtin_prefetch(at, 0, 3); }

#if KVTIDE_DPBF16
inline __m512i pair_splat(const uint16_t* from) {
    int32_t pair;
    std::memcpy(&pair, from, sizeof pair);
    return _mm512_set1_epi32(pair);
}
inline void dot_pairs(F16& acc, __m512i a, __m512i b) {
    acc.part[0] = _mm512_dpbf16_ps(acc.part[0], (__m512bh)a, (__m512bh)b);
}
#endif

// out[g * CHUNK + n * TILE + t] = q[g] . key t of tiles[n]; q rows are `padded` apart. Reads `ahead` into the cache.
template <class E, int GB, int NT>
void logits(const E* const* tiles, const E* const* ahead, const Operand<E>* q, int padded, float* out) {
    F16 acc[GB][NT] = {};
#if KVTIDE_DPBF16
    if constexpr (sizeof(E) == 2) {
        for (int d = 0; d < padded; d += 2) {
            __m512i keys[NT];
            for (int n = 0; n < NT; ++n) {
                keys[n] = _mm512_loadu_si512(tiles[n] + d * TILE);
                prefetch(ahead[n] + d * TILE);
            }
            for (int g = 0; g < GB; ++g) {
                const __m512i query = pair_splat(q + g * padded + d);
                for (int n = 0; n < NT; ++n) dot_pairs(acc[g][n], keys[n], query);
            }
        }
    } else
#endif
    for (int d = 0; d < padded; d += 2) {
        F16 even[NT], odd[NT];
        for (int n = 0; n < NT; ++n) {
            if constexpr (sizeof(E) == 2) load_pairs(tiles[n] + d * TILE, even[n], odd[n]);
            else even[n] = load(tiles[n] + d * TILE), odd[n] = load(tiles[n] + (d + 1) * TILE);
            prefetch(ahead[n] + d * TILE);
            if constexpr (sizeof(E) == 4) prefetch(ahead[n] + (d + 1) * TILE);
        }
        for (int g = 0; g < GB; ++g) {
            const F16 q0 = splat(q[g * padded + d]), q1 = splat(q[g * padded + d + 1]);
            for (int n = 0; n < NT; ++n) acc[g][n] = fma(odd[n], q1, fma(even[n], q0, acc[g][n]));
        }
    }
    for (int g = 0; g < GB; ++g)
        for (int n = 0; n < NT; ++n) store(out + g * CHUNK + n * TILE, acc[g][n]);
}

// acc[g * padded + d] = acc * decay[g] + sum over tokens of p[g * CHUNK + token] * value, for NV * 16 dims at `acc`.
template <class E, int GB, int NV>
void values(const E* const* tiles, const E* const* ahead, int count, const Operand<E>* p, int padded,
            const float* decay, float* acc) {
    F16 sum[GB][NV] = {};
    for (int n = 0; n < count; ++n) {
        for (int t = 0; t < TILE; t += 2) {
            const Operand<E>* weights = p + n * TILE + t;
            const int64_t row = (int64_t)t * padded;
#if KVTIDE_DPBF16
            if constexpr (sizeof(E) == 2) {
                __m512i v[NV];
                for (int i = 0; i < NV; ++i) {
                    v[i] = _mm512_loadu_si512(tiles[n] + row + i * 2 * LANES);
                    prefetch(ahead[n] + row + i * 2 * LANES);
                }
                for (int g = 0; g < GB; ++g) {
                    const __m512i weight = pair_splat(weights + g * CHUNK);
                    for (int i = 0; i < NV; ++i) dot_pairs(sum[g][i], v[i], weight);
                }
                continue;
            }
#endif
            for (int i = 0; i < NV; ++i) {
                F16 even, odd;
                if constexpr (sizeof(E) == 2) {
                    const int64_t at = row + i * 2 * LANES;
                    load_pairs((const uint16_t*)tiles[n] + at, even, odd);
                    prefetch(ahead[n] + at);
                } else {
                    const int64_t at = row + i * LANES;
                    even = load((const float*)tiles[n] + at), odd = load((const float*)tiles[n] + at + padded);
                    prefetch(ahead[n] + at), prefetch(ahead[n] + at + padded);
                }
                for (int g = 0; g < GB; ++g) {
                    const F16 p0 = splat(weights[g * CHUNK]), p1 = splat(weights[g * CHUNK + 1]);
                    sum[g][i] = fma(odd, p1, fma(even, p0, sum[g][i]));
                }
            }
        }
    }
    for (int g = 0; g < GB; ++g)
        for (int i = 0; i < NV; ++i) {
            float* to = acc + g * padded + i * LANES;
            store(to, fma(load(to), splat(decay[g]), sum[g][i]));
        }
}

template <class E, int GB>
void logits_block(const E* const* tiles, const E* const* ahead, int count, const Operand<E>* q, int padded,
                  float* out) {
    int n = 0;
    for (; n + 2 <= count; n += 2) logits<E, GB, 2>(tiles + n, ahead + n, q, padded, out + n * TILE);
    if (n < count) logits<E, GB, 1>(tiles + n, ahead + n, q, padded, out + n * TILE);
}

template <class E, int GB>
void values_block(const E* const* tiles, const E* const* ahead, int count, const Operand<E>* p, int padded,
                  const float* decay, float* acc) {
    const int per_vector = sizeof(E) == 2 ? 2 * LANES : LANES;
    for (int first = 0; first < padded / LANES; first += DIM_BLOCK) {
        const E *at[CHUNK_TILES], *next[CHUNK_TILES];
        for (int n = 0; n < count; ++n) at[n] = tiles[n] + first * per_vector, next[n] = ahead[n] + first * per_vector;
        float* to = acc + first * LANES;
        switch (padded / LANES - first) {
            case 1: values<E, GB, 1>(at, next, count, p, padded, decay, to); break;
            case 2: values<E, GB, 2>(at, next, count, p, padded, decay, to); break;
            case 3: values<E, GB, 3>(at, next, count, p, padded, decay, to); break;
            default: values<E, GB, 4>(at, next, count, p, padded, decay, to);
        }
    }
}

}  // namespace kvtide
