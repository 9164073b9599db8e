"""What the last queries of a prompt pay attention to: the scores behind SnapKV, and the counts behind Scissorhands.

No attention matrix of the prompt is needed, only its last W rows. Source: ALGORITHMS.md sections 2.3, 3.1 and 3.6.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

GroupReduce = Literal["mean", "max", "none"]

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

    Returns float32 [Hk, N]: the average over the window, then the mean or the maximum over the query heads of each kv
    head. `group_reduce` "none" leaves them apart, [Hq, N], for methods that pool before they reduce. All arithmetic is
    float32 whatever the inputs are: bf16 logits would tie most keys. Scratch memory does not grow with W or the number
    of heads. Launches tensor operations only, no host synchronisation. Raises ValueError on shapes that do not fit
    together.
    """
    _check_shapes(q, k, sinks)
    if group_reduce not in ("mean", "max", "none"):
        raise ValueError(f"group_reduce {group_reduce!r} is not one of: mean, max, none")
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
            sink_rows = None if row_sinks is None else row_sinks[unit, part]
            _softmax_rows(logits, softcap, sink_rows, query_positions[part], positions[n - window :], mass)
            out[unit] += _sum_rows(mass)
    out.div_(rows)
    return out.unflatten(0, (kv_heads, group)).amax(1) if group_reduce == "max" else out


class WindowCounts(NamedTuple):
    """Per set of row weights and key: rows that gave the key little attention, and attention received."""

    low: torch.Tensor
    mass: torch.Tensor


def window_low_counts(
    q: torch.Tensor,
    k: torch.Tensor,
    scale: float,
    row_weights: torch.Tensor,
    *,
    threshold: Literal["uniform"] | float = "uniform",
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> WindowCounts:
    """How often, and by how much in all, the last W queries looked at each key.

    q, k, scale, softcap, sinks as in `window_scores`. A row is the maximum over a kv head's query heads of causal
    softmax attention; the row at position i sees t = i + 1 keys. `row_weights` f32 [Hk, R, W] sums rows into R results
    (zeros leave rows out). A key is low in a row that sees it and gives it less than 1/t ("uniform"), or less than the
    row's `threshold` quantile over the keys it sees (0 < threshold < 1, linear between neighbours).

    Returns low and mass, f32 [Hk, R, N]: weighted count of the rows in which the key is low, and weighted sum of what
    rows gave it. Scratch memory does not grow with W or Hk; no host synchronisation. Raises ValueError on shapes that
    do not fit together.
    """
    _check_shapes(q, k, sinks)
    query_heads, window, dim = q.shape
    kv_heads, n, _ = k.shape
    group = query_heads // kv_heads
    if row_weights.dim() != 3 or row_weights.shape[::2] != (kv_heads, window):
        raise ValueError(f"want row_weights [{kv_heads}, R, {window}], got {tuple(row_weights.shape)}")
    if threshold != "uniform" and not (isinstance(threshold, float) and 0 < threshold < 1):
        raise ValueError(f"threshold {threshold!r} is neither 'uniform' nor between 0 and 1")
    scaled = (q.float() * (scale / softcap if softcap else scale)).unflatten(0, (kv_heads, group))
    group_sinks = None if sinks is None else sinks.float().view(kv_heads, group, 1)
    positions = torch.arange(n, device=q.device)
    last = positions[n - window :]
    block = min(window, max(1, _BLOCK_LOGITS // (n * group)))
    low, mass = torch.zeros(2, kv_heads, row_weights.shape[1], n, dtype=torch.float32, device=q.device)
    for head in range(kv_heads):
        keys = k[head].float()
        for start in range(0, window, block):
            part = slice(start, min(start + block, window))
            rows = part.stop - start
            logits = torch.mm(scaled[head, :, part].reshape(-1, dim), keys.t())
            sink_rows = None if group_sinks is None else group_sinks[head].expand(group, rows).reshape(-1)
            attention = _softmax_rows(logits, softcap, sink_rows, last[part].repeat(group), last)
            strongest = attention.view(group, rows, n).amax(0)
            below = strongest < _low_limit(strongest, last[part] + 1, threshold).unsqueeze(1)
            below[:, n - window :] &= last[part].unsqueeze(1) >= last
            # No matrix product: it may round columns at the edge otherwise than the rest, and equal keys must tie.
            for result, weights in enumerate(row_weights[head, :, part].float().unsqueeze(-1)):
                low[head, result] += _sum_rows(weights * below)
                mass[head, result] += _sum_rows(weights * strongest)
    return WindowCounts(low, mass)


def _low_limit(rows: torch.Tensor, seen: torch.Tensor, threshold: Literal["uniform"] | float) -> torch.Tensor:
    """f32 [rows]: what a key must get not to count as low, given attention [rows, N], 0 where unseen, and keys seen."""
    if threshold == "uniform":
        return 1.0 / seen
    place = threshold * (seen - 1).double()
    lower = place.floor()
    # Counted from the top the unseen zeros stay out of the way. The last row sees all keys, and reaches deepest.
    n = rows.shape[1]
    best = rows.topk(n - int(threshold * (n - 1)), dim=-1).values
    from_top = (seen - 1 - lower.long()).unsqueeze(1)
    value, next_value = best.gather(1, from_top), best.gather(1, (from_top - 1).clamp_(min=0))
    return torch.lerp(value[:, 0], next_value[:, 0], (place - lower).float())


def _softmax_rows(
    logits: torch.Tensor,
    softcap: float,
    sinks: torch.Tensor | None,
    query_positions: torch.Tensor,
    last_positions: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal softmax of logits [rows, N] (overwritten), which are divided by `softcap` already; sinks [rows]."""
    if softcap:
        logits.tanh_().mul_(softcap)
    _hide_future(logits, query_positions, last_positions)
    mass = torch.softmax(logits, dim=-1, out=out)
    if sinks is not None:
        mass *= torch.sigmoid(logits.logsumexp(-1) - sinks).unsqueeze(-1)
    return mass


def _sum_rows(rows: torch.Tensor) -> torch.Tensor:
    """Column sums of `rows` [R, N] (overwritten), [N], by halving.

    Every column is added in the same order: `sum(0)` adds its last few columns, those beyond a multiple of the vector
    width, in another, and equal keys would differ (seen with torch 2.13 on AVX2).
    """
    while len(rows) > 1:
        half = (len(rows) + 1) // 2
        rows[: len(rows) - half] += rows[half:]
        rows = rows[:half]
    return rows[0]


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
