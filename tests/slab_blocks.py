"""Real blocks in page-aligned slots, for tests of reads between slabs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kv_tiers.block import BlockLayout, write_block
from kv_tiers.keys import BlockKey, Fingerprint
from kv_tiers.verify import verify_block

LAYOUT = BlockLayout(((4, 64), (4, 64), (4, 64)), torch.float32, 16)
SLOT_BYTES = -(-LAYOUT.nbytes // 4096) * 4096
FINGERPRINT = Fingerprint(b"f" * 32)


def block_keys_of(numbers: Sequence[int]) -> list[BlockKey]:
    return [BlockKey(number.to_bytes(4, "big") * 8) for number in numbers]


def write(slot: memoryview, key: BlockKey) -> None:
    """The block of that key, with contents of its own."""
    seeded = torch.Generator().manual_seed(int.from_bytes(key.digest[:4], "big"))
    shape = (4, 16, 64)
    rows = [torch.randn(shape, generator=seeded) for _ in LAYOUT.layers]
    write_block(slot[: LAYOUT.nbytes], LAYOUT, FINGERPRINT, key, rows, [row + 1 for row in rows])


def is_whole(slot: memoryview, key: BlockKey) -> bool:
    return verify_block(slot, key) is None
