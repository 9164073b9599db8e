// Decode rules: attention added up per slot, and the slot of each kv head whose token leaves next.
#include <algorithm>
#include <limits>
#include <vector>

#include "simd.h"
#include "tile.h"

namespace kvtide {
namespace {

// Below this many slots waking other threads costs more than they save.
constexpr int64_t PARALLEL_SLOTS = 64 * 1024;
constexpr int W = KVTIDE_WIDTH;
constexpr float LAST = std::numeric_limits<float>::infinity();
constexpr int32_t NOBODY = std::numeric_limits<int32_t>::max();

typedef int8_t vb __attribute__((vector_size(W)));

template <class V, class T>
V read(const T* from) {
    V r;
    std::memcpy(&r, from, sizeof r);
    return r;
}

// The slots [0, n) of one head. score: null where all are equal.
struct Head {
    const float* score;
    const int32_t* positions;
    const int8_t* kept;
    int64_t n;
};

// What ranks a slot beside its score: tokens after `old` leave last; seen 0: scores are not divided.
struct Ranking {
    int32_t now, old, seen;
};

// The best candidate of each lane.
struct Lanes {
    vf score = LAST - (vf){};
    vi position = NOBODY - (vi){}, slot = -1 - (vi){};

    void meet(vf x, vi p, vi kept, vi at, const Ranking& by) {
        if (by.seen) {
            vi queries = by.now + 1 - p;
            queries = queries < 1 ? (vi){} + 1 : queries;
            queries = queries > by.seen ? (vi){} + by.seen : queries;
            x /= __builtin_convertvector(queries, vf);
        }
        const vi gone = (p < 0) | (kept != 0);
        x = x != x ? -LAST - (vf){} : x;
        x = ((p > by.old) | gone) != 0 ? LAST - (vf){} : x;
        p = gone != 0 ? NOBODY - (vi){} : p;
        const vi better = (x < score) | ((x == score) & (p < position));
        score = better != 0 ? x : score;
        position = better != 0 ? p : position;
        slot = better != 0 ? at : slot;
    }
};

int64_t lowest(const Head& head, const Ranking& by) {
    Lanes best;
    int32_t numbers[W];
    for (int i = 0; i < W; ++i) numbers[i] = i;
    vi at = read<vi>(numbers);
    int64_t i = 0;
    for (; i + W <= head.n; i += W, at += W) {
        const vf x = head.score ? read<vf>(head.score + i) : (vf){};
        best.meet(x, read<vi>(head.positions + i), __builtin_convertvector(read<vb>(head.kept + i), vi), at, by);
    }
    if (i < head.n) {
        float x[W] = {};
        int32_t p[W];
        int8_t kept[W] = {};
        std::fill(p, p + W, -1);
        if (head.score) std::copy(head.score + i, head.score + head.n, x);
        std::copy(head.positions + i, head.positions + head.n, p);
        std::copy(head.kept + i, head.kept + head.n, kept);
        best.meet(read<vf>(x), read<vi>(p), __builtin_convertvector(read<vb>(kept), vi), at, by);
    }
    int lane = 0;
    for (int l = 1; l < W; ++l)
        if (best.score[l] < best.score[lane] ||
            (best.score[l] == best.score[lane] && best.position[l] < best.position[lane]))
            lane = l;
    return best.slot[lane];
}

struct Token {
    double value;
    int32_t position, slot;
    bool operator<(const Token& other) const {
        return value != other.value ? value < other.value : position < other.position;
    }
};

// Marks the `count` highest of one head; false where it has fewer tokens.
bool keep_best(bool* out, const double* values, const int32_t* positions, int64_t count, int64_t slots,
               std::vector<Token>& tokens) {
    tokens.clear();
    for (int64_t i = 0; i < slots; ++i)
        if (positions[i] >= 0) tokens.push_back({values[i], positions[i], (int32_t)i});
    const int64_t leave = (int64_t)tokens.size() - count;
    if (count < 0 || leave < 0) return false;
    const auto first = tokens.begin() + leave;
    // Few that leave are found in one pass with a small heap.
    if (leave * 16 < count) std::partial_sort(tokens.begin(), first, tokens.end());
    else std::nth_element(tokens.begin(), first, tokens.end());
    std::fill(out, out + slots, false);
    std::for_each(first, tokens.end(), [=](const Token& token) { out[token.slot] = true; });
    return true;
}

bool outside(const int32_t* lengths, int64_t count, int64_t slots) {
    return std::any_of(lengths, lengths + count, [=](int32_t n) { return n < 0 || n > slots; });
}

}  // namespace
}  // namespace kvtide

using namespace kvtide;

// [layers][heads][slots] with strides in elements; lengths int32[layers][heads].
extern "C" int kvtide_add_seen(float* sums, int64_t sums_layer, int64_t sums_head, const float* seen,
                               int64_t seen_layer, int64_t seen_head, const int32_t* lengths, int64_t layers,
                               int64_t heads, int64_t slots, int threads) {
    if (outside(lengths, layers * heads, slots)) return BAD_SPAN;
    if (layers * heads * slots < PARALLEL_SLOTS) threads = 1;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t at = 0; at < layers * heads; ++at) {
        float* to = sums + at / heads * sums_layer + at % heads * sums_head;
        const float* from = seen + at / heads * seen_layer + at % heads * seen_head;
        for (int64_t i = 0; i < lengths[at]; ++i) to[i] += from[i];
    }
    return OK;
}

// score null or strided; positions and kept contiguous; recent null or int32[layers][heads]; lengths at most `longest`.
extern "C" int kvtide_lowest(int64_t* out, const float* score, int64_t score_layer, int64_t score_head,
                             const int32_t* positions, const int8_t* kept, const int32_t* lengths,
                             const int32_t* recent, int32_t now, int32_t seen, int64_t layers, int64_t heads,
                             int64_t slots, int64_t longest, int threads) {
    if (outside(lengths, layers * heads, longest)) return BAD_SPAN;
    if (layers * heads * slots < PARALLEL_SLOTS) threads = 1;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t at = 0; at < layers * heads; ++at) {
        const float* own = score ? score + at / heads * score_layer + at % heads * score_head : nullptr;
        const Ranking by{now, recent ? now - recent[at] : now, seen};
        out[at] = lowest({own, positions + at * slots, kept + at * slots, lengths[at]}, by);
    }
    return OK;
}

// [heads][slots], contiguous.
extern "C" int kvtide_highest(bool* out, const double* values, const int32_t* positions, const int32_t* counts,
                              int64_t heads, int64_t slots, int threads) {
    if (heads * slots < PARALLEL_SLOTS) threads = 1;
    bool good = true;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<Token> tokens;
        tokens.reserve(slots);
#pragma omp for schedule(static) reduction(&& : good)
        for (int64_t at = 0; at < heads; ++at) {
            const int64_t begin = at * slots;
            good = keep_best(out + begin, values + begin, positions + begin, counts[at], slots, tokens) && good;
        }
    }
    return good ? OK : BAD_SPAN;
}
