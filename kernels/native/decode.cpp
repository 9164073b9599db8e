// Paged decode attention: one query token per sequence over the pages of its kv heads.
//
// A task is (sequence, kv head, split of 512 slots counted from slot 0). Whoever finishes the last split of a head
// merges all of them in split order, so results depend on neither the batch nor the number of threads. Sequences
// that are observed keep their softmax weights until then (mass.h).
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "mass.h"
#include "scratch.h"

namespace kvtide {
namespace {

constexpr int64_t AHEAD = 4;  // tiles between the one computed and the one prefetched
constexpr float NEG_INF = -std::numeric_limits<float>::infinity();

struct Call {
    void* out;
    float* lse;
    const void* q;
    int64_t q_row, q_head;
    const char* pool;
    int64_t num_pages, page_bytes;
    int dim;
    const int32_t* tables;
    int64_t table_row, table_head, pages;
    const int32_t *starts, *lengths;
    int64_t start_stride, length_row;
    const int32_t* rows;
    int sequences, batch, heads, group;
    float scale, softcap;
    const float* sinks;
    float* mass;
    int64_t mass_row, mass_head, mass_slots;
    const int32_t* reduce;
    int threads;

    int reduction(int b) const { return mass ? reduce[b] : UNOBSERVED; }
};

struct Task {
    int b, head, split, splits;  // split of splits of this head; its partial result is the task's number
    int64_t first_split;
    float* kept;  // where it keeps its weights for the mass, or null
};

// What one split hands to the merge, per query head: maximum, sum and weighted values.
struct Partial {
    float *top, *sum, *acc;
    static int64_t floats(int group, int padded) { return (int64_t)group * (padded + 32) + 32; }
    Partial(float* at, int group) : top(at), sum(at + (group + 15) / 16 * 16), acc(at + (group + 15) / 16 * 32) {}
};

template <class E>
class Worker {
public:
    Worker(const Call& call, const Format<E>& format) : c(call), f(format) {
        const size_t group = c.group, padded = f.padded;
        char* at = scratch().get(room<Operand<E>>(group * padded) + room<float>(group * CHUNK) +
                                 room<Operand<E>>(group * CHUNK) + room<float>(group) +
                                 room<float>(group * LANES) + 2 * room<E>(f.value_offset));
        q = take<Operand<E>>(at, group * padded);
        scores = take<float>(at, group * CHUNK);
        weights = take<Operand<E>>(at, group * CHUNK);
        decay = take<float>(at, group);
        lane_sums = take<float>(at, group * LANES);
        clean[0] = take<E>(at, f.value_offset);
        clean[1] = take<E>(at, f.value_offset);
    }

    // Computes one task into part and task.kept. `next` is what this thread computes afterwards, or null: its first
    // tiles are brought into the cache while this task ends.
    int run(const Task& task, const Task* next, const Partial& part) {
        now = span_of(task);
        after = next ? span_of(*next) : now;
        const int64_t begin = now.begin, end = now.end;
        for (int64_t page = begin / f.slots(); page <= (end - 1) / f.slots(); ++page)
            if (now.table[page] < 0 || now.table[page] >= c.num_pages) return BAD_PAGE;
        load_query(task);
        std::fill(part.top, part.top + c.group, NEG_INF);
        std::fill(lane_sums, lane_sums + c.group * LANES, 0.0f);
        std::fill(part.acc, part.acc + (int64_t)c.group * f.padded, 0.0f);
        for (int64_t chunk = begin / CHUNK * CHUNK; chunk < end; chunk += CHUNK)
            run_chunk(std::max(begin, chunk), std::min(end, chunk + CHUNK), part, task.kept);
        for (int g = 0; g < c.group; ++g) part.sum[g] = reduce_add(load(lane_sums + g * LANES));
        return OK;
    }

private:
    static Scratch& scratch() {
        static thread_local Scratch memory;
        return memory;
    }

    // The slots of a task and the page list they lie in.
    struct Span {
        const int32_t* table;
        int64_t begin, end;
    };

    Span span_of(const Task& task) const {
        const int64_t row = c.rows[task.b], base = (task.first_split + task.split) * SPLIT;
        const int64_t start = c.starts[row * c.start_stride], stop = c.lengths[row * c.length_row + task.head];
        return {c.tables + row * c.table_row + task.head * c.table_head, std::max(start, base),
                std::min(stop, base + SPLIT)};
    }

    const E* tile_at(const int32_t* table, int64_t index) const {
        const uint32_t tile = (uint32_t)index, page = tile / (uint32_t)f.tiles;
        return reinterpret_cast<const E*>(c.pool + table[page] * f.page_bytes) +
               (tile - page * f.tiles) * f.tile_elements;
    }

    // The tile to prefetch while tile `index` is computed: AHEAD tiles later, in this task or the one after it.
    const E* tile_ahead(int64_t index) const {
        const int64_t own = index + AHEAD, over = own - ((now.end - 1) / TILE + 1);
        if (over < 0) return tile_at(now.table, own);
        return tile_at(after.table, std::min(after.begin / TILE + over, (after.end - 1) / TILE));
    }

    void load_query(const Task& task) {
        for (int g = 0; g < c.group; ++g) {
            const E* from = (const E*)c.q + task.b * c.q_row + (int64_t)(task.head * c.group + g) * c.q_head;
            Operand<E>* to = q + (int64_t)g * f.padded;
            for (int d = 0; d < f.dim; ++d) {
                if constexpr (sizeof(E) == sizeof(Operand<E>)) to[d] = from[d];
                else to[d] = bf16_to_float(from[d]);
            }
            std::fill(to + f.dim, to + f.padded, Operand<E>(0));
        }
    }

    // Slots [begin, end) of at most CHUNK_TILES tiles. `kept` is the task's, or null.
    void run_chunk(int64_t begin, int64_t end, const Partial& part, float* kept) {
        const int64_t first = begin / TILE, count = (end - 1) / TILE + 1 - first;
        const E *keys[CHUNK_TILES], *vals[CHUNK_TILES], *next_keys[CHUNK_TILES], *next_vals[CHUNK_TILES];
        for (int64_t n = 0; n < count; ++n) {
            keys[n] = tile_at(now.table, first + n), vals[n] = keys[n] + f.value_offset;
            next_keys[n] = tile_ahead(first + n), next_vals[n] = next_keys[n] + f.value_offset;
        }
        const int lead = (int)(begin - first * TILE), trail = (int)((first + count) * TILE - end);
        for (int g = 0; g < c.group; g += block_size(g))
            each_block(g, [&](auto size) {
                logits_block<E, decltype(size)::value>(keys, g ? keys : next_keys, (int)count,
                                                       q + (int64_t)g * f.padded, f.padded, scores + g * CHUNK);
            });
        const int64_t tile = first % (SPLIT / TILE);
        for (int g = 0; g < c.group; ++g) {
            // Unobserved sequences write over their scores: one path for both, so that observing changes no bit.
            float* weight = kept ? Kept(kept, c.group).weights + g * SPLIT + tile * TILE : scores + g * CHUNK;
            softmax(g, (int)count, lead, trail, part, weight);
            if (kept) Kept(kept, c.group).tops[g * LANES + tile / CHUNK_TILES] = part.top[g];
        }
        if (lead) vals[0] = cleaned(vals[0], clean[0], 0, lead);
        if (trail) vals[count - 1] = cleaned(vals[count - 1], clean[1], TILE - trail, TILE);
        for (int g = 0; g < c.group; g += block_size(g))
            each_block(g, [&](auto size) {
                values_block<E, decltype(size)::value>(vals, g ? vals : next_vals, (int)count, weights + g * CHUNK,
                                                       f.padded, decay + g, part.acc + (int64_t)g * f.padded);
            });
    }

    // Query heads are taken in blocks of nearly equal size, at most HEAD_BLOCK.
    int block_size(int g) const {
        const int left = c.group - g, blocks = (left + HEAD_BLOCK - 1) / HEAD_BLOCK;
        return (left + blocks - 1) / blocks;
    }

    template <class F>
    void each_block(int g, F&& body) const {
        switch (block_size(g)) {
            case 1: body(std::integral_constant<int, 1>{}); break;
            case 2: body(std::integral_constant<int, 2>{}); break;
            case 3: body(std::integral_constant<int, 3>{}); break;
            default: body(std::integral_constant<int, 4>{});
        }
    }

    // A copy of a tile's values with tokens [from, to) zeroed: unused slots may hold NaN, and 0 * NaN is NaN.
    const E* cleaned(const E* source, E* copy, int from, int to) const {
        if (source != copy) std::copy(source, source + f.value_offset, copy);
        for (int t = from; t < to; ++t)
            for (int d = 0; d < f.padded; ++d) copy[value_at(f, d, t)] = E(0);
        return copy;
    }

    // Scores of query head g to weights, and to `exact` unrounded: updates its maximum and sum, leaves the factor of
    // older values in decay.
    void softmax(int g, int count, int lead, int trail, const Partial& part, float* exact) {
        float* s = scores + g * CHUNK;
        const F16 scale = splat(c.scale);
        for (int n = 0; n < count; ++n) {
            F16 x = mul(load(s + n * TILE), scale);
            if (c.softcap > 0.0f) x = mul(tanh(mul(x, splat(1.0f / c.softcap))), splat(c.softcap));
            store(s + n * TILE, x);
        }
        std::fill(s, s + lead, NEG_INF);
        std::fill(s + count * TILE - trail, s + count * TILE, NEG_INF);
        F16 high = load(s);
        for (int n = 1; n < count; ++n) high = max(high, load(s + n * TILE));
        const float top = std::max(part.top[g], reduce_max(high));
        decay[g] = top == part.top[g] ? 1.0f : std::exp(part.top[g] - top);
        part.top[g] = top;
        F16 sum = {};
        const F16 minus_top = splat(-top);
        for (int n = 0; n < count; ++n) {
            const F16 p = exp(add(load(s + n * TILE), minus_top));
            sum = add(sum, p);
            store(exact + n * TILE, p);
            put_weights(weights + g * CHUNK + n * TILE, p);
        }
        float* total = lane_sums + g * LANES;
        store(total, fma(load(total), splat(decay[g]), sum));
    }

    static void put_weights(float* to, const F16& p) { store(to, p); }
#if KVTIDE_DPBF16
    static void put_weights(uint16_t* to, const F16& p) {
        const __m256bh rounded = _mm512_cvtneps_pbh(p.part[0]);
        std::memcpy(to, &rounded, sizeof rounded);
    }
#endif

    const Call& c;
    const Format<E>& f;
    Span now{}, after{};
    Operand<E>* q;
    float* scores;
    Operand<E>* weights;
    float *decay, *lane_sums;
    E* clean[2];
};

inline void put(float* to, float x) { *to = x; }
inline void put(uint16_t* to, float x) { *to = float_to_bf16(x); }

// Joins the splits of one head in their order and writes its output rows; leaves each query head's maximum and sum,
// sinks included, in the first split's.
template <class E>
void merge(const Call& c, const Format<E>& f, const Task& task, float* partials, int64_t stride) {
    for (int g = 0; g < c.group; ++g) {
        const int64_t head = (int64_t)task.b * c.heads * c.group + task.head * c.group + g;
        float top = NEG_INF;
        for (int i = 0; i < task.splits; ++i) top = std::max(top, Partial(partials + i * stride, c.group).top[g]);
        Partial first(partials, c.group);
        float* acc = first.acc + (int64_t)g * f.padded;
        float factor = std::exp(first.top[g] - top), sum = first.sum[g] * factor;
        for (int d = 0; d < f.dim; ++d) acc[d] *= factor;
        for (int i = 1; i < task.splits; ++i) {
            Partial part(partials + i * stride, c.group);
            const float* more = part.acc + (int64_t)g * f.padded;
            factor = std::exp(part.top[g] - top);
            sum += part.sum[g] * factor;
            for (int d = 0; d < f.dim; ++d) acc[d] += more[d] * factor;
        }
        c.lse[head] = top + std::log(sum);
        if (c.sinks) {
            const float sink = c.sinks[task.head * c.group + g], above = std::max(top, sink);
            factor = std::exp(top - above);
            sum = sum * factor + std::exp(sink - above);
            for (int d = 0; d < f.dim; ++d) acc[d] *= factor;
            top = above;
        }
        first.top[g] = top, first.sum[g] = sum;
        E* out = (E*)c.out + head * f.dim;
        for (int d = 0; d < f.dim; ++d) put(out + d, acc[d] / sum);
    }
}

// The mass of a merged head from what its splits, the first of which is `task`, kept.
void observe(const Call& c, const Task& task, const Partial& merged) {
    const int64_t row = c.rows[task.b];
    const int64_t start = c.starts[row * c.start_stride], stop = c.lengths[row * c.length_row + task.head];
    float* mass = c.mass + task.b * c.mass_row + task.head * c.mass_head;
    for (int i = 0; i < task.splits; ++i) {
        const int64_t base = (task.first_split + i) * SPLIT;
        write_mass(Kept(task.kept + i * Kept::floats(c.group), c.group), c.group, c.reduce[task.b] == GROUP_MEAN,
                   merged.top, merged.sum, std::max(start, base), std::min(stop, base + SPLIT), mass);
    }
}

// Splits of a head, or the reason why it has none.
int count_splits(const Call& c, int64_t slots, int b, int head, int64_t& first, int64_t& splits) {
    const int64_t row = c.rows[b];
    if (row < 0 || row >= c.sequences) return BAD_ROW;
    const int64_t start = c.starts[row * c.start_stride], stop = c.lengths[row * c.length_row + head];
    if (start < 0 || start >= stop || stop > c.pages * slots) return BAD_SPAN;
    const int reduction = c.reduction(b);
    if (reduction < UNOBSERVED || reduction > GROUP_MAX || (reduction && stop > c.mass_slots)) return BAD_MASS;
    first = start / SPLIT;
    splits = (stop - 1) / SPLIT + 1 - first;
    return OK;
}

template <class E>
int decode(const Call& c) {
    static thread_local Scratch shared;
    const Format<E> f(c.page_bytes, c.dim);
    int64_t tasks = 0, observed = 0;
    for (int i = 0; i < c.batch * c.heads; ++i) {
        int64_t first, splits;
        if (const int status = count_splits(c, f.slots(), i / c.heads, i % c.heads, first, splits)) return status;
        tasks += splits;
        if (c.reduction(i / c.heads)) observed += splits;
    }
    const int64_t stride = (Partial::floats(c.group, f.padded) + 15) / 16 * 16;
    const int64_t all_heads = (int64_t)c.batch * c.heads;
    char* at = shared.get(room<Task>(tasks) + room<std::atomic<int>>(all_heads) + room<float>(tasks * stride) +
                          room<float>(observed * Kept::floats(c.group)));
    Task* list = take<Task>(at, tasks);
    auto* left = take<std::atomic<int>>(at, all_heads);
    float* partials = take<float>(at, tasks * stride);
    float* kept = take<float>(at, observed * Kept::floats(c.group));
    for (int64_t i = 0, n = 0; i < all_heads; ++i) {
        int64_t first = 0, splits = 0;
        count_splits(c, f.slots(), (int)(i / c.heads), (int)(i % c.heads), first, splits);
        new (left + i) std::atomic<int>((int)splits);
        const bool wanted = c.reduction((int)(i / c.heads));
        for (int s = 0; s < splits; ++s, ++n) {
            list[n] = Task{(int)(i / c.heads), (int)(i % c.heads), s, (int)splits, first, wanted ? kept : nullptr};
            if (wanted) kept += Kept::floats(c.group);
        }
    }
    std::atomic<int64_t> next{0};
    std::atomic<int> status{OK};
    const int threads = (int)std::min<int64_t>(std::max(c.threads, 1), tasks);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Worker<E> worker(c, f);
        // Each thread takes a task ahead of the one it computes, to know what to prefetch.
        for (int64_t n = next++, then = 0; n < tasks; n = then) {
            then = next++;
            const Task &task = list[n], *follower = then < tasks ? list + then : nullptr;
            if (const int bad = worker.run(task, follower, Partial(partials + n * stride, c.group))) status = bad;
            if (--left[(int64_t)task.b * c.heads + task.head] == 0) {
                float* first = partials + (n - task.split) * stride;
                merge(c, f, task, first, stride);
                if (task.kept) observe(c, list[n - task.split], Partial(first, c.group));
            }
        }
    }
    return status;
}

}  // namespace
}  // namespace kvtide

// Strides count elements. starts int32[sequences], lengths int32[sequences][heads], rows int32[batch].
// mass null: nothing is observed, reduce is not read. Otherwise mass [batch][heads][mass_slots], reduce int32[batch].
extern "C" int kvtide_decode(void* out, float* lse, const void* q, int64_t q_row, int64_t q_head, const void* pool,
                             int64_t num_pages, int64_t page_bytes, int bf16, int dim, const int32_t* tables,
                             int64_t table_row, int64_t table_head, int64_t pages, const int32_t* starts,
                             int64_t start_stride, const int32_t* lengths, int64_t length_row, const int32_t* rows,
                             int sequences, int batch, int heads, int group, float scale, float softcap,
                             const float* sinks, float* mass, int64_t mass_row, int64_t mass_head,
                             int64_t mass_slots, const int32_t* reduce, int threads) {
    const kvtide::Call call{out,    lse,        q,       q_row,        q_head,     (const char*)pool, num_pages,
                            page_bytes, dim,    tables,  table_row,    table_head, pages,             starts,
                            lengths, start_stride, length_row, rows,   sequences,  batch,             heads,
                            group,  scale,      softcap, sinks,        mass,       mass_row,          mass_head,
                            mass_slots, reduce, threads};
    return bf16 ? kvtide::decode<uint16_t>(call) : kvtide::decode<float>(call);
}

extern "C" const char* kvtide_isa() {
#if KVTIDE_DPBF16
    return "avx512-bf16";
#elif KVTIDE_WIDTH == 16
    return "avx512";
#elif KVTIDE_WIDTH == 8
    return "avx2";
#else
    return "128-bit";
#endif
}
