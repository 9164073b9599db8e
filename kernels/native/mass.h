// Attention mass: the softmax probability that each slot of a kv head got, reduced over the head's query heads.
//
// The exponentials of the forward pass are kept, each relative to the running maximum of its chunk; once the whole
// head's softmax is known, one factor per query head and chunk turns them into probabilities. No logit is computed
// twice.
#pragma once

#include <algorithm>

#include "dots.h"

namespace kvtide {

constexpr int64_t SPLIT = 512;  // slots of one task, counted from slot 0
constexpr int SPLIT_CHUNKS = SPLIT / CHUNK;
static_assert(SPLIT_CHUNKS <= LANES, "one vector holds the maxima of a split");

enum Reduce { UNOBSERVED = 0, GROUP_MEAN = 1, GROUP_MAX = 2 };

// What one split keeps for its mass, per query head: exp(logit - maximum) of each slot and the maximum of each chunk.
struct Kept {
    float *weights, *tops;
    static int64_t floats(int group) { return (int64_t)group * (SPLIT + LANES); }
    Kept(float* at, int group) : weights(at), tops(at + (int64_t)group * SPLIT) {}
};

// Tile `tile` of a split as mass: weights times their query head's factor in lane `chunk` of factors.
inline F16 tile_mass(const Kept& kept, int group, bool mean, int tile) {
    const float* weights = kept.weights + tile * TILE;
    const float* factors = kept.tops + tile / CHUNK_TILES;
    F16 mass = mul(load(weights), splat(factors[0]));
    for (int g = 1; g < group; ++g) {
        const F16 weight = load(weights + g * SPLIT), factor = splat(factors[g * LANES]);
        mass = mean ? fma(weight, factor, mass) : max(mul(weight, factor), mass);
    }
    return mass;
}

// Writes the mass of slots [begin, end) of one split to mass[begin] onwards and touches no other entry. top and sum:
// maximum and sum, sinks included, of each query head's whole softmax. Turns the maxima in `kept` into factors.
inline void write_mass(const Kept& kept, int group, bool mean, const float* top, const float* sum, int64_t begin,
                       int64_t end, float* mass) {
    for (int g = 0; g < group; ++g) {
        float* tops = kept.tops + g * LANES;
        const float share = 1.0f / (mean ? sum[g] * group : sum[g]);
        store(tops, mul(exp(add(load(tops), splat(-top[g]))), splat(share)));
    }
    const int64_t base = begin / SPLIT * SPLIT;
    for (int64_t at = begin / TILE * TILE; at < end; at += TILE) {
        const F16 found = tile_mass(kept, group, mean, (int)((at - base) / TILE));
        if (at >= begin && at + TILE <= end) {
            store(mass + at, found);
            continue;
        }
        float edge[TILE];
        store(edge, found);
        const int64_t first = std::max(at, begin), last = std::min(at + TILE, end);
        std::copy(edge + (first - at), edge + (last - at), mass + first);
    }
}

}  // namespace kvtide
