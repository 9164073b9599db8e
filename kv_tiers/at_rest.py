"""How the KV of a block lies in a tier: as computed, or lossily encoded. FINAL: numbers, layouts and rules below.

A lossy layer has a block's order (`kv_tiers/block_layout.py`): per kv head K, then V, each of them one *part*, its
numbers first, then its codes, one per element [T, D], zeros up to a multiple of 8 bytes:

    fp8   absmax / 448 as fp32, 4 zero bytes | E4M3FN codes
    int8  scales | minimums (per token, over the head's channels) | codes 0..255
    int4  scales | minimums (K: per channel, over at most 32 tokens, [groups, D]; V: per token, over at most 32
          channels, [T, groups]) | codes 0..15, two per byte, the first in the low bits

Scales and minimums have the block's dtype. A group's minimum is one of its elements, its scale (max - min) / 255 or 15
rounded up, so codes reach every element and the error is at most half a scale (and the dtype's own rounding); a
constant group is exact. Codes are rounded half to even, as KIVI does (arXiv 2402.02750, 4-bit keys per channel and
values per token, groups of 32). A block with an element that is not finite is not encoded.
"""

from __future__ import annotations

from enum import IntEnum

GROUP = 32
"""Most elements of an int4 group."""

_SCALE_BYTES = 8  # of fp8, with its padding


class AtRest(IntEnum):
    """A codec; its number stands in headers, keys and files, its `label` in options and requests."""

    EXACT = 0
    FP8 = 1
    INT8 = 2
    INT4 = 3

    @property
    def label(self) -> str:
        """As users say it."""
        return self.name.lower()

    @classmethod
    def named(cls, label: str) -> AtRest:
        """The codec of that label. ValueError, with all of them, for another one."""
        found = next((each for each in cls if each.label == label), None)
        if found is None:
            raise ValueError(f"{label!r:.64} is no codec; valid: {', '.join(each.label for each in cls)}")
        return found


def part_bytes(codec: AtRest, *, keys: bool, tokens: int, dim: int, width: int) -> int:
    """Bytes of the K (`keys`) or V of one head, whose numbers are `width` bytes wide as computed."""
    if codec is AtRest.EXACT:
        return tokens * dim * width
    if codec is AtRest.FP8:
        return _round_up(_SCALE_BYTES + tokens * dim)
    if codec is AtRest.INT8:
        return _round_up(2 * tokens * width + tokens * dim)
    groups = groups_of(tokens) * dim if keys else tokens * groups_of(dim)
    return _round_up(2 * groups * width + (tokens * dim + 1) // 2)


def groups_of(count: int) -> int:
    """Int4 groups along so many elements."""
    return -(-count // GROUP)


def _round_up(size: int) -> int:
    return -(-size // 8) * 8
