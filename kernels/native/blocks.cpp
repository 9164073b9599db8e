// KV blocks between slots and canonical rows: every byte that is read once is hashed on the way (XXH3).
//
// A slot may be overwritten while it is read. So bytes are copied first, and the copy is what the checksum is compared
// with and what goes on; nobody looks at the slot twice.
#include <algorithm>
#include <cstring>
#include <new>

#include "scratch.h"
#include "tile.h"
#include "xxh3.h"

namespace kvtide {
namespace {

// A call that writes more than this leaves little of it in the caches, so it may as well write past them.
constexpr int64_t STREAM_BYTES = 2 * 1024 * 1024;

bool streams(int64_t bytes) { return CAN_STREAM && bytes >= STREAM_BYTES; }

bool aligned(const void* at) { return (uintptr_t)at % 64 == 0; }

// One layer of a block as it lies in a slot: heads x (K [tokens][row], V [tokens][row]), sizes in bytes.
struct Layer {
    int64_t heads, tokens, row;

    int64_t half() const { return tokens * row; }
    int64_t bytes() const { return 2 * heads * half(); }
};

// Canonical rows [heads][tokens of all blocks][row]; strides in bytes.
struct Rows {
    uint8_t* at;
    int64_t head, token;
};

// Streamed bytes are visible to whoever sees what this thread writes next.
void fence() {
#if KVTIDE_WIDTH >= 8
    _mm_sfence();
#endif
}

// 64 bytes.
template <bool STREAM>
void copy_line(uint8_t* to, const uint8_t* from) {
#if KVTIDE_WIDTH >= 8
    if constexpr (STREAM) {
        for (int i = 0; i < 2; ++i)
            _mm256_stream_si256((__m256i*)to + i, _mm256_loadu_si256((const __m256i*)from + i));
        return;
    }
#endif
    std::memcpy(to, from, 64);
}

// Copies `n` bytes, line by line; for each a line of `ahead` is asked for, which moves on.
template <bool STREAM>
void copy_lines(uint8_t* to, const uint8_t* from, int64_t n, const uint8_t*& ahead) {
    const uint8_t* const next = ahead;
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) {
        __builtin_prefetch(next + i, 0, 2);
        copy_line<STREAM>(to + i, from + i);
    }
    ahead += i;
    std::memcpy(to + i, from + i, n - i);
}

template <bool STREAM>
void copy(uint8_t* to, const uint8_t* from, int64_t n, const uint8_t*& ahead) {
    if (STREAM && aligned(to)) copy_lines<STREAM>(to, from, n, ahead);
    else copy_lines<false>(to, from, n, ahead);
}

// Packed K or V of one head into its rows.
template <bool STREAM>
void copy_rows(const Rows& rows, int64_t head, int64_t token, const uint8_t* packed, const Layer& layer,
               const uint8_t*& ahead) {
    uint8_t* to = rows.at + head * rows.head + token * rows.token;
    if (rows.token == layer.row) return copy<STREAM>(to, packed, layer.half(), ahead);
    for (int64_t t = 0; t < layer.tokens; ++t)
        copy<STREAM>(to + t * rows.token, packed + t * layer.row, layer.row, ahead);
}

// The rows of one head into packed K or V. While they are copied, those of the next block are asked for.
void pack_rows(uint8_t* packed, const Rows& rows, int64_t head, int64_t token, const Layer& layer) {
    const uint8_t* from = rows.at + head * rows.head + token * rows.token;
    const uint8_t* ahead = from + layer.tokens * rows.token;
    if (rows.token == layer.row) return copy_lines<false>(packed, from, layer.half(), ahead);
    for (int64_t t = 0; t < layer.tokens; ++t)
        copy_lines<false>(packed + t * layer.row, from + t * rows.token, layer.row, ahead);
}

uint8_t* scratch(int64_t bytes) {
    static thread_local Scratch memory;
    try {
        return (uint8_t*)memory.get(bytes);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

template <bool STREAM>
int64_t read_run(const uint8_t* const* slots, int64_t blocks, int64_t offset, const Layer& layer,
                 const uint64_t* sums, int64_t sums_block, const Rows& k, const Rows& v, uint8_t* packed) {
    for (int64_t block = 0; block < blocks; ++block) {
        if (xxh3<Copy::CACHED>(slots[block] + offset, packed, layer.bytes()) != sums[block * sums_block]) return block;
        // While this one is written the next one is read.
        const uint8_t* ahead = slots[std::min(block + 1, blocks - 1)] + offset;
        const int64_t token = block * layer.tokens;
        for (int64_t head = 0; head < layer.heads; ++head) {
            copy_rows<STREAM>(k, head, token, packed + 2 * head * layer.half(), layer, ahead);
            copy_rows<STREAM>(v, head, token, packed + (2 * head + 1) * layer.half(), layer, ahead);
        }
    }
    return blocks;
}

// Copies while it hashes, past the caches where that is wanted and `to` allows it.
template <bool AHEAD>
uint64_t xxh3_copy(const uint8_t* from, uint8_t* to, int64_t bytes, bool stream) {
    return stream && aligned(to) ? xxh3<Copy::STREAMED, AHEAD>(from, to, bytes)
                                 : xxh3<Copy::CACHED, AHEAD>(from, to, bytes);
}

// What blocks of one form, `nbytes` long, have in common. Their headers have `bytes`, of which [0, front) and
// [table, sums) are as in `like`. The key is the 32 bytes before `table`; checksums of the `parts` start at `sums`; the
// checksum of the header is its end. Parts lie at `offsets` from a block's start.
struct Form {
    const uint8_t* like;
    int64_t nbytes, bytes, front, table, sums;
    const int64_t *offsets, *sizes;
    int64_t parts;

    int64_t end() const { return offsets[parts - 1] + sizes[parts - 1]; }
};

constexpr int64_t KEY_BYTES = 32;
enum Found : uint8_t { BAD, GOOD, OTHER_FORM };

// GOOD: `raw` is a copy of the block's header, which is sealed and names the key.
Found look_at_header(const Form& form, const uint8_t* block, int64_t size, const uint8_t* key, uint8_t* raw) {
    if (size < form.nbytes) return OTHER_FORM;
    std::memcpy(raw, block, form.bytes);
    asm volatile("" : : "r"(raw) : "memory");  // no second look at the block
    const bool same = !std::memcmp(raw, form.like, form.front) &&
                      !std::memcmp(raw + form.table, form.like + form.table, form.sums - form.table);
    if (!same) return OTHER_FORM;
    const int64_t sealed = form.bytes - (int64_t)sizeof(uint64_t);
    if (xxh3<Copy::NONE>(raw, nullptr, sealed) != read64(raw + sealed)) return BAD;
    return std::memcmp(raw + form.table - KEY_BYTES, key, KEY_BYTES) ? BAD : GOOD;
}

// Whether a block of `size` bytes is that of its key, to the last byte. `to`, if any, receives all of it, or, if it is
// not, perhaps a part.
Found check_block(const Form& form, const uint8_t* from, uint8_t* to, int64_t size, const uint8_t* key, uint8_t* raw,
                  bool stream) {
    const Found found = look_at_header(form, from, size, key, raw);
    if (found != GOOD) return found;
    for (int64_t part = 0; part < form.parts; ++part) {
        const int64_t at = form.offsets[part], bytes = form.sizes[part];
        const uint64_t sum = to ? xxh3_copy<true>(from + at, to + at, bytes, stream)
                                : xxh3<Copy::NONE>(from + at, nullptr, bytes);
        if (sum != read64(raw + form.sums + 8 * part)) return BAD;
    }
    if (!to) return GOOD;
    std::memcpy(to, raw, form.bytes);
    std::memcpy(to + form.end(), from + form.end(), size - form.end());
    return GOOD;
}

}  // namespace
}  // namespace kvtide

using namespace kvtide;

extern "C" uint64_t kvtide_xxh3(const uint8_t* from, int64_t bytes) { return xxh3<Copy::NONE>(from, nullptr, bytes); }

// Of each block whether it is that of its key: GOOD, BAD, or OTHER_FORM. `to`, if any, receives the whole buffers
// (`sizes`), of what is not GOOD perhaps a part.
extern "C" int kvtide_check_blocks(const uint8_t* const* from, uint8_t* const* to, const int64_t* sizes, int64_t blocks,
                                   const uint8_t* keys, uint8_t* found, const Form* form) {
    const bool large = to && streams(blocks * form->end());
    uint8_t* raw = scratch(form->bytes);
    if (!raw) return NO_MEMORY;
    for (int64_t i = 0; i < blocks; ++i)
        found[i] = check_block(*form, from[i], to ? to[i] : nullptr, sizes[i], keys + KEY_BYTES * i, raw, large);
    if (large) fence();
    return OK;
}

// One layer of consecutive blocks into rows k, v: → how many leading blocks have their checksums (from `sums_first` on,
// `sums_block` apart); only those are written. Negative: no memory.
extern "C" int64_t kvtide_read_run(const uint8_t* const* slots, int64_t blocks, int64_t offset, int64_t heads,
                                   int64_t tokens, int64_t row, const uint64_t* sums, int64_t sums_first,
                                   int64_t sums_block, uint8_t* k, int64_t k_head, int64_t k_token, uint8_t* v,
                                   int64_t v_head, int64_t v_token) {
    const Layer layer{heads, tokens, row};
    uint8_t* packed = scratch(layer.bytes());
    if (!packed) return -1;
    const Rows keys{k, k_head, k_token}, values{v, v_head, v_token};
    if (!streams(blocks * layer.bytes()))
        return read_run<false>(slots, blocks, offset, layer, sums + sums_first, sums_block, keys, values, packed);
    const int64_t good =
        read_run<true>(slots, blocks, offset, layer, sums + sums_first, sums_block, keys, values, packed);
    fence();
    return good;
}

// One layer of rows k, v into consecutive blocks; the checksums of what they were given are written.
extern "C" int kvtide_write_run(uint8_t* const* slots, int64_t blocks, int64_t offset, int64_t heads, int64_t tokens,
                                int64_t row, uint64_t* sums, int64_t sums_first, int64_t sums_block, uint8_t* k,
                                int64_t k_head, int64_t k_token, uint8_t* v, int64_t v_head, int64_t v_token) {
    const Layer layer{heads, tokens, row};
    uint8_t* packed = scratch(layer.bytes());
    if (!packed) return NO_MEMORY;
    const Rows keys{k, k_head, k_token}, values{v, v_head, v_token};
    const bool large = streams(blocks * layer.bytes());
    for (int64_t block = 0; block < blocks; ++block) {
        for (int64_t head = 0; head < heads; ++head) {
            pack_rows(packed + 2 * head * layer.half(), keys, head, block * tokens, layer);
            pack_rows(packed + (2 * head + 1) * layer.half(), values, head, block * tokens, layer);
        }
        sums[sums_first + block * sums_block] = xxh3_copy<false>(packed, slots[block] + offset, layer.bytes(), large);
    }
    if (large) fence();
    return OK;
}

// n pieces of memory as they are. memcpy moves pieces of this size through the caches, and with `rep movsb`, which took
// three times as long where the two sides were not aligned alike.
extern "C" int kvtide_copy(const uint8_t* const* from, uint8_t* const* to, int64_t n, int64_t bytes) {
    const bool large = streams(n * bytes);
    for (int64_t i = 0; i < n; ++i) {
        const uint8_t* ahead = from[i] + PREFETCH_AHEAD;
        if (large) copy<true>(to[i], from[i], bytes, ahead);
        else copy<false>(to[i], from[i], bytes, ahead);
    }
    if (large) fence();
    return OK;
}
