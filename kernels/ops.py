"""The operations everybody calls, and the one place that chooses who computes them.

The native implementation is built on first use; without a working C++ compiler, or with KVTIDE_KERNELS=torch, plain
torch does the same work several times slower, and says so once in the log. Contracts: `kernels.reference`.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Protocol

import torch

from kernels import fallback, native
from kernels.build import BuildFailed
from kernels.layout import PageLayout

_CHOICES = ("native", "torch")
_log = logging.getLogger(__name__)


class Kernels(Protocol):
    """What an implementation offers; the contract of each operation is the docstring in `kernels.reference`."""

    def paged_decode_attention(
        self,
        q: torch.Tensor,
        pool: torch.Tensor,
        layout: PageLayout,
        tables: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        rows: torch.Tensor,
        scale: float,
        *,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        mass: torch.Tensor | None = None,
        reduce: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def append(
        self,
        pool: torch.Tensor,
        layout: PageLayout,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        rows: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None: ...

    def scatter(
        self,
        pool: torch.Tensor,
        layout: PageLayout,
        pages: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        first_slot: int = 0,
    ) -> None: ...

    def scatter_heads(
        self,
        pool: torch.Tensor,
        layout: PageLayout,
        tables: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        first_slot: int = 0,
    ) -> None: ...

    def gather(
        self,
        pool: torch.Tensor,
        layout: PageLayout,
        pages: torch.Tensor,
        start: int,
        stop: int,
        k_out: torch.Tensor,
        v_out: torch.Tensor,
    ) -> None: ...

    def gather_heads(
        self,
        pool: torch.Tensor,
        layout: PageLayout,
        tables: torch.Tensor,
        start: int,
        stop: int,
        k_out: torch.Tensor,
        v_out: torch.Tensor,
    ) -> None: ...

    def copy_page(self, pool: torch.Tensor, src: int, dst: int) -> None: ...

    def column_sums(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        lse: torch.Tensor,
        scale: float,
        start: int,
        out: torch.Tensor,
        *,
        softcap: float = 0.0,
    ) -> None: ...

    def move_slots(
        self, pool: torch.Tensor, layout: PageLayout, tables: torch.Tensor, sources: torch.Tensor
    ) -> None: ...

    def add_seen(self, sums: torch.Tensor, seen: torch.Tensor, lengths: torch.Tensor) -> None: ...

    def lowest_slots(
        self,
        score: torch.Tensor | None,
        positions: torch.Tensor,
        kept: torch.Tensor,
        lengths: torch.Tensor,
        now: int,
        *,
        recent: torch.Tensor | None = None,
        seen: int = 0,
    ) -> torch.Tensor: ...

    def keep_highest(
        self, values: torch.Tensor, positions: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor: ...


def requested() -> str:
    """The environment's choice: KVTIDE_KERNELS is `native` (the default) or `torch`. ValueError otherwise."""
    choice = os.environ.get("KVTIDE_KERNELS", "native")
    if choice not in _CHOICES:
        raise ValueError(f"KVTIDE_KERNELS must be one of {', '.join(_CHOICES)}, got {choice!r}")
    return choice


def choose(requested: str) -> tuple[str, Kernels]:
    """The implementation that serves a request for `native` or `torch`, and its name. Logs why when they differ."""
    if requested == "native":
        try:
            return "native", native.load()
        except BuildFailed as failure:
            _log.warning("attention runs in plain torch, several times slower than native: %s", failure)
    return "torch", fallback


@functools.cache
def _chosen() -> tuple[str, Kernels]:
    return choose(requested())


def implementation() -> str:
    """`native` or `torch`: who computes in this process. The first call may build (a few seconds)."""
    return _chosen()[0]


def paged_decode_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    layout: PageLayout,
    tables: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    *,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    mass: torch.Tensor | None = None,
    reduce: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query token per sequence over its pages: out [B,Hq,D] and lse f32[B,Hq].

    mass f32[B,Hk,M] receives the probability of each slot for sequences whose reduce int32[B] says how.
    """
    return _chosen()[1].paged_decode_attention(
        q,
        pool,
        layout,
        tables,
        starts,
        lengths,
        rows,
        scale,
        softcap=softcap,
        sinks=sinks,
        mass=mass,
        reduce=reduce,
    )


def append(
    pool: torch.Tensor,
    layout: PageLayout,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """Write one token's k and v [B,Hk,D] at slot lengths[rows[b], h] of every head."""
    _chosen()[1].append(pool, layout, tables, lengths, rows, k, v)


def scatter(
    pool: torch.Tensor,
    layout: PageLayout,
    pages: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first_slot: int = 0,
) -> None:
    """Write canonical rows [n,D] into consecutive slots of one head's pages int32[p]."""
    _chosen()[1].scatter(pool, layout, pages, k, v, first_slot)


def scatter_heads(
    pool: torch.Tensor,
    layout: PageLayout,
    tables: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first_slot: int = 0,
) -> None:
    """Write canonical rows [Hk,n,D] into consecutive slots of every head's pages int32[Hk,P]."""
    _chosen()[1].scatter_heads(pool, layout, tables, k, v, first_slot)


def gather(
    pool: torch.Tensor,
    layout: PageLayout,
    pages: torch.Tensor,
    start: int,
    stop: int,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> None:
    """Read slots start .. stop of one head's pages int32[p] into canonical rows [stop-start,D]."""
    _chosen()[1].gather(pool, layout, pages, start, stop, k_out, v_out)


def gather_heads(
    pool: torch.Tensor,
    layout: PageLayout,
    tables: torch.Tensor,
    start: int,
    stop: int,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> None:
    """Read slots start .. stop of every head's pages int32[Hk,P] into canonical rows [Hk,stop-start,D]."""
    _chosen()[1].gather_heads(pool, layout, tables, start, stop, k_out, v_out)


def copy_page(pool: torch.Tensor, src: int, dst: int) -> None:
    """Copy every byte of page src onto page dst."""
    _chosen()[1].copy_page(pool, src, dst)


def column_sums(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    start: int,
    out: torch.Tensor,
    *,
    softcap: float = 0.0,
) -> None:
    """Add to out f32[Hk,M] the causal attention that keys [Hk,N,D] get from queries [Hq,T,D] at start .. start+T-1."""
    _chosen()[1].column_sums(q, k, lse, scale, start, out, softcap=softcap)


def move_slots(pool: torch.Tensor, layout: PageLayout, tables: torch.Tensor, sources: torch.Tensor) -> None:
    """Let slot i of every head of page lists int32[Hk,P] hold what slot sources int64[Hk,n] held; -1: as it is."""
    _chosen()[1].move_slots(pool, layout, tables, sources)


def add_seen(sums: torch.Tensor, seen: torch.Tensor, lengths: torch.Tensor) -> None:
    """Add seen to sums, both f32[L,Hk,.], in the first lengths int32[L,Hk] slots of each head."""
    _chosen()[1].add_seen(sums, seen, lengths)


def lowest_slots(
    score: torch.Tensor | None,
    positions: torch.Tensor,
    kept: torch.Tensor,
    lengths: torch.Tensor,
    now: int,
    *,
    recent: torch.Tensor | None = None,
    seen: int = 0,
) -> torch.Tensor:
    """int64[L,Hk]: the slot of each head whose token leaves first, the lowest score's, of equal ones the oldest."""
    return _chosen()[1].lowest_slots(score, positions, kept, lengths, now, recent=recent, seen=seen)


def keep_highest(values: torch.Tensor, positions: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """bool[L,Hk,C]: the counts int32[L,Hk] slots of each head with the highest values f64, of equal ones the newest."""
    return _chosen()[1].keep_highest(values, positions, counts)
