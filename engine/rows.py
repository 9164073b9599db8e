"""A pool row's keys and values, out of its pages and back into them."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.pool import PagePool
from kernels import ops


def read_layer(pool: PagePool, row: int, layer: int) -> tuple[Tensor, Tensor]:
    """K and V [Hk, n, D] of one layer from its first visible slot on; n is the longest head, others end in rubbish."""
    spec = pool.spec.layers[layer]
    start, stops = int(pool.first_slots(row)[layer]), pool.counts(row)[layer, : spec.kv_heads].tolist()
    pages, memory, layout = pool.pages(row, layer), pool.memory, pool.layouts[layer]
    shape = (spec.kv_heads, max(stops) - start, spec.head_dim)
    k, v = torch.empty(shape, dtype=pool.spec.dtype), torch.empty(shape, dtype=pool.spec.dtype)
    if min(stops) == max(stops):
        ops.gather_heads(memory, layout, pages, start, stops[0], k, v)
        return k, v
    for head, stop in enumerate(stops):
        ops.gather(memory, layout, pages[head], start, stop, k[head, : stop - start], v[head, : stop - start])
    return k, v


def write_layer(pool: PagePool, row: int, layer: int, k: Tensor, v: Tensor) -> None:
    """Fill all visible slots of one layer from K and V [Hk, n, D] as `read_layer` gives them; no page is shared."""
    heads = pool.spec.layers[layer].kv_heads
    start, stops = int(pool.first_slots(row)[layer]), pool.counts(row)[layer, :heads].tolist()
    pages, memory, layout = pool.pages(row, layer), pool.memory, pool.layouts[layer]
    if min(stops) == max(stops):
        n = stops[0] - start
        ops.scatter_heads(memory, layout, pages, k[:, :n].contiguous(), v[:, :n].contiguous(), start)
        return
    for head, stop in enumerate(stops):
        ops.scatter(memory, layout, pages[head], k[head, : stop - start], v[head, : stop - start], start)
