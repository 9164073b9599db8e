"""Lossy tiers in the place of exact ones: the contract suite's keys and bytes, with what is made of them in between."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tier_stands import LAYOUT, NvmeStand, RedisStand, Stand, block, buffer

from kv_tiers.at_rest import AtRest
from kv_tiers.block import BlockFault, read_header, read_layer
from kv_tiers.keys import BlockKey, is_exact, lossy_key
from kv_tiers.lossy import LossyTier
from kv_tiers.lossy_blocks import encode_blocks
from kv_tiers.packing import FRAME_BYTES
from kv_tiers.redis_values import value_name
from kv_tiers.tier import Changes, Fetched, Manifest, Stored, Tier


class AsExact:
    """A lossy tier under exact keys. A hit is compared with what was put, and gives that back if it is near."""

    def __init__(self, tier: LossyTier, put: dict[BlockKey, bytes]) -> None:
        self.lossy = tier
        self.given = put
        self.exact: dict[BlockKey, BlockKey] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self.lossy, name)

    def longest_run(self, keys: Sequence[BlockKey]) -> int:
        assert not any(self.lossy.longest_run([key]) for key in keys), "answered for exact keys"
        return self.lossy.longest_run(self._made(keys))

    async def get(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[Fetched]:
        answers = await self.lossy.get(self._made(keys), into)
        for key, answer, found in zip(keys, answers, into, strict=True):
            if answer is Fetched.HIT:
                wanted = self.given[key]
                assert_near(memoryview(bytearray(wanted)), found, lossy_key(key, self.lossy.at_rest))
                found[:] = wanted
        return answers

    async def put(
        self, keys: Sequence[BlockKey], blocks: Sequence[memoryview], *, tenant: str | None = None
    ) -> list[Stored]:
        self.given |= {key: bytes(each) for key, each in zip(keys, blocks, strict=True)}
        self._made(keys)
        return await self.lossy.put(keys, blocks, tenant=tenant)

    def drain_changes(self) -> Changes:
        changes = self.lossy.drain_changes()
        return Changes(changes.seq, self._names(changes.added), self._names(changes.removed))

    def manifest(self) -> Manifest:
        manifest = self.lossy.manifest()
        return Manifest(manifest.seq, self._names(manifest.keys))

    def _made(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        names = [lossy_key(key, self.lossy.at_rest) for key in keys]
        self.exact |= dict(zip(names, keys, strict=True))
        return names

    def _names(self, keys: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        assert not any(map(is_exact, keys)), "an exact key was told"
        self._made(list(self.given))
        return tuple(self.exact[key] for key in keys)


def assert_near(wanted: memoryview, found: memoryview, key: BlockKey) -> None:
    """Numbers in [0, 1), within what int4 leaves, in a whole block of the lossy key."""
    ours, theirs = read_header(wanted), read_header(found)
    assert not isinstance(ours, BlockFault) and not isinstance(theirs, BlockFault)
    assert theirs.key == key and theirs.fingerprint == ours.fingerprint and theirs.layout == ours.layout
    for layer, (heads, dim) in enumerate(LAYOUT.layers):
        rows = [torch.empty(heads, LAYOUT.block_tokens, dim) for _ in range(4)]
        assert read_layer(wanted, LAYOUT, ours, layer, *rows[:2])
        assert read_layer(found, LAYOUT, theirs, layer, *rows[2:])
        for before, after in ((rows[0], rows[2]), (rows[1], rows[3])):
            assert (before - after).abs().max() <= 0.5 / 15 + 1e-6


def encoded(key: BlockKey, codec: AtRest) -> bytes:
    """What a lossy tier makes of the block of a key."""
    into = buffer()
    encode_blocks([block(key)], [into], [key], codec)
    return bytes(into[: LAYOUT.kept_as(codec).nbytes])


class LossyNvmeStand(NvmeStand):
    name = "nvme int8"
    codec = AtRest.INT8

    async def make(self) -> Tier:
        self.given: dict[BlockKey, bytes] = getattr(self, "given", {})
        inner = await super().make()
        return AsExact(LossyTier(inner, self.codec, inner.slot_bytes), self.given)

    async def corrupt(self, key: BlockKey) -> None:
        place = self.path.read_bytes().index(encoded(key, self.codec)) + LAYOUT.header_bytes
        with self.path.open("r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1]))


class LossyRedisStand(RedisStand):
    name = "redis int4"
    codec = AtRest.INT4

    async def make(self) -> Tier:
        self.options = {**self.options, "at_rest": self.codec}
        self.given: dict[BlockKey, bytes] = getattr(self, "given", {})
        inner = await super().make()
        return AsExact(LossyTier(inner, self.codec, inner.slot_bytes), self.given)

    async def corrupt(self, key: BlockKey) -> None:
        name, place = value_name(lossy_key(key, self.codec)), FRAME_BYTES + LAYOUT.header_bytes
        with self.server.client() as client:
            found = client.getrange(name, place, place)
            client.setrange(name, place, bytes([found[0] ^ 1]))


LOSSY_STANDS: list[type[Stand]] = [LossyNvmeStand, LossyRedisStand]
