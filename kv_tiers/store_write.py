"""A replica's writes into the slab, in pieces: a prompt of 100,000 tokens keeps nobody else waiting for its books."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from kv_tiers.books import SlotBooks
from kv_tiers.keys import BlockKey
from kv_tiers.tier import UnknownLease, WriteLease

PIECE = 512
"""Keys between two turns of the event loop."""


class Listener(Protocol):
    """Who wants to hear of every request's chain."""

    def __call__(self, chain: Sequence[BlockKey]) -> None: ...


class Writes:
    """Both phases of writes. Each turn of the event loop does one piece, or tells one listener.

    Others see a write half prepared or half completed meanwhile: of blocks that become visible tails come before heads.
    """

    def __init__(
        self,
        books: SlotBooks,
        listeners: Callable[[], Sequence[Listener]],
        visible: Callable[[Sequence[BlockKey]], None],
    ) -> None:
        """`listeners` hear of a request's keys before it gets slots; `visible` hears of what became so."""
        self._books = books
        self._listeners = listeners
        self._visible = visible

    async def prepare(
        self, keys: Sequence[BlockKey], owner: str, *, tenant: str | None, bypass: bool
    ) -> WriteLease:
        """`BlockStore.prepare_write`; an owner who is released meanwhile gets no slot."""
        long = len(keys) > PIECE
        for listener in self._listeners():
            listener(keys)
            await _others(long)
        if not long:
            return self._books.reserve(keys, owner, tenant=tenant, bypass=bypass)
        chain = frozenset(keys)
        leases: list[WriteLease] = []
        joined: WriteLease | None = None
        try:
            for at in range(0, len(keys), PIECE):
                piece = keys[at : at + PIECE]
                leases.append(self._books.reserve(piece, owner, tenant=tenant, bypass=bypass, spare=chain))
                await _others(True)
            joined = self._books.join(leases)
        except UnknownLease:  # of an owner that died
            pass
        finally:
            if joined is None:
                self._end(leases)
        return joined or WriteLease(self._books.reserve((), owner).id, (), (), (), tuple(keys))

    async def complete(self, lease_id: int, written: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        """`BlockStore.complete_write`. Cancelled, it is completed all the same."""
        parts = self._books.part(lease_id, written, PIECE)
        pieces: list[tuple[BlockKey, ...]] = []
        try:
            while len(parts) > 1:
                pieces.append(self._commit(*parts.pop(0)))
                await _others(True)
        finally:
            pieces += [self._commit(*part) for part in parts]
        return tuple(key for piece in reversed(pieces) for key in piece)

    def _commit(self, lease_id: int, written: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        try:
            visible = self._books.complete_write(lease_id, written)
        except UnknownLease:  # reclaimed while we were at another piece
            return ()
        self._visible(visible)
        return visible

    def _end(self, leases: Sequence[WriteLease]) -> None:
        for lease in leases:
            try:
                self._books.complete_write(lease.id, ())
            except UnknownLease:
                continue


async def _others(wait: bool) -> None:
    """Let the event loop go round."""
    if wait:
        await asyncio.sleep(0)
