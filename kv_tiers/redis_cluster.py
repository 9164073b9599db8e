"""Blocks in a Redis cluster: the values go through a client that follows slots from node to node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Protocol

from kv_tiers.packing import FRAME_BYTES, read_frame_header, unpack_body
from kv_tiers.redis_ports import Item, Outcome, Outgoing, Sent, Wanted
from kv_tiers.redis_values import UNCOMMITTED_S, VALUE_BYTES, part_names, value_name
from kv_tiers.tier import Fetched
from kv_tiers.verify import verify_block


class ValueClient(Protocol):
    """One command each, within its deadline; answers are values."""

    async def get(self, name: bytes) -> bytes | Fetched:
        """The value, or MISS, CORRUPT (another type), FAILED."""
        ...

    async def set(self, name: bytes, value: bytes, seconds: int | None) -> Sent:
        """Set, with a time to live if one is given."""
        ...

    async def keep(self, names: Sequence[bytes]) -> bool:
        """Give parts the tier's time to live, or none."""
        ...


class ClusterLanes:
    """As `redis_lanes.Lanes`, with at most `connections` values under way. One failure ends its batch."""

    def __init__(self, client: ValueClient, *, connections: int, ttl_s: float | None) -> None:
        self._client = client
        self._ttl_s = None if ttl_s is None else max(1, round(ttl_s))
        self._room = asyncio.Semaphore(connections)

    async def fetch(self, wanted: Sequence[Wanted]) -> list[Fetched]:
        """One answer per block. HIT means verified."""
        return await self._spread(wanted, self._fetch, Fetched.FAILED)

    async def store(self, outgoing: Sequence[Outgoing]) -> list[Sent]:
        """One answer per block."""
        return await self._spread(outgoing, self._store, Sent.UNKNOWN)

    async def compute(self, action: Callable[[Item], Outcome], items: Sequence[Item]) -> list[Outcome]:
        """`action` of each item in threads."""
        return await asyncio.gather(*(asyncio.to_thread(action, item) for item in items))

    def disconnect(self) -> None:
        """The client looks after its connections."""

    async def close(self) -> None:
        """Nothing is held."""

    async def _spread(
        self, items: Sequence[Item], action: Callable[[Item], Coroutine[None, None, Outcome]], failed: Outcome
    ) -> list[Outcome]:
        over = False

        async def one(item: Item) -> Outcome:
            nonlocal over
            async with self._room:
                if over:
                    return failed
                outcome = await action(item)
                over = over or outcome is failed
                return outcome

        async with asyncio.TaskGroup() as group:  # which waits for its tasks, cancelled ones too
            tasks = [group.create_task(one(item)) for item in items]
        return [task.result() for task in tasks]

    async def _fetch(self, wanted: Wanted) -> Fetched:
        first = await self._client.get(value_name(wanted.key))
        if isinstance(first, Fetched):
            return first
        header = read_frame_header(first)
        if header is None:
            return Fetched.CORRUPT
        pieces = [memoryview(first)[FRAME_BYTES:]]
        for name in part_names(wanted.key, FRAME_BYTES + header.body_bytes):
            part = await self._client.get(name)
            if isinstance(part, Fetched):
                return part
            pieces.append(memoryview(part))
        if sum(map(len, pieces)) != header.body_bytes or header.raw_bytes > len(wanted.into):
            return Fetched.CORRUPT

        def restore() -> Fetched:
            whole = pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))
            if not unpack_body(header, whole, wanted.into):
                return Fetched.CORRUPT
            fault = verify_block(wanted.into[: header.raw_bytes], wanted.key)
            return Fetched.HIT if fault is None else Fetched.CORRUPT

        return await _finished(restore)

    async def _store(self, outgoing: Outgoing) -> Sent:
        header, body = outgoing.frame
        names = part_names(outgoing.key, outgoing.frame.nbytes)
        first = VALUE_BYTES - FRAME_BYTES
        for part, name in enumerate(names):
            start = first + part * VALUE_BYTES
            sent = await self._client.set(name, bytes(body[start : start + VALUE_BYTES]), UNCOMMITTED_S)
            if sent is not Sent.STORED:
                return sent
        sent = await self._client.set(value_name(outgoing.key), header + body[:first], self._ttl_s)
        if sent is Sent.STORED and names and not await self._client.keep(names):
            return Sent.UNKNOWN
        return sent


async def _finished(action: Callable[[], Fetched]) -> Fetched:
    """Run it in a thread; a cancelled caller gets its buffer back only when the thread is done with it."""
    running = asyncio.ensure_future(asyncio.to_thread(action))
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return running.result()
