"""The operations of `kernels.ops` in C++, called through ctypes, which releases the GIL while they run.

Shapes and contracts: `kernels.reference`. The wrappers check shapes, strides and dtypes before memory is
touched; the C++ side checks every row, length and page id it follows. Runs on torch.get_num_threads() threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int
from pathlib import Path

import torch

from kernels import build, signatures
from kernels.checks import (
    check_columns,
    check_decode,
    check_highest,
    check_lowest,
    check_mass,
    check_moves,
    check_pool,
    check_seen,
    check_span,
    check_tables,
    check_vectors,
)
from kernels.layout import PageLayout


class NativeKernels:
    """The operations of one built library. `isa` names the instructions it uses, for logs and benchmarks."""

    def __init__(self, path: Path) -> None:
        """OSError: the file does not load on this machine."""
        self._library = ctypes.CDLL(str(path))
        self._decode = self._function("kvtide_decode", signatures.DECODE)
        self._append = self._function("kvtide_append", signatures.APPEND)
        self._move = self._function("kvtide_move", signatures.MOVE)
        self._copy_page = self._function("kvtide_copy_page", signatures.COPY_PAGE)
        self._columns = self._function("kvtide_columns", signatures.COLUMNS)
        self._move_slots = self._function("kvtide_move_slots", signatures.MOVE_SLOTS)
        self._add_seen = self._function("kvtide_add_seen", signatures.ADD_SEEN)
        self._lowest = self._function("kvtide_lowest", signatures.LOWEST)
        self._highest = self._function("kvtide_highest", signatures.HIGHEST)
        self._library.kvtide_isa.restype = ctypes.c_char_p
        self.isa: str = self._library.kvtide_isa().decode()

    def _function(self, name: str, argtypes: Sequence[type]) -> ctypes._CFuncPtr:  # type: ignore[name-defined]
        function = self._library[name]
        function.argtypes = argtypes
        function.restype = c_int
        return function

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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `kernels.reference.paged_decode_attention`."""
        check_pool(pool, layout)
        check_tables(tables, lengths, rows, q.shape[0])
        check_decode(q, layout, tables, starts, sinks)
        check_mass(mass, reduce, q.shape[0], tables.shape[1])
        batch, heads, dim = q.shape
        sequences, kv_heads, pages = tables.shape
        out = torch.empty((batch, heads, dim), dtype=q.dtype)
        lse = torch.empty((batch, heads), dtype=torch.float32)
        observed: tuple[int | None, ...] = (None, 0, 0, 0, None)
        if mass is not None and reduce is not None:
            observed = (mass.data_ptr(), *mass.stride()[:2], mass.shape[2], reduce.data_ptr())
        status = self._decode(
            out.data_ptr(),
            lse.data_ptr(),
            q.data_ptr(),
            *q.stride()[:2],
            pool.data_ptr(),
            pool.shape[0],
            layout.page_bytes,
            layout.dtype is torch.bfloat16,
            dim,
            tables.data_ptr(),
            *tables.stride()[:2],
            pages,
            starts.data_ptr(),
            starts.stride(0),
            lengths.data_ptr(),
            lengths.stride(0),
            rows.data_ptr(),
            sequences,
            batch,
            kv_heads,
            heads // kv_heads,
            scale,
            softcap,
            None if sinks is None else sinks.data_ptr(),
            *observed,
            torch.get_num_threads(),
        )
        assert status == 0, signatures.STATUS[status]
        return out, lse

    def append(
        self,
        pool: torch.Tensor,
        layout: PageLayout,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        rows: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        """See `kernels.reference.append`. Runs on the calling thread."""
        sequences, kv_heads, pages = tables.shape
        batch = k.shape[0]
        check_pool(pool, layout)
        check_tables(tables, lengths, rows, batch)
        check_vectors(k, v, layout, (batch, kv_heads))
        table_row, table_head, _ = tables.stride()
        k_row, k_head, _ = k.stride()
        v_row, v_head, _ = v.stride()
        status = self._append(
            pool.data_ptr(),
            pool.shape[0],
            layout.page_bytes,
            layout.dtype is torch.bfloat16,
            layout.head_dim,
            tables.data_ptr(),
            table_row,
            table_head,
            pages,
            lengths.data_ptr(),
            lengths.stride(0),
            rows.data_ptr(),
            sequences,
            batch,
            kv_heads,
            k.data_ptr(),
            v.data_ptr(),
            k_row,
            k_head,
            v_row,
            v_head,
        )
        assert status == 0, signatures.STATUS[status]

    def scatter(
        self,
        pool: torch.Tensor,
        layout: PageLayout,
        pages: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        first_slot: int = 0,
    ) -> None:
        """See `kernels.reference.scatter`."""
        self._move_heads(True, pool, layout, pages[None], first_slot, k[None], v[None])

    def scatter_heads(
        self,
        pool: torch.Tensor,
        layout: PageLayout,
        tables: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        first_slot: int = 0,
    ) -> None:
        """See `kernels.reference.scatter_heads`."""
        self._move_heads(True, pool, layout, tables, first_slot, k, v)

    def gather(
        self,
        pool: torch.Tensor,
        layout: PageLayout,
        pages: torch.Tensor,
        start: int,
        stop: int,
        k_out: torch.Tensor,
        v_out: torch.Tensor,
    ) -> None:
        """See `kernels.reference.gather`."""
        assert k_out.shape[0] == stop - start, f"k_out has {k_out.shape[0]} rows for slots [{start}, {stop})"
        self._move_heads(False, pool, layout, pages[None], start, k_out[None], v_out[None])

    def gather_heads(
        self,
        pool: torch.Tensor,
        layout: PageLayout,
        tables: torch.Tensor,
        start: int,
        stop: int,
        k_out: torch.Tensor,
        v_out: torch.Tensor,
    ) -> None:
        """See `kernels.reference.gather_heads`."""
        assert k_out.shape[1] == stop - start, f"k_out has {k_out.shape[1]} rows for slots [{start}, {stop})"
        self._move_heads(False, pool, layout, tables, start, k_out, v_out)

    def _move_heads(
        self,
        write: bool,
        pool: torch.Tensor,
        layout: PageLayout,
        tables: torch.Tensor,
        start: int,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        heads, count = k.shape[:2]
        check_pool(pool, layout)
        check_span(tables, layout, start, start + count)
        check_vectors(k, v, layout, (tables.shape[0], count))
        k_head, k_row, _ = k.stride()
        v_head, v_row, _ = v.stride()
        status = self._move(
            write,
            pool.data_ptr(),
            pool.shape[0],
            layout.page_bytes,
            layout.dtype is torch.bfloat16,
            layout.head_dim,
            tables.data_ptr(),
            tables.stride(0),
            heads,
            start,
            start + count,
            k.data_ptr(),
            v.data_ptr(),
            k_head,
            k_row,
            v_head,
            v_row,
            torch.get_num_threads(),
        )
        assert status == 0, signatures.STATUS[status]

    def copy_page(self, pool: torch.Tensor, src: int, dst: int) -> None:
        """See `kernels.reference.copy_page`."""
        assert pool.is_contiguous() and pool.dtype is torch.uint8
        status = self._copy_page(pool.data_ptr(), pool.shape[0], pool.shape[1], src, dst)
        assert status == 0, signatures.STATUS[status]

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
    ) -> None:
        """See `kernels.reference.column_sums`. Products of bf16 pairs where the machine has them, sums in fp32."""
        check_columns(q, k, lse, start, out)
        heads, count, dim = q.shape
        kv_heads = k.shape[0]
        q_head, q_row, _ = q.stride()
        k_head, k_row, _ = k.stride()
        status = self._columns(
            out.data_ptr(),
            out.stride(0),
            q.data_ptr(),
            q_head,
            q_row,
            k.data_ptr(),
            k_head,
            k_row,
            lse.data_ptr(),
            lse.stride(0),
            lse.stride(1),
            q.dtype is torch.bfloat16,
            dim,
            kv_heads,
            heads // kv_heads,
            start,
            count,
            scale,
            softcap,
            torch.get_num_threads(),
        )
        assert status == 0, signatures.STATUS[status]

    def move_slots(
        self, pool: torch.Tensor, layout: PageLayout, tables: torch.Tensor, sources: torch.Tensor
    ) -> None:
        """See `kernels.reference.move_slots`."""
        check_pool(pool, layout)
        check_moves(sources, tables)
        status = self._move_slots(
            pool.data_ptr(),
            pool.shape[0],
            layout.page_bytes,
            layout.dtype is torch.bfloat16,
            layout.head_dim,
            tables.data_ptr(),
            tables.stride(0),
            tables.shape[1],
            tables.shape[0],
            sources.data_ptr(),
            sources.stride(0),
            sources.shape[1],
            torch.get_num_threads(),
        )
        assert status == 0, signatures.STATUS[status]

    def add_seen(self, sums: torch.Tensor, seen: torch.Tensor, lengths: torch.Tensor) -> None:
        """See `kernels.reference.add_seen`."""
        check_seen(sums, seen, lengths)
        status = self._add_seen(
            sums.data_ptr(),
            *sums.stride()[:2],
            seen.data_ptr(),
            *seen.stride()[:2],
            lengths.data_ptr(),
            *lengths.shape,
            min(sums.shape[2], seen.shape[2]),
            torch.get_num_threads(),
        )
        assert status == 0, signatures.STATUS[status]

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
    ) -> torch.Tensor:
        """See `kernels.reference.lowest_slots`. One pass over the slots."""
        check_lowest(score, positions, kept, lengths, recent)
        out = torch.empty(lengths.shape, dtype=torch.int64)
        status = self._lowest(
            out.data_ptr(),
            *((None, 0, 0) if score is None else (score.data_ptr(), *score.stride()[:2])),
            positions.data_ptr(),
            kept.data_ptr(),
            lengths.data_ptr(),
            None if recent is None else recent.data_ptr(),
            now,
            seen,
            *positions.shape,
            positions.shape[2] if score is None else min(positions.shape[2], score.shape[2]),
            torch.get_num_threads(),
        )
        assert status == 0, signatures.STATUS[status]
        return out

    def keep_highest(
        self, values: torch.Tensor, positions: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """See `kernels.reference.keep_highest`."""
        check_highest(values, positions, counts)
        out = torch.empty(values.shape, dtype=torch.bool)
        status = self._highest(
            out.data_ptr(),
            values.data_ptr(),
            positions.data_ptr(),
            counts.data_ptr(),
            counts.numel(),
            values.shape[2],
            torch.get_num_threads(),
        )
        assert status == 0, signatures.STATUS[status]
        return out


def load(extra_flags: tuple[str, ...] = ()) -> NativeKernels:
    """The native kernels of this machine, built unless cached on disk. BuildFailed: says why and what to install."""
    path = build.library(extra_flags)
    try:
        return NativeKernels(path)
    except OSError as error:
        raise build.BuildFailed(f"{path} does not load: {error}; delete it to build it again") from error
