"""Whole blocks encoded and decoded: verified before, and under a key that says what they are after."""

from __future__ import annotations

from collections.abc import Sequence

from kernels.lossy import Encoded
from kv_tiers import lossy_codec
from kv_tiers.at_rest import AtRest
from kv_tiers.block import MAGIC, BlockFault, SealedHeader, read_sealed_header, seal_block
from kv_tiers.block_copy import BlockViews, Buffer
from kv_tiers.block_layout import CHECKSUM_BYTES, BlockLayout
from kv_tiers.keys import BlockKey, Fingerprint, lossy_key


def encode_blocks(
    sources: Sequence[Buffer], targets: Sequence[Buffer], keys: Sequence[BlockKey], codec: AtRest
) -> list[Encoded]:
    """Make lossy blocks, under their own keys, of the blocks of these exact `keys`; → what became of each.

    Every layer's checksum is compared with the bytes that are encoded. A source of another key, or encoded already, or
    whose block is too long for its target, is NOT_WHOLE. Behind a block its target is zeros; where none was made there
    is none.
    """
    outcomes = [Encoded.NOT_WHOLE] * len(keys)
    blocks, into = BlockViews(sources), BlockViews(targets)
    for layout, group in _by_layout(blocks, into, keys, AtRest.EXACT, codec).items():
        encoded = layout.kept_as(codec)
        wanted = b"".join([sealed.checksums for sealed in group.values()])
        checksums = bytearray(len(wanted))
        indexes = list(group)
        made = lossy_codec.chosen().encode(
            blocks.pick(indexes), into.pick(indexes), encoded, wanted, checksums
        )
        for at, (index, outcome) in enumerate(zip(indexes, made, strict=True)):
            outcomes[index] = outcome
            if outcome is Encoded.DONE:
                _seal(into[index], encoded, group[index], lossy_key(keys[index], codec), checksums, at)
    return outcomes


def decode_blocks(
    sources: Sequence[Buffer], targets: Sequence[Buffer], keys: Sequence[BlockKey], codec: AtRest
) -> list[bool]:
    """Make blocks as replicas read them, still under their lossy `keys`; → of each, whether.

    Sources were verified, and nobody changes them. One of another key or codec, or whose block is too long for its
    target, is not decoded. Targets as in `encode_blocks`.
    """
    decoded = [False] * len(keys)
    blocks, into = BlockViews(sources), BlockViews(targets)
    for encoded, group in _by_layout(blocks, into, keys, codec, AtRest.EXACT).items():
        checksums = bytearray(CHECKSUM_BYTES * len(encoded.layers) * len(group))
        indexes = list(group)
        lossy_codec.chosen().decode(blocks.pick(indexes), into.pick(indexes), encoded, checksums)
        for at, index in enumerate(indexes):
            decoded[index] = True
            _seal(into[index], encoded.kept_as(AtRest.EXACT), group[index], keys[index], checksums, at)
    return decoded


def _by_layout(
    blocks: BlockViews, into: BlockViews, keys: Sequence[BlockKey], before: AtRest, after: AtRest
) -> dict[BlockLayout, dict[int, SealedHeader]]:
    """Headers of the right blocks, by index; the targets, all of them, are no blocks any more."""
    assert len(blocks) == len(into) == len(keys)
    groups: dict[BlockLayout, dict[int, SealedHeader]] = {}
    for index, (block, target, key) in enumerate(zip(blocks, into, keys, strict=True)):
        target[: len(MAGIC)] = bytes(len(MAGIC))
        sealed = read_sealed_header(block)
        if isinstance(sealed, BlockFault) or sealed.key != key.digest or sealed.layout.codec is not before:
            continue
        if sealed.layout.kept_as(after).nbytes <= len(target):
            groups.setdefault(sealed.layout, {})[index] = sealed
    return groups


def _seal(
    target: memoryview,
    layout: BlockLayout,
    sealed: SealedHeader,
    key: BlockKey,
    checksums: bytearray,
    at: int,
) -> None:
    row = CHECKSUM_BYTES * len(layout.layers)
    seal_block(target, layout, Fingerprint(sealed.fingerprint), key, checksums[at * row : (at + 1) * row])
