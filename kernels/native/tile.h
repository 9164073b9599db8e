// The format of a page: the C++ twin of kernels/layout.py, and element addresses inside a tile.
#pragma once

#include <cstdint>

namespace kvtide {

constexpr int TILE = 16;

enum Status { OK = 0, BAD_ROW = 1, BAD_SPAN = 2, BAD_PAGE = 3, BAD_MASS = 4, NO_MEMORY = 5 };

// E is the stored element: uint16_t holds bf16 bits, float is fp32.
template <class E>
struct Format {
    int64_t page_bytes;
    int dim, padded, tiles;  // head size, head size rounded up to 16, tiles per page
    int64_t value_offset;    // elements from a tile's keys to its values
    int64_t tile_elements;

    Format(int64_t page_bytes_, int dim_) : page_bytes(page_bytes_), dim(dim_), padded((dim_ + 15) / 16 * 16) {
        value_offset = (int64_t)TILE * padded;
        tile_elements = 2 * value_offset;
        tiles = (int)(page_bytes / (tile_elements * (int64_t)sizeof(E)));
    }
    int64_t slots() const { return (int64_t)tiles * TILE; }
};

inline int64_t key_at(const Format<uint16_t>&, int d, int t) { return (d / 2) * 2 * TILE + 2 * t + d % 2; }
inline int64_t key_at(const Format<float>&, int d, int t) { return d * TILE + t; }
inline int64_t value_at(const Format<uint16_t>& f, int d, int t) {
    return (int64_t)(t / 2) * 2 * f.padded + 2 * d + t % 2;
}
inline int64_t value_at(const Format<float>& f, int d, int t) { return (int64_t)t * f.padded + d; }

}  // namespace kvtide
