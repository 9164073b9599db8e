// Moving tokens between canonical rows [n, head_dim] and pages, and pages onto each other.
#include <algorithm>
#include <cstring>

#include "tile.h"

namespace kvtide {
namespace {

// A write below this many bytes is cheaper on one thread than waking others.
constexpr int64_t PARALLEL_BYTES = 64 * 1024;

template <class E>
void write_token(const Format<E>& f, E* tile, int t, const E* k, const E* v) {
    E* values = tile + f.value_offset;
    for (int d = 0; d < f.dim; ++d) tile[key_at(f, d, t)] = k[d];
    for (int d = 0; d < f.dim; ++d) values[value_at(f, d, t)] = v[d];
    for (int d = f.dim; d < f.padded; ++d) tile[key_at(f, d, t)] = values[value_at(f, d, t)] = E(0);
}

template <class E>
void read_token(const Format<E>& f, const E* tile, int t, E* k, E* v) {
    const E* values = tile + f.value_offset;
    for (int d = 0; d < f.dim; ++d) k[d] = tile[key_at(f, d, t)];
    for (int d = 0; d < f.dim; ++d) v[d] = values[value_at(f, d, t)];
}

// All sixteen tokens at once, in the order of the tile: the destination is written front to back.
template <class E>
void write_tile(const Format<E>& f, E* tile, const E* k, const E* v, int64_t k_row, int64_t v_row) {
    E* values = tile + f.value_offset;
    if constexpr (sizeof(E) == 2) {
        for (int d = 0; d < f.padded; d += 2)
            for (int t = 0; t < TILE; ++t) {
                E pair[2] = {0, 0};
                if (d + 1 < f.dim) std::memcpy(pair, k + t * k_row + d, sizeof pair);
                else if (d < f.dim) pair[0] = k[t * k_row + d];
                std::memcpy(tile + key_at(f, d, t), pair, sizeof pair);
            }
        for (int t = 0; t < TILE; t += 2) {
            const E *even = v + t * v_row, *odd = even + v_row;
            E* row = values + value_at(f, 0, t);
            for (int d = 0; d < f.dim; ++d) row[2 * d] = even[d], row[2 * d + 1] = odd[d];
            std::fill(row + 2 * f.dim, row + 2 * f.padded, E(0));
        }
    } else {
        for (int d = 0; d < f.padded; ++d)
            for (int t = 0; t < TILE; ++t) tile[key_at(f, d, t)] = d < f.dim ? k[t * k_row + d] : E(0);
        for (int t = 0; t < TILE; ++t) {
            E* row = values + value_at(f, 0, t);
            std::copy(v + t * v_row, v + t * v_row + f.dim, row);
            std::fill(row + f.dim, row + f.padded, E(0));
        }
    }
}

template <class E>
void read_tile(const Format<E>& f, const E* tile, E* k, E* v, int64_t k_row, int64_t v_row) {
    const E* values = tile + f.value_offset;
    if constexpr (sizeof(E) == 2) {
        for (int t = 0; t < TILE; ++t) {
            E* row = k + t * k_row;
            for (int d = 0; d + 1 < f.dim; d += 2) std::memcpy(row + d, tile + key_at(f, d, t), 2 * sizeof(E));
            if (f.dim % 2) row[f.dim - 1] = tile[key_at(f, f.dim - 1, t)];
        }
        for (int t = 0; t < TILE; t += 2) {
            E *even = v + t * v_row, *odd = even + v_row;
            const E* row = values + value_at(f, 0, t);
            for (int d = 0; d < f.dim; ++d) even[d] = row[2 * d], odd[d] = row[2 * d + 1];
        }
    } else {
        for (int t = 0; t < TILE; ++t) read_token(f, tile, t, k + t * k_row, v + t * v_row);
    }
}

// Rows of one call: element strides between heads and between tokens, for keys and for values.
struct Strides {
    int64_t k_head, k_row, v_head, v_row;
};

// Tokens [first, last) of one head lie in one page; rows count from slot `start`.
template <bool WRITE, class E>
void move_page(const Format<E>& f, E* page, int64_t page_slot, int64_t first, int64_t last, int64_t start, E* k, E* v,
               const Strides& s) {
    for (int64_t slot = first; slot < last;) {
        const int64_t local = slot - page_slot;
        E* tile = page + local / TILE * f.tile_elements;
        const int t = (int)(local % TILE);
        E *k_at = k + (slot - start) * s.k_row, *v_at = v + (slot - start) * s.v_row;
        const bool whole = t == 0 && last - slot >= TILE;
        if constexpr (WRITE) {
            if (whole) write_tile(f, tile, k_at, v_at, s.k_row, s.v_row);
            else write_token(f, tile, t, k_at, v_at);
        } else {
            if (whole) read_tile(f, tile, k_at, v_at, s.k_row, s.v_row);
            else read_token(f, tile, t, k_at, v_at);
        }
        slot += whole ? TILE : 1;
    }
}

template <bool WRITE, class E>
int move_heads(char* pool, int64_t num_pages, const Format<E>& f, const int32_t* tables, int64_t table_stride,
               int heads, int64_t start, int64_t stop, E* k, E* v, const Strides& s, int threads) {
    if (start >= stop) return OK;
    const int64_t first_page = start / f.slots(), pages = (stop - 1) / f.slots() + 1 - first_page;
    const int64_t work = heads * pages;
    for (int64_t i = 0; i < work; ++i) {
        const int32_t id = tables[i / pages * table_stride + first_page + i % pages];
        if (id < 0 || id >= num_pages) return BAD_PAGE;
    }
    if (heads * (stop - start) * f.dim * 2 * (int64_t)sizeof(E) < PARALLEL_BYTES) threads = 1;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < work; ++i) {
        const int64_t head = i / pages, page = first_page + i % pages, page_slot = page * f.slots();
        E* at = reinterpret_cast<E*>(pool + tables[head * table_stride + page] * f.page_bytes);
        move_page<WRITE>(f, at, page_slot, std::max(start, page_slot), std::min(stop, page_slot + f.slots()), start,
                         k + head * s.k_head, v + head * s.v_head, s);
    }
    return OK;
}

template <class E>
void copy_token(const Format<E>& f, const E* from, int s, E* to, int t) {
    const E* old = from + f.value_offset + value_at(f, 0, s);
    E* now = to + f.value_offset + value_at(f, 0, t);
    if constexpr (sizeof(E) == 2) {
        for (int d = 0; d < f.padded; d += 2)
            std::memcpy(to + key_at(f, d, t), from + key_at(f, d, s), 2 * sizeof(E));
        for (int d = 0; d < f.padded; ++d) now[2 * d] = old[2 * d];
    } else {
        for (int d = 0; d < f.padded; ++d) to[key_at(f, d, t)] = from[key_at(f, d, s)];
        std::copy(old, old + f.padded, now);
    }
}

// Slot by slot, in ascending order. A token that stays where it is costs nothing.
template <class E>
int move_slots(char* pool, int64_t num_pages, const Format<E>& f, const int32_t* tables, int64_t table_stride,
               int64_t pages, int heads, const int64_t* sources, int64_t source_stride, int64_t count, int threads) {
    const uint32_t slots = (uint32_t)f.slots();
    const auto page_of = [&](int64_t h, int64_t slot) { return tables[h * table_stride + (uint32_t)slot / slots]; };
    for (int64_t h = 0; h < heads; ++h)
        for (int64_t i = 0; i < count; ++i) {
            const int64_t from = sources[h * source_stride + i];
            if (from < 0 || from == i) continue;
            if (std::max(from, i) >= pages * slots) return BAD_SPAN;
            for (const int32_t id : {page_of(h, from), page_of(h, i)})
                if (id < 0 || id >= num_pages) return BAD_PAGE;
        }
    const auto tile_of = [&](int64_t h, int64_t slot) {
        const int64_t tile = (uint32_t)slot % slots / TILE;
        return reinterpret_cast<E*>(pool + page_of(h, slot) * f.page_bytes) + tile * f.tile_elements;
    };
    if (heads * count * f.dim * 2 * (int64_t)sizeof(E) < PARALLEL_BYTES) threads = 1;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t h = 0; h < heads; ++h)
        for (int64_t i = 0; i < count; ++i) {
            const int64_t from = sources[h * source_stride + i];
            if (from < 0 || from == i) continue;
            const E* old = tile_of(h, from);
            E* now = tile_of(h, i);
            copy_token(f, old, (int)(from % TILE), now, (int)(i % TILE));
        }
    return OK;
}

template <class E>
int append_tokens(char* pool, int64_t num_pages, const Format<E>& f, const int32_t* tables, int64_t table_row,
                  int64_t table_head, int64_t pages, const int32_t* lengths, int64_t length_row, const int32_t* rows,
                  int sequences, int batch, int heads, const E* k, const E* v, const int64_t* strides) {
    for (int b = 0; b < batch; ++b) {
        const int64_t row = rows[b];
        if (row < 0 || row >= sequences) return BAD_ROW;
        for (int h = 0; h < heads; ++h) {
            const int64_t slot = lengths[row * length_row + h], page = slot / f.slots(), local = slot % f.slots();
            if (slot < 0 || page >= pages) return BAD_SPAN;
            const int32_t id = tables[row * table_row + h * table_head + page];
            if (id < 0 || id >= num_pages) return BAD_PAGE;
            E* tile = reinterpret_cast<E*>(pool + id * f.page_bytes) + local / TILE * f.tile_elements;
            write_token(f, tile, (int)(local % TILE), k + b * strides[0] + h * strides[1],
                        v + b * strides[2] + h * strides[3]);
        }
    }
    return OK;
}

template <class E>
int move_any(int write, char* pool, int64_t num_pages, int64_t page_bytes, int dim, const int32_t* tables,
             int64_t table_stride, int heads, int64_t start, int64_t stop, void* k, void* v, const Strides& s,
             int threads) {
    const Format<E> f(page_bytes, dim);
    const auto move = write ? move_heads<true, E> : move_heads<false, E>;
    return move(pool, num_pages, f, tables, table_stride, heads, start, stop, (E*)k, (E*)v, s, threads);
}

}  // namespace
}  // namespace kvtide

using namespace kvtide;

// write: rows to pages, otherwise pages to rows. tables int32[heads][table_stride]; strides in elements.
extern "C" int kvtide_move(int write, void* pool, int64_t num_pages, int64_t page_bytes, int bf16, int dim,
                           const int32_t* tables, int64_t table_stride, int heads, int64_t start, int64_t stop, void* k,
                           void* v, int64_t k_head, int64_t k_row, int64_t v_head, int64_t v_row, int threads) {
    const auto move = bf16 ? move_any<uint16_t> : move_any<float>;
    return move(write, (char*)pool, num_pages, page_bytes, dim, tables, table_stride, heads, start, stop, k, v,
                Strides{k_head, k_row, v_head, v_row}, threads);
}

extern "C" int kvtide_append(void* pool, int64_t num_pages, int64_t page_bytes, int bf16, int dim,
                             const int32_t* tables, int64_t table_row, int64_t table_head, int64_t pages,
                             const int32_t* lengths, int64_t length_row, const int32_t* rows, int sequences, int batch,
                             int heads, const void* k, const void* v, int64_t k_row, int64_t k_head, int64_t v_row,
                             int64_t v_head) {
    const int64_t strides[4] = {k_row, k_head, v_row, v_head};
    if (bf16)
        return append_tokens((char*)pool, num_pages, Format<uint16_t>(page_bytes, dim), tables, table_row, table_head,
                             pages, lengths, length_row, rows, sequences, batch, heads, (const uint16_t*)k,
                             (const uint16_t*)v, strides);
    return append_tokens((char*)pool, num_pages, Format<float>(page_bytes, dim), tables, table_row, table_head, pages,
                         lengths, length_row, rows, sequences, batch, heads, (const float*)k, (const float*)v, strides);
}

// sources int64[heads][source_stride]: the old slot of each of the first `count`, -1 where nothing is to be moved.
extern "C" int kvtide_move_slots(void* pool, int64_t num_pages, int64_t page_bytes, int bf16, int dim,
                                 const int32_t* tables, int64_t table_stride, int64_t pages, int heads,
                                 const int64_t* sources, int64_t source_stride, int64_t count, int threads) {
    if (bf16)
        return move_slots((char*)pool, num_pages, Format<uint16_t>(page_bytes, dim), tables, table_stride, pages, heads,
                          sources, source_stride, count, threads);
    return move_slots((char*)pool, num_pages, Format<float>(page_bytes, dim), tables, table_stride, pages, heads,
                      sources, source_stride, count, threads);
}

extern "C" int kvtide_copy_page(void* pool, int64_t num_pages, int64_t page_bytes, int64_t src, int64_t dst) {
    if (src < 0 || dst < 0 || src >= num_pages || dst >= num_pages) return BAD_PAGE;
    std::memmove((char*)pool + dst * page_bytes, (const char*)pool + src * page_bytes, page_bytes);
    return OK;
}
