"""Attention mass of the last queries of a prompt on every key: the scores behind SnapKV.

No attention matrix of the prompt is needed, only its last W rows. Source: ALGORITHMS.md sections 2.3 and 3.1.
"""

from __future__ import annotations

from typing import Literal

import torch

GroupReduce = Literal["mean", "none"]

_BLOCK_LOGITS = 1 << 19
"""Logits held at once: 2 MiB of fp32, so that product, softmax and sum of a block stay in cache."""


def window_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    scale: float,
    *,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    group_reduce: GroupReduce = "mean",
) -> torch.Tensor:
    """Mean causal softmax attention of the last W queries, per key.

    q: [Hq, W, D], post-RoPE queries of positions N-W ... N-1; k: [Hk, N, D], post-RoPE keys; any float dtype.
    Query head h reads kv head h // (Hq / Hk). Logits are q·k * scale, then softcap * tanh(logits / softcap)
    where `softcap` > 0. A query at position i sees keys j <= i: sliding-window layers keep their window and are never
    scored. `sinks` [Hq] are logits that join the softmax denominator only (gpt-oss).

    Returns float32 [Hk, N], averaged over the window and the query heads of each kv head, or [Hq, N],
    averaged over the window, with `group_reduce` "none" (for methods that take a group's maximum, as Scissorhands
    does, or pool before they reduce). All arithmetic is float32 whatever the inputs are:
    bf16 logits would tie most keys. Scratch memory does not grow with W or the number of heads. Launches
    tensor operations only, no host synchronisation. Raises ValueError on shapes that do not fit together.
    """
    _check_shapes(q, k, sinks)
    if group_reduce not in ("mean", "none"):
        raise ValueError(f"group_reduce {group_reduce!r} is not one of: mean, none")
    query_heads, window, dim = q.shape
    kv_heads, n, _ = k.shape
    group = query_heads // kv_heads
    heads_together = group if group_reduce == "mean" else 1
    rows = heads_together * window
    # Scaling the few query rows is cheaper than scaling the logits; the softcap divisor joins in for free.
    scaled = (q.float() * (scale / softcap if softcap else scale)).reshape(-1, rows, dim)
    row_sinks = None if sinks is None else sinks.float().repeat_interleave(window).reshape(-1, rows)
    positions = torch.arange(n, device=q.device)
    query_positions = positions[n - window :].repeat(heads_together)
    block = min(rows, max(1, _BLOCK_LOGITS // n))

    out = torch.zeros(scaled.shape[0], n, dtype=torch.float32, device=q.device)
    # One set of scratch for all heads: fresh blocks would cost more in page faults than the softmax does.
    keys = torch.empty(n, dim, dtype=torch.float32, device=q.device)
    logits_of_block, mass_of_block = torch.empty(2, block, n, dtype=torch.float32, device=q.device)
    for unit in range(scaled.shape[0]):
        if unit * heads_together % group == 0:
            keys.copy_(k[unit * heads_together // group])
        for start in range(0, rows, block):
            part = slice(start, min(start + block, rows))
            logits = logits_of_block[: part.stop - start]
            mass = mass_of_block[: part.stop - start]
            torch.mm(scaled[unit, part], keys.t(), out=logits)
            if softcap:
                logits.tanh_().mul_(softcap)
            _hide_future(logits, query_positions[part], positions[n - window :])
            torch.softmax(logits, dim=-1, out=mass)
            if row_sinks is not None:
                mass *= torch.sigmoid(logits.logsumexp(-1) - row_sinks[unit, part]).unsqueeze(-1)
            out[unit] += mass.sum(0)
    return out.div_(rows)


def _hide_future(logits: torch.Tensor, query_positions: torch.Tensor, last_positions: torch.Tensor) -> None:
    """Fill -inf where a row of `logits` [rows, N] must not see a key; only the last W keys can lie in its future."""
    future = query_positions.unsqueeze(1) < last_positions
    logits[:, logits.shape[1] - len(last_positions) :].masked_fill_(future, float("-inf"))


def _check_shapes(q: torch.Tensor, k: torch.Tensor, sinks: torch.Tensor | None) -> None:
    if q.dim() != 3 or k.dim() != 3 or q.shape[2] != k.shape[2]:
        raise ValueError(f"want q [Hq, W, D] and k [Hk, N, D], got {tuple(q.shape)} and {tuple(k.shape)}")
    if k.shape[0] == 0 or q.shape[0] == 0 or q.shape[0] % k.shape[0]:
        raise ValueError(f"{q.shape[0]} query heads do not divide among {k.shape[0]} kv heads")
    if not 1 <= q.shape[1] <= k.shape[1]:
        raise ValueError(f"a window of {q.shape[1]} queries does not fit {k.shape[1]} keys")
    if sinks is not None and sinks.shape != (q.shape[0],):
        raise ValueError(f"want sinks [{q.shape[0]}], got {tuple(sinks.shape)}")
