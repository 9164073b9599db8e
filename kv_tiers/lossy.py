"""A tier that keeps blocks lossily encoded: another tier holds what a codec makes of them, under its own keys.

Bytes per block are a half or a third, and what comes back is near what was computed, not equal to it. So a block that
is put under its exact key is found under the lossy one only (`kv_tiers/keys.py`), and whoever asks for exact blocks
meets a miss. What the tier below bounds, checks, announces and finds after a restart are the encoded blocks.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from kernels.lossy import Encoded
from kv_tiers.at_rest import AtRest
from kv_tiers.block_copy import address_of
from kv_tiers.cpu import in_thread
from kv_tiers.keys import BlockKey, is_exact, is_kept_as, kept_as, lossy_key
from kv_tiers.lossy_blocks import decode_blocks, encode_blocks
from kv_tiers.tier import Changes, Fetched, Manifest, Stored, Tier, TierStats, one_each

_SCRATCH_BYTES = 64 << 20


class Scratch:
    """Page-aligned buffers of one size: `nbytes` of them in one piece of memory, that a device may register; what is
    taken beyond has memory of its own. Pages that nobody used take none.
    """

    def __init__(self, slot_bytes: int, nbytes: int = _SCRATCH_BYTES) -> None:
        count = max(1, nbytes // slot_bytes)
        self._slot_bytes = slot_bytes
        self._memory = memoryview(mmap.mmap(-1, count * slot_bytes))
        self._free = [self._memory[at * slot_bytes : (at + 1) * slot_bytes] for at in range(count)]

    @property
    def place(self) -> tuple[int, int]:
        """Address and bytes of the one piece."""
        return address_of(self._memory), len(self._memory)

    @contextmanager
    def buffers(self, count: int) -> Iterator[list[memoryview]]:
        """So many, until the end of the block; nothing may touch them afterwards."""
        taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        own = [memoryview(mmap.mmap(-1, self._slot_bytes)) for _ in range(count - len(taken))]
        try:
            yield taken + own
        finally:
            self._free += taken


@dataclass
class LossyCounters:
    """Blocks that could not be encoded: `not_finite` have numbers that no codec takes, `not_whole` were torn or others;
    and `foreign` ones that lay under a key of ours and were no blocks of our codec.
    """

    not_finite: int = 0
    not_whole: int = 0
    foreign: int = 0


class LossyTier:
    """`Tier` whose `put` takes blocks as computed, by their exact keys, and whose `get` gives back decoded ones, by
    their lossy keys; `longest_run`, changes and manifest speak of lossy keys too. What commands name by exact keys
    (`accessed`, `pin`, `unpin`, `drop`) concerns what was made of them.

    `inner` is the tier below, a caller's own, of encoded slots; `slot_bytes` that of blocks as computed, `scratch`
    buffers for `inner`. A block with a number that is not finite is not taken: FAILED.
    """

    def __init__(self, inner: Tier, at_rest: AtRest, slot_bytes: int, scratch: Scratch | None = None) -> None:
        assert at_rest is not AtRest.EXACT, "nothing to encode"
        self.name = inner.name
        self.at_rest: AtRest = at_rest
        self.slot_bytes = slot_bytes
        self.counters = LossyCounters()
        self._inner = inner
        self._scratch = scratch or Scratch(inner.slot_bytes)
        self._clears = 0
        self._closed = False

    @property
    def stored_bytes(self) -> int:
        """Bytes of a slot as it is kept."""
        return self._inner.slot_bytes

    @property
    def incarnation(self) -> int | None:
        """Of a shared store, as its tier says; None where there is none."""
        return getattr(self._inner, "incarnation", None)

    @property
    def left_alone(self) -> bool:
        """As its tier says."""
        return self._inner.left_alone

    async def start(self) -> None:
        await self._inner.start()

    def accessed(self, chain: Sequence[BlockKey]) -> None:
        self._inner.accessed(self._ours(chain))

    def longest_run(self, keys: Sequence[BlockKey]) -> int:
        foreign = (at for at, key in enumerate(keys) if not is_kept_as(key, self.at_rest))
        return self._inner.longest_run(keys[: next(foreign, len(keys))])

    async def get(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[Fetched]:
        assert len(keys) == len(into) and all(len(buffer) == self.slot_bytes for buffer in into)
        answers = [Fetched.MISS] * len(keys)
        asked = [at for at, key in enumerate(keys) if is_kept_as(key, self.at_rest)]
        with self._scratch.buffers(len(asked)) as encoded:
            found = await self._inner.get([keys[at] for at in asked], encoded)
            for at, answer in zip(asked, found, strict=True):
                answers[at] = answer
            hits = [place for place, answer in enumerate(found) if answer is Fetched.HIT]
            if not hits:
                return answers
            decode = partial(
                decode_blocks,
                [encoded[place] for place in hits],
                [into[asked[place]] for place in hits],
                [keys[asked[place]] for place in hits],
                self.at_rest,
            )
            decoded = await in_thread(decode)
        foreign = [asked[place] for place, good in zip(hits, decoded, strict=True) if not good]
        if foreign:
            self.counters.foreign += len(foreign)
            for at in foreign:
                answers[at] = Fetched.CORRUPT
            if not self._closed:
                await self._inner.drop([keys[at] for at in foreign])
        return answers

    async def put(
        self, keys: Sequence[BlockKey], blocks: Sequence[memoryview], *, tenant: str | None = None
    ) -> list[Stored]:
        assert len(keys) == len(blocks) and all(len(block) == self.slot_bytes for block in blocks)
        sources = {
            key: block
            for key, block in zip(reversed(keys), reversed(blocks), strict=True)
            if is_exact(key) and not self._inner.longest_run([lossy_key(key, self.at_rest)])
        }
        answers = {key: Stored.PRESENT if is_exact(key) else Stored.FAILED for key in keys}
        new = [key for key in answers if key in sources]  # heads first, as they came
        if new:
            answers |= await self._put(new, [sources[key] for key in new], tenant)
        return one_each(keys, answers)

    async def drop(self, keys: Sequence[BlockKey]) -> int:
        return await self._inner.drop(self._ours(keys))

    def pin(self, keys: Sequence[BlockKey]) -> int:
        return self._inner.pin(self._ours(keys))

    def unpin(self, keys: Sequence[BlockKey]) -> int:
        return self._inner.unpin(self._ours(keys))

    def expire(self) -> int:
        return self._inner.expire()

    async def clear(self) -> None:
        self._clears += 1
        await self._inner.clear()

    def drain_changes(self) -> Changes:
        return self._inner.drain_changes()

    def manifest(self) -> Manifest:
        return self._inner.manifest()

    def stats(self) -> TierStats:
        return self._inner.stats()

    def check(self) -> None:
        self._inner.check()

    async def close(self) -> None:
        self._closed = True
        await self._inner.close()

    async def _put(
        self, keys: Sequence[BlockKey], blocks: Sequence[memoryview], tenant: str | None
    ) -> dict[BlockKey, Stored]:
        """Encode and hand on; one answer per key."""
        answers = dict.fromkeys(keys, Stored.FAILED)
        clears = self._clears
        with self._scratch.buffers(len(keys)) as encoded:
            made = await in_thread(partial(encode_blocks, blocks, encoded, keys, self.at_rest))
            self.counters.not_finite += made.count(Encoded.NOT_FINITE)
            self.counters.not_whole += made.count(Encoded.NOT_WHOLE)
            done = [place for place, outcome in enumerate(made) if outcome is Encoded.DONE]
            if not done or self._closed or clears != self._clears:  # cleared: also what was being written
                return answers
            names = [lossy_key(keys[place], self.at_rest) for place in done]
            stored = await self._inner.put(names, [encoded[place] for place in done], tenant=tenant)
        answers.update(zip([keys[place] for place in done], stored, strict=True))
        return answers

    def _ours(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """What was made of these, without what others made."""
        names = [kept_as(key, self.at_rest) for key in keys]
        return [name for name in names if is_kept_as(name, self.at_rest)]
