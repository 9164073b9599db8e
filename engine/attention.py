"""The one attention function that every model class calls, and the port through which it reaches our KV.

`transformers` models compute queries, keys and values (RoPE and norms applied) for a flattened batch [1, H, T, D] and
call the function registered under the name "kvtide". It hands them to the `AttentionPort` of the running step, which
stores keys and values where that step keeps them (prefill workspace or decode pages) and returns the attention output.
Softcap, sliding window and attention sinks arrive in the call and are honoured there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from engine.support import unsupported

ATTENTION_NAME = "kvtide"

# Keywords of an attention call that change nothing here: what is only for training, our own inputs handed through, and
# requests for outputs that we never make. Any other one that is set means attention that we do not compute.
_WITHOUT_EFFECT = frozenset(
    {
        "dropout",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "use_cache",
    }
)


@dataclass(frozen=True)
class AttentionCall:
    """What a layer's attention needs beside q, k and v.

    `layer` is the index of the KV cache in `ModelSpec.layers` that the layer attends to. Layers may share one: the
    first of them (`reader` 0) brings its keys and values, `stored` True; the others (`reader` 1, 2, ...) come later
    in the same step with `stored` False, and what they attend to is in place already. Only `Model.forward` knows the
    two numberings: calls that come straight from the model carry the layer's own number.
    `window` counts visible keys, the query's own included (None: all). `softcap` 0 is off. `sinks` fp32 [Hq] are
    logits that join the softmax denominator only (gpt-oss).
    """

    layer: int
    scale: float
    window: int | None
    softcap: float
    sinks: Tensor | None
    stored: bool = True
    reader: int = 0


class AttentionPort(Protocol):
    """Where a running step stores keys and values and finds those of earlier tokens."""

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store key, value [Hk, T, D] of the step's T tokens and return attention of query [Hq, T, D] as [T, Hq, D].

        With `call.stored` False the cache's writer has stored the very same key and value earlier in this step: they
        are not stored again, nothing is counted twice, and the query attends to what is there.
        """
        ...


def kvtide_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    kvtide: AttentionPort | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """`AttentionInterface` entry: query [1, Hq, T, D], key and value [1, Hk, T, D] → ([1, T, Hq, D], no weights).

    `scaling` None is 1/sqrt(D). Raises `UnsupportedModel` for calls that ask for something else than causal attention
    through our port; the probe at load meets every layer's call, so serving never does.
    """
    unknown = sorted(name for name in others.keys() - _WITHOUT_EFFECT if others[name] is not None)
    for found, what in (
        (kvtide is None, "attention that passes no extra arguments on"),
        (attention_mask is not None, "an attention mask of its own"),
        (
            not getattr(module, "is_causal", True) or others.get("is_causal") is False,
            "bidirectional attention",
        ),
        (unknown, f"attention with {', '.join(unknown)}"),
    ):
        if found:
            raise unsupported(module.config, what)
    assert kvtide is not None
    # A parameter of the model: selection reads it later, outside of inference mode, and kernels want fp32.
    sinks = None if s_aux is None else s_aux.detach().float()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(int(module.layer_idx), scale, sliding_window, softcap or 0.0, sinks)  # type: ignore[arg-type]
    return kvtide.attend(call, query[0], key[0], value[0]).unsqueeze(0), None


def register_attention() -> None:
    """Make "kvtide" known to transformers; calling it again is harmless.

    No mask function is registered under that name, so transformers builds no mask at all for a flattened batch.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, kvtide_attention)


_ROWS = 16
"""One or two last rows of torch's blocks of queries are multiplied by another routine, with other bits."""


class Attended(NamedTuple):
    """Attention of T queries: `out` [Hq, T, D] in their dtype, and the log of each row's softmax denominator.

    `lse` is fp32 [Hq, T], sinks included: exp(logit - lse) is the weight that a key was given.
    """

    out: Tensor
    lse: Tensor


def causal_attention(
    call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, start: int, origin: int | None = None
) -> Attended:
    """Attention of the queries at positions start … start+T-1 over keys at positions 0 … start+T-1.

    query [Hq, T, D]; key, value [Hk, start+T, D]. Keys before `origin` are visible to every query, so they take one
    unmasked pass with the query group folded into rows; the diagonal takes torch's causal kernel; the two are merged by
    log-sum-exp. That is as fast as one causal pass over the whole prompt (measured at 4K: 227-240 ms against 233 ms per
    layer), for any chunk size.

    `origin` (default: `start`) is where the piece that these queries are the end of begins: without window and softcap
    they get the same bits as they do as a part of that piece.
    """
    stop = key.shape[1]
    if call.softcap:
        return _explicit_attention(call, query, key, value, start)
    if call.window is not None and stop > call.window:
        return _windowed_attention(call, query, key, value, start)
    heads, length, dim = query.shape
    kv_heads = key.shape[0]
    group = heads // kv_heads
    origin = start if origin is None else origin
    missing = start - origin
    new_k = key[:, origin:].repeat_interleave(group, 0) if group > 1 else key[:, origin:]
    new_v = value[:, origin:].repeat_interleave(group, 0) if group > 1 else value[:, origin:]
    # Rows do not look at each other, but how many there are decides in which order a row's products are added.
    whole = torch.nn.functional.pad(query, (0, 0, missing, 0)) if missing else query
    out, lse = _flash(whole, new_k, new_v, call.scale, causal=True)
    out, lse = out[:, missing:], lse[:, missing:]
    if origin:
        rows = group * length
        folded = query.reshape(kv_heads, rows, dim)
        if rows % _ROWS:  # padding copies
            folded = torch.nn.functional.pad(folded, (0, 0, 0, -rows % _ROWS))
        past, past_lse = _flash(folded, key[:, :origin], value[:, :origin], call.scale, causal=False)
        past, past_lse = (
            past[:, :rows].reshape(heads, length, dim).float(),
            past_lse[:, :rows].reshape(heads, length),
        )
        share = torch.sigmoid(past_lse - lse).unsqueeze(-1)
        out, lse = torch.lerp(out.float(), past, share), torch.logaddexp(lse, past_lse)
    return _with_sinks(call, out, lse, query.dtype)


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """torch's CPU flash attention over [H, T, D], with its log-sum-exp [H, T] (fp32)."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), 0.0, causal, scale=scale
    )
    return out[0], lse[0].float()


def _with_sinks(call: AttentionCall, out: Tensor, lse: Tensor, dtype: torch.dtype) -> Attended:
    """Let the sink logits take their share of the softmax: out · exp(lse) / (exp(lse) + exp(sink))."""
    if call.sinks is None:
        return Attended(out.to(dtype), lse)
    sinks = call.sinks.float().unsqueeze(-1)
    return Attended(
        (out.float() * torch.sigmoid(lse - sinks).unsqueeze(-1)).to(dtype), torch.logaddexp(lse, sinks)
    )


def _windowed_attention(
    call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, start: int
) -> Attended:
    """Sliding-window layers: in query pieces, so that each reads its own window of keys and no more."""
    assert call.window is not None
    heads, length, dim = query.shape
    kv_heads = key.shape[0]
    group = heads // kv_heads
    pieces, sums = [], []
    for begin in range(0, length, _QUERY_PIECE):
        end = min(length, begin + _QUERY_PIECE)
        low = max(0, start + begin - call.window + 1)
        rows = torch.arange(start + begin, start + end, device=query.device).unsqueeze(1)
        columns = torch.arange(low, start + end, device=query.device).unsqueeze(0)
        visible = (columns <= rows) & (columns > rows - call.window)
        folded = query[:, begin:end].reshape(kv_heads, group * (end - begin), dim)
        bias = torch.zeros(visible.shape, dtype=query.dtype, device=query.device)
        bias.masked_fill_(~visible, float("-inf"))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            folded.unsqueeze(0),
            key[:, low : start + end].unsqueeze(0),
            value[:, low : start + end].unsqueeze(0),
            0.0,
            False,
            attn_mask=bias.repeat(group, 1)[None, None],
            scale=call.scale,
        )
        shape = (heads, end - begin)
        done = _with_sinks(call, out[0].reshape(*shape, dim), lse[0].float().reshape(shape), query.dtype)
        pieces.append(done.out)
        sums.append(done.lse)
    return Attended(torch.cat(pieces, dim=1), torch.cat(sums, dim=1))


def _explicit_attention(
    call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, start: int
) -> Attended:
    """Logits written out (softcap sits between the product and the softmax), in pieces that bound memory."""
    heads, length, _ = query.shape
    group = heads // key.shape[0]
    out = torch.empty_like(query)
    sums = torch.empty(heads, length, dtype=torch.float32, device=query.device)
    for begin in range(0, length, _QUERY_PIECE):
        end = min(length, begin + _QUERY_PIECE)
        low = 0 if call.window is None else max(0, start + begin - call.window + 1)
        keys = key[:, low : start + end].repeat_interleave(group, 0)
        values = value[:, low : start + end].repeat_interleave(group, 0)
        logits = torch.matmul(query[:, begin:end], keys.transpose(1, 2)).float() * call.scale
        logits = torch.tanh(logits / call.softcap) * call.softcap
        rows = torch.arange(start + begin, start + end, device=query.device).unsqueeze(1)
        columns = torch.arange(low, start + end, device=query.device).unsqueeze(0)
        hidden = columns > rows
        if call.window is not None:
            hidden = hidden | (columns <= rows - call.window)
        logits.masked_fill_(hidden, float("-inf"))
        lse = torch.logsumexp(logits, -1)
        weights = torch.exp(logits - lse.unsqueeze(-1)).to(query.dtype)
        done = _with_sinks(call, torch.matmul(weights, values), lse, query.dtype)
        out[:, begin:end], sums[:, begin:end] = done
    return Attended(out, sums)


_QUERY_PIECE = 256
