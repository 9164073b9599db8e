// Lossy codecs of KV blocks at rest: kv_tiers/at_rest.py has the format, kv_tiers/lossy_codec.py the specification.
//
// A layer is copied before it is verified, and encoded from the copy. Loops are plain, so that compilers vectorise them
// for any machine. Codes are those of the specification to the bit; what is decoded too, but that fp32 numbers may be
// rounded once where it rounds twice.
#include <algorithm>
#include <cstring>
#include <new>

#include "scratch.h"
#include "tile.h"
#include "xxh3.h"

namespace kvtide {
namespace {

enum Codec { FP8 = 1, INT8 = 2, INT4 = 3 };
enum Outcome : uint8_t { NOT_WHOLE = 0, DONE = 1, NOT_FINITE = 2 };

constexpr int64_t GROUP = 32;
constexpr int64_t SCALE_BYTES = 8;
constexpr float E4M3_MAX = 448.0f;
constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23: adding it rounds half to even, into the low bits

struct Layer {
    int64_t heads, dim, exact, encoded;  // offsets from the blocks' starts
};

uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// Stored numbers: uint16_t holds bf16 bits.
float wide(uint16_t x) { return float_of((uint32_t)x << 16); }
float wide(float x) { return x; }

template <class E>
E narrow(float x);
template <>
inline uint16_t narrow<uint16_t>(float x) {
    const uint32_t bits = bits_of(x);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
template <>
inline float narrow<float>(float x) {
    return x;
}

template <class E>
constexpr uint32_t LARGEST = 0x7f7fffffu;  // bits of the largest finite number
template <>
constexpr uint32_t LARGEST<uint16_t> = 0x7f7f0000u;

// The smallest stored number that is not below x >= 0.
float up(float x, float) { return x; }
uint16_t up(float x, uint16_t) {
    const uint16_t near = narrow<uint16_t>(x);
    return (uint16_t)(near + (wide(near) < x));
}

int64_t rounded(int64_t bytes) { return (bytes + 7) / 8 * 8; }

int64_t groups_of(int64_t count) { return (count + GROUP - 1) / GROUP; }

int64_t part_bytes(int codec, bool keys, int64_t tokens, int64_t dim, int64_t width) {
    if (codec == FP8) return rounded(SCALE_BYTES + tokens * dim);
    if (codec == INT8) return rounded(2 * tokens * width + tokens * dim);
    const int64_t groups = keys ? groups_of(tokens) * dim : tokens * groups_of(dim);
    return rounded(2 * groups * width + (tokens * dim + 1) / 2);
}

uint8_t to_e4m3(float x) {
    const float subnormal = 16384.0f;  // adding it leaves multiples of 2^-9 in the low bits
    const uint32_t sign = bits_of(x) & 0x80000000u, size = bits_of(x) ^ sign;
    const uint32_t small = bits_of(float_of(size) + subnormal) - bits_of(subnormal);
    const uint32_t normal = (size + ((uint32_t)(7 - 127) << 23) + 0x7ffffu + ((size >> 20) & 1)) >> 20;
    const uint32_t code = size < (121u << 23) ? small : normal;
    return (uint8_t)(std::min(code, 0x7eu) | sign >> 24);
}

// The exponent's bias moves by multiplication, which takes subnormal codes along.
float from_e4m3(uint8_t code) {
    return float_of((uint32_t)(code & 0x7fu) << 20 | (uint32_t)(code & 0x80u) << 24) * 0x1p120f;
}

// Whether all are finite; x receives them.
template <class E>
bool widen(const E* from, float* x, int64_t n) {
    uint32_t bad = 0;
    for (int64_t i = 0; i < n; ++i) {
        x[i] = wide(from[i]);
        bad |= (uint32_t)((bits_of(x[i]) & 0x7f800000u) == 0x7f800000u);
    }
    return !bad;
}

uint8_t code_of(float x, float low, float scale, float levels) {
    const float v = (x - low) / (scale == 0 ? 1.0f : scale);
    return (uint8_t)bits_of((v > levels ? levels : v) + ROUNDER);
}

// One group in each row of `count` elements. False: a range that is no finite number.
template <class E>
bool encode_row(const float* x, int64_t count, float levels, E* scale, E* minimum, uint8_t* codes) {
    constexpr int64_t LANES = 16;
    float low = x[0], high = x[0];
    if (count >= LANES) {
        float lows[LANES], highs[LANES];
        for (int64_t l = 0; l < LANES; ++l) lows[l] = highs[l] = x[l];
        int64_t i = LANES;
        for (; i + LANES <= count; i += LANES)
            for (int64_t l = 0; l < LANES; ++l) {
                lows[l] = x[i + l] < lows[l] ? x[i + l] : lows[l];
                highs[l] = x[i + l] > highs[l] ? x[i + l] : highs[l];
            }
        for (int64_t l = 0; l < LANES; ++l) low = std::min(low, lows[l]), high = std::max(high, highs[l]);
        for (; i < count; ++i) low = std::min(low, x[i]), high = std::max(high, x[i]);
    } else {
        for (int64_t i = 1; i < count; ++i) low = std::min(low, x[i]), high = std::max(high, x[i]);
    }
    *scale = up((high - low) / levels, E());
    *minimum = narrow<E>(low);
    const float s = wide(*scale);
    for (int64_t i = 0; i < count; ++i) codes[i] = code_of(x[i], low, s, levels);
    return bits_of(s) < 0x7f800000u;
}

// One group per channel over `tokens` rows. `work`: 3 * dim floats.
template <class E>
bool encode_columns(const float* x, int64_t tokens, int64_t dim, float levels, E* scales, E* minimums, uint8_t* codes,
                    float* work) {
    float *low = work, *high = work + dim, *scale = work + 2 * dim;
    std::copy(x, x + dim, low);
    std::copy(x, x + dim, high);
    for (int64_t t = 1; t < tokens; ++t)
        for (int64_t d = 0; d < dim; ++d) {
            const float each = x[t * dim + d];
            low[d] = each < low[d] ? each : low[d];
            high[d] = each > high[d] ? each : high[d];
        }
    uint32_t bad = 0;
    for (int64_t d = 0; d < dim; ++d) {
        scales[d] = up((high[d] - low[d]) / levels, E());
        minimums[d] = narrow<E>(low[d]);
        scale[d] = wide(scales[d]);
        bad |= (uint32_t)(bits_of(scale[d]) >= 0x7f800000u);
    }
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t d = 0; d < dim; ++d) codes[t * dim + d] = code_of(x[t * dim + d], low[d], scale[d], levels);
    return !bad;
}

bool encode_fp8(const float* x, int64_t n, uint8_t* part) {
    uint32_t most = 0;
    for (int64_t i = 0; i < n; ++i) most = std::max(most, bits_of(x[i]) & 0x7fffffffu);
    float scale = float_of(most) / E4M3_MAX;
    if (scale == 0) scale = 1.0f;
    std::memcpy(part, &scale, sizeof scale);
    std::memset(part + sizeof scale, 0, SCALE_BYTES - sizeof scale);
    for (int64_t i = 0; i < n; ++i) part[SCALE_BYTES + i] = to_e4m3(x[i] / scale);
    return true;
}

void pack_nibbles(const uint8_t* codes, int64_t n, uint8_t* to) {
    for (int64_t i = 0; i < n / 2; ++i) to[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
    if (n % 2) to[n / 2] = codes[n - 1];
}

void unpack_nibbles(const uint8_t* from, int64_t n, uint8_t* codes) {
    for (int64_t i = 0; i < n / 2; ++i) codes[2 * i] = from[i] & 15, codes[2 * i + 1] = (uint8_t)(from[i] >> 4);
    if (n % 2) codes[n - 1] = from[n / 2] & 15;
}

// What one thread needs beside the blocks.
struct Room {
    uint8_t *exact, *encoded, *codes;
    float *x, *columns;
};

template <class E>
bool encode_part(int codec, bool keys, const float* x, int64_t tokens, int64_t dim, uint8_t* part, const Room& room) {
    const int64_t n = tokens * dim;
    bool good = true;
    int64_t used;
    if (codec == FP8) {
        good = encode_fp8(x, n, part);
        used = SCALE_BYTES + n;
    } else if (codec == INT8) {
        E *scales = (E*)part, *minimums = scales + tokens;
        uint8_t* codes = (uint8_t*)(minimums + tokens);
        for (int64_t t = 0; t < tokens; ++t)
            good &= encode_row(x + t * dim, dim, 255.0f, scales + t, minimums + t, codes + t * dim);
        used = 2 * tokens * (int64_t)sizeof(E) + n;
    } else {
        const int64_t across = groups_of(dim), groups = keys ? groups_of(tokens) * dim : tokens * across;
        E *scales = (E*)part, *minimums = scales + groups;
        if (keys)
            for (int64_t t = 0; t < tokens; t += GROUP) {
                const int64_t at = t / GROUP * dim, rows = std::min(GROUP, tokens - t);
                good &= encode_columns(x + t * dim, rows, dim, 15.0f, scales + at, minimums + at, room.codes + t * dim,
                                       room.columns);
            }
        else
            for (int64_t t = 0; t < tokens; ++t)
                for (int64_t g = 0; g < across; ++g) {
                    const int64_t at = t * dim + g * GROUP;
                    good &= encode_row(x + at, std::min(GROUP, dim - g * GROUP), 15.0f, scales + t * across + g,
                                       minimums + t * across + g, room.codes + at);
                }
        pack_nibbles(room.codes, n, (uint8_t*)(minimums + groups));
        used = 2 * groups * (int64_t)sizeof(E) + (n + 1) / 2;
    }
    std::memset(part + used, 0, rounded(used) - used);
    return good;
}

template <class E>
void put_back(const uint8_t* codes, int64_t n, float scale, float low, E* to) {
    const float most = float_of(LARGEST<E>);
    for (int64_t i = 0; i < n; ++i) {
        const float y = (float)codes[i] * scale + low;
        to[i] = narrow<E>(y > most ? most : y);
    }
}

template <class E>
void decode_part(int codec, bool keys, const uint8_t* part, int64_t tokens, int64_t dim, E* to, const Room& room) {
    const int64_t n = tokens * dim;
    const float most = float_of(LARGEST<E>);
    if (codec == FP8) {
        float scale;
        std::memcpy(&scale, part, sizeof scale);
        for (int64_t i = 0; i < n; ++i) {
            const float y = from_e4m3(part[SCALE_BYTES + i]) * scale, high = y > most ? most : y;
            to[i] = narrow<E>(high < -most ? -most : high);
        }
    } else if (codec == INT8) {
        const E *scales = (const E*)part, *minimums = scales + tokens;
        const uint8_t* codes = (const uint8_t*)(minimums + tokens);
        for (int64_t t = 0; t < tokens; ++t)
            put_back(codes + t * dim, dim, wide(scales[t]), wide(minimums[t]), to + t * dim);
    } else {
        const int64_t across = groups_of(dim), groups = keys ? groups_of(tokens) * dim : tokens * across;
        const E *scales = (const E*)part, *minimums = scales + groups;
        unpack_nibbles((const uint8_t*)(minimums + groups), n, room.codes);
        for (int64_t t = 0; t < tokens; ++t) {
            if (keys) {
                const E *s = scales + t / GROUP * dim, *low = minimums + t / GROUP * dim;
                for (int64_t d = 0; d < dim; ++d) {
                    const float y = (float)room.codes[t * dim + d] * wide(s[d]) + wide(low[d]);
                    to[t * dim + d] = narrow<E>(y > most ? most : y);
                }
                continue;
            }
            for (int64_t g = 0; g < across; ++g) {
                const int64_t at = t * dim + g * GROUP, in = t * across + g;
                put_back(room.codes + at, std::min(GROUP, dim - g * GROUP), wide(scales[in]), wide(minimums[in]),
                         to + at);
            }
        }
    }
}

template <class E>
bool encode_layer(int codec, const Layer& layer, int64_t tokens, const Room& room) {
    const int64_t n = tokens * layer.dim;
    uint8_t* part = room.encoded;
    const E* from = (const E*)room.exact;
    for (int64_t each = 0; each < 2 * layer.heads; ++each, from += n) {
        const bool keys = each % 2 == 0;
        if (!widen(from, room.x, n)) return false;
        if (!encode_part<E>(codec, keys, room.x, tokens, layer.dim, part, room)) return false;
        part += part_bytes(codec, keys, tokens, layer.dim, sizeof(E));
    }
    return true;
}

template <class E>
void decode_layer(int codec, const Layer& layer, int64_t tokens, const uint8_t* part, const Room& room) {
    E* to = (E*)room.exact;
    for (int64_t each = 0; each < 2 * layer.heads; ++each, to += tokens * layer.dim) {
        const bool keys = each % 2 == 0;
        decode_part<E>(codec, keys, part, tokens, layer.dim, to, room);
        part += part_bytes(codec, keys, tokens, layer.dim, sizeof(E));
    }
}

int64_t exact_bytes(const Layer& layer, int64_t tokens, int64_t width) {
    return 2 * layer.heads * tokens * layer.dim * width;
}

int64_t encoded_bytes(int codec, const Layer& layer, int64_t tokens, int64_t width) {
    return layer.heads * (part_bytes(codec, true, tokens, layer.dim, width) +
                          part_bytes(codec, false, tokens, layer.dim, width));
}

bool make_room(int codec, const Layer* table, int64_t layers, int64_t tokens, int64_t width, Room& out) {
    static thread_local Scratch memory;
    int64_t exact = 0, encoded = 0, dim = 0;
    for (int64_t layer = 0; layer < layers; ++layer) {
        exact = std::max(exact, exact_bytes(table[layer], tokens, width));
        encoded = std::max(encoded, encoded_bytes(codec, table[layer], tokens, width));
        dim = std::max(dim, table[layer].dim);
    }
    const size_t n = (size_t)(tokens * dim);
    try {
        char* at = memory.get(room<uint8_t>(exact) + room<uint8_t>(encoded) + room<uint8_t>(n) + room<float>(n) +
                              room<float>(3 * dim));
        out.exact = take<uint8_t>(at, exact);
        out.encoded = take<uint8_t>(at, encoded);
        out.codes = take<uint8_t>(at, n);
        out.x = take<float>(at, n);
        out.columns = take<float>(at, 3 * dim);
    } catch (const std::bad_alloc&) {
        return false;
    }
    return true;
}

}  // namespace
}  // namespace kvtide

using namespace kvtide;

// Layers of blocks as computed, verified by their sums [blocks][layers], into encoded ones, whose sums are written.
// table: per layer heads, dim, and where it starts in a block as computed and in an encoded one. width 2: bf16, 4:
// fp32.
extern "C" int kvtide_encode_blocks(const uint8_t* const* from, uint8_t* const* to, int64_t blocks, int64_t codec,
                                    int64_t width, int64_t tokens, const int64_t* table, int64_t layers,
                                    const uint64_t* wanted, uint64_t* sums, uint8_t* outcomes) {
    const Layer* const shapes = (const Layer*)table;
    Room room;
    if (!make_room((int)codec, shapes, layers, tokens, width, room)) return NO_MEMORY;
    for (int64_t block = 0; block < blocks; ++block) {
        outcomes[block] = DONE;
        for (int64_t index = 0; index < layers && outcomes[block] == DONE; ++index) {
            const Layer& layer = shapes[index];
            const int64_t at = block * layers + index;
            const int64_t bytes = exact_bytes(layer, tokens, width);
            if (xxh3<Copy::CACHED>(from[block] + layer.exact, room.exact, bytes) != wanted[at]) {
                outcomes[block] = NOT_WHOLE;
                break;
            }
            const bool finite = width == 2 ? encode_layer<uint16_t>((int)codec, layer, tokens, room)
                                           : encode_layer<float>((int)codec, layer, tokens, room);
            if (!finite) outcomes[block] = NOT_FINITE;
            else
                sums[at] = xxh3<Copy::CACHED>(room.encoded, to[block] + layer.encoded,
                                              encoded_bytes((int)codec, layer, tokens, width));
        }
    }
    return OK;
}

// The other way: of encoded blocks that were verified and that nobody changes.
extern "C" int kvtide_decode_blocks(const uint8_t* const* from, uint8_t* const* to, int64_t blocks, int64_t codec,
                                    int64_t width, int64_t tokens, const int64_t* table, int64_t layers,
                                    uint64_t* sums) {
    const Layer* const shapes = (const Layer*)table;
    Room room;
    if (!make_room((int)codec, shapes, layers, tokens, width, room)) return NO_MEMORY;
    for (int64_t block = 0; block < blocks; ++block)
        for (int64_t index = 0; index < layers; ++index) {
            const Layer& layer = shapes[index];
            const uint8_t* part = from[block] + layer.encoded;
            if (width == 2) decode_layer<uint16_t>((int)codec, layer, tokens, part, room);
            else decode_layer<float>((int)codec, layer, tokens, part, room);
            sums[block * layers + index] =
                xxh3<Copy::CACHED>(room.exact, to[block] + layer.exact, exact_bytes(layer, tokens, width));
        }
    return OK;
}
