// Column sums of causal attention: how much attention each key gets from the queries of one piece of a prompt.
//
// The softmax denominator of every query is known, so one pass does: dot products, exponentials and their sums over
// rows stay in registers. A task is a block of keys of one kv head; it packs them once and goes through the queries
// that see them, in order, so the result does not depend on the number of threads.
#include <algorithm>
#include <cstring>

#include "dots.h"
#include "scratch.h"

namespace kvtide {
namespace {

// Rows and key tiles of one product: ROWS * TILES accumulators of 16 lanes, as many as the registers hold.
constexpr int ROWS = KVTIDE_WIDTH == 4 ? 2 : 6;
constexpr int TILES = KVTIDE_WIDTH == 16 ? 4 : 1;
constexpr int BLOCK_TILES = 4;
constexpr int BLOCK = BLOCK_TILES * TILE;
constexpr int FLUSH = 128;  // products summed before `out` takes them: short sums keep fp32 exact enough
constexpr float LOG2E = 1.44269504088896341f;

struct Call {
    float* out;
    int64_t out_head;
    const void *q, *k;
    int64_t q_head, q_row, k_head, k_row;
    const float* lse;
    int64_t lse_head, lse_row;
    int dim, kv_heads, group;
    int64_t start, count;
    float scale, softcap;
    int threads;
};

// 2^x for x < 127 within 2 ulp or so; what is below the smallest normal number comes out as that number.
inline F16 exp2(const F16& x) {
    F16 r;
    KVTIDE_EACH {
        const vf lowest = -126.0f - (vf){};
        const vf c = x.part[i] > lowest ? x.part[i] : lowest;
        // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
        const vf shifted = c + 12582912.0f;
        const vf f = c - (shifted - 12582912.0f);
        // Minimax for -0.5 <= f <= 0.5, relative error 7.5e-8.
        vf p = f * 1.3276471871e-3f + 9.6755413276e-3f;
        p = p * f + 5.5507132739e-2f;
        p = p * f + 2.4022119724e-1f;
        p = p * f + 6.9314696706e-1f;
        p = p * f + 1.0000000717f;
        r.part[i] = (vf)((vi)p + ((vi)shifted << 23));
    }
    return r;
}

// x in the first `count` lanes, zero in the others.
inline F16 first_lanes(const F16& x, int count) {
    static const int32_t numbers[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    F16 r;
    KVTIDE_EACH {
        vi lane;
        std::memcpy(&lane, numbers + i * KVTIDE_WIDTH, sizeof lane);
        r.part[i] = lane < count ? x.part[i] : (vf){};
    }
    return r;
}

// acc[r][n] = q row r . the keys of tile n; keys as in a page's tile (tile.h), q rows `padded` apart.
template <int NT>
inline __attribute__((always_inline)) void dots(const float* keys, const float* q, int padded, F16 (&acc)[ROWS][NT]) {
    for (int d = 0; d < padded; ++d) {
        F16 k[NT];
        for (int n = 0; n < NT; ++n) k[n] = load(keys + (n * padded + d) * TILE);
        for (int r = 0; r < ROWS; ++r) {
            const F16 query = splat(q[r * padded + d]);
            for (int n = 0; n < NT; ++n) acc[r][n] = fma(k[n], query, acc[r][n]);
        }
    }
}

#if KVTIDE_DPBF16
template <int NT>
inline __attribute__((always_inline)) void dots(const uint16_t* keys, const uint16_t* q, int padded, F16 (&acc)[ROWS][NT]) {
    for (int d = 0; d < padded; d += 2) {
        __m512i k[NT];
        for (int n = 0; n < NT; ++n) k[n] = _mm512_load_si512(keys + (n * padded + d) * TILE);
        for (int r = 0; r < ROWS; ++r) {
            const __m512i query = pair_splat(q + r * padded + d);
            for (int n = 0; n < NT; ++n) dot_pairs(acc[r][n], k[n], query);
        }
    }
}
#endif

// sums[key] += sum over ROWS rows of 2^(logit * factor + offsets[row]) for the keys of NT tiles.
// With MASKED, row r sees the first seen[r] keys only.
template <class O, int NT, bool MASKED>
void add_rows(const Call& c, const O* keys, const O* q, int padded, const float* offsets, const int* seen,
              float* sums) {
    F16 acc[ROWS][NT] = {};
    dots<NT>(keys, q, padded, acc);
    if (c.softcap > 0.0f)
        for (int r = 0; r < ROWS; ++r)
            for (int n = 0; n < NT; ++n) acc[r][n] = tanh(mul(acc[r][n], splat(c.scale / c.softcap)));
    const F16 factor = splat((c.softcap > 0.0f ? c.softcap : c.scale) * LOG2E);
    F16 total[NT] = {};
    for (int r = 0; r < ROWS; ++r) {
        const F16 offset = splat(offsets[r]);
        for (int n = 0; n < NT; ++n) {
            F16 weight = exp2(fma(acc[r][n], factor, offset));
            if (MASKED) weight = first_lanes(weight, seen[r] - n * TILE);
            total[n] = add(total[n], weight);
        }
    }
    for (int n = 0; n < NT; ++n) store(sums + n * TILE, add(load(sums + n * TILE), total[n]));
}

template <class O>
O as_operand(uint16_t x) {
    if constexpr (sizeof(O) == 2) return x;
    else return bf16_to_float(x);
}
template <class O>
O as_operand(float x) {
    return x;
}

template <class E>
class Columns {
public:
    using O = Operand<E>;

    explicit Columns(const Call& call)
        : c(call), padded((call.dim + 1) / 2 * 2), rows(call.count * call.group),
          padded_rows((rows + ROWS - 1) / ROWS * ROWS), stop(call.start + call.count) {}

    void run() {
        static thread_local Scratch shared;
        char* at = shared.get(room<O>(c.kv_heads * padded_rows * padded) + room<float>(c.kv_heads * padded_rows));
        queries = take<O>(at, c.kv_heads * padded_rows * padded);
        offsets = take<float>(at, c.kv_heads * padded_rows);
        const int64_t blocks = (stop + BLOCK - 1) / BLOCK, tasks = c.kv_heads * blocks;
        const int threads = (int)std::min<int64_t>(std::max(c.threads, 1), tasks);
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            static thread_local Scratch own;
            O* keys = (O*)own.get(sizeof(O) * BLOCK * padded);
#pragma omp for schedule(static)
            for (int64_t n = 0; n < c.kv_heads * padded_rows; ++n) load_row(n / padded_rows, n % padded_rows);
#pragma omp for schedule(dynamic)
            for (int64_t task = 0; task < tasks; ++task) add_block(task / blocks, task % blocks * BLOCK, keys);
        }
    }

private:
    // Row t * group + g of a head is its query head g at position start + t.
    void load_row(int64_t head, int64_t row) {
        O* to = queries + (head * padded_rows + row) * padded;
        float& offset = offsets[head * padded_rows + row];
        offset = 0.0f;
        std::fill(to, to + padded, O(0));
        if (row >= rows) return;
        const int64_t query_head = head * c.group + row % c.group, t = row / c.group;
        const E* from = (const E*)c.q + query_head * c.q_head + t * c.q_row;
        for (int d = 0; d < c.dim; ++d) to[d] = as_operand<O>(from[d]);
        offset = -c.lse[query_head * c.lse_head + t * c.lse_row] * LOG2E;
    }

    void load_keys(int64_t head, int64_t first, O* to) const {
        const int pair = sizeof(O) == 2 ? 2 : 1;
        for (int n = 0; n < BLOCK_TILES; ++n, to += TILE * padded) {
            const int64_t left = std::min<int64_t>(stop - (first + n * TILE), TILE);
            const E* from = (const E*)c.k + head * c.k_head + (first + n * TILE) * c.k_row;
            if (left < TILE || c.dim < padded) std::fill(to, to + TILE * padded, O(0));
            for (int d = 0; d < c.dim; d += pair)
                for (int t = 0; t < left; ++t)
                    for (int i = 0; i < pair && d + i < c.dim; ++i)
                        to[d * TILE + t * pair + i] = as_operand<O>(from[t * c.k_row + d + i]);
        }
    }

    // Keys [first, first + BLOCK) of a head, and every row that sees some of them.
    void add_block(int64_t head, int64_t first, O* keys) const {
        load_keys(head, first, keys);
        const O* q = queries + head * padded_rows * padded;
        const float* offset = offsets + head * padded_rows;
        float sums[BLOCK] = {};
        const int64_t begin = std::max<int64_t>(first - c.start, 0) * c.group / ROWS * ROWS;
        for (int64_t row = begin; row < rows; row += ROWS) {
            const int64_t oldest = c.start + row / c.group - first + 1;
            if (oldest >= BLOCK && row + ROWS <= rows) {
                add_tiles<false>(BLOCK_TILES, keys, q + row * padded, offset + row, nullptr, sums);
            } else {
                int seen[ROWS], most = 0;
                for (int r = 0; r < ROWS; ++r) {
                    const int64_t position = c.start + (row + r) / c.group;
                    seen[r] = row + r < rows ? (int)std::clamp<int64_t>(position - first + 1, 0, BLOCK) : 0;
                    most = std::max(most, seen[r]);
                }
                add_tiles<true>((most + TILE - 1) / TILE, keys, q + row * padded, offset + row, seen, sums);
            }
            if ((row - begin) / ROWS % FLUSH == FLUSH - 1) flush(head, first, sums);
        }
        flush(head, first, sums);
    }

    void flush(int64_t head, int64_t first, float* sums) const {
        float* out = c.out + head * c.out_head + first;
        for (int64_t i = 0; i < std::min<int64_t>(stop - first, BLOCK); ++i) out[i] += sums[i] / (float)c.group;
        std::fill(sums, sums + BLOCK, 0.0f);
    }

    template <bool MASKED>
    void add_tiles(int count, const O* keys, const O* q, const float* offset, const int* seen, float* sums) const {
        if constexpr (TILES == 4) {
            switch (count) {
                case 1: add_rows<O, 1, MASKED>(c, keys, q, padded, offset, seen, sums); break;
                case 2: add_rows<O, 2, MASKED>(c, keys, q, padded, offset, seen, sums); break;
                case 3: add_rows<O, 3, MASKED>(c, keys, q, padded, offset, seen, sums); break;
                case 4: add_rows<O, 4, MASKED>(c, keys, q, padded, offset, seen, sums); break;
            }
        } else {
            for (int n = 0; n < count; ++n) {
                int left[ROWS] = {};
                if (MASKED)
                    for (int r = 0; r < ROWS; ++r) left[r] = seen[r] - n * TILE;
                add_rows<O, 1, MASKED>(c, keys + n * TILE * padded, q, padded, offset, left, sums + n * TILE);
            }
        }
    }

    const Call& c;
    const int padded;
    const int64_t rows, padded_rows, stop;
    O* queries = nullptr;
    float* offsets = nullptr;
};

}  // namespace
}  // namespace kvtide

// Strides count elements. out float[kv heads][keys]; q and k as in `kernels.reference.column_sums`; lse float.
extern "C" int kvtide_columns(float* out, int64_t out_head, const void* q, int64_t q_head, int64_t q_row,
                              const void* k, int64_t k_head, int64_t k_row, const float* lse, int64_t lse_head,
                              int64_t lse_row, int bf16, int dim, int kv_heads, int group, int64_t start,
                              int64_t count, float scale, float softcap, int threads) {
    if (count == 0) return kvtide::OK;
    const kvtide::Call call{out, out_head, q,        k,     q_head, q_row, k_head, k_row, lse,    lse_head,
                            lse_row, dim,  kv_heads, group, start,  count, scale,  softcap, threads};
    if (bf16) kvtide::Columns<uint16_t>(call).run();
    else kvtide::Columns<float>(call).run();
    return kvtide::OK;
}
