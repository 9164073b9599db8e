"""From logits to the next token: penalties, temperature, top-k, top-p, min-p, one random number.

A row's outcome is a function of that row alone (its logits, parameters, token ids, choice and token index):
every row is worked out by itself, in NumPy and on one thread, so neither the batch around it nor its place in
the batch changes a bit. Random numbers are counter-based, so a replayed sequence draws the same ones again.

Order of operations, as in vLLM and OpenAI's API: repetition penalty (prompt and generated tokens), presence
and frequency penalty (generated tokens), logit bias, `min_tokens` mask; then greedy choice, or temperature,
top-k, top-p, min-p and inversion of the cumulative distribution. Log-probabilities are those of the raw
logits.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch

from engine.request import SamplingParams, TokenLogprob

Floats = npt.NDArray[np.float32]
TokenIds = Sequence[int] | npt.NDArray[np.integer]

_MASK64 = (1 << 64) - 1


def uniform(seed: int, choice: int, index: int) -> float:
    """The random number in [0, 1) for token `index` of choice `choice`: 53 bits of a hash of the three.

    It is the same in every process. Seeds that differ by a multiple of 2**64 are the same seed (so a negative
    one is its two's complement).
    """
    counter = struct.pack("<QQQ", seed & _MASK64, choice, index)
    word = blake2b(counter, digest_size=8, person=b"kvtide-uniform").digest()
    return (int.from_bytes(word, "little") >> 11) * 2.0**-53


@dataclass(frozen=True, eq=False)
class SampleRow:
    """What the sampler must know about one row of logits.

    `index` is the token index about to be drawn. `prompt` and `generated` are read only where a penalty asks
    for them; arrays spare a conversion per token.
    """

    params: SamplingParams
    choice: int
    index: int
    prompt: TokenIds
    generated: TokenIds


@dataclass(frozen=True)
class Sampled:
    """The token drawn for a row, and its log-probability if the request wants it."""

    token_id: int
    logprob: TokenLogprob | None = None


class SamplingError(ValueError):
    """No token can be drawn for row `row` of the batch. `sample` returns it: other rows are unaffected."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(row, reason)
        self.row = row
        self.reason = reason

    def __str__(self) -> str:
        return f"row {self.row}: {self.reason}"


def sample(
    logits: torch.Tensor, rows: Sequence[SampleRow], end_tokens: frozenset[int]
) -> list[Sampled | SamplingError]:
    """Draw the next token of each row of logits[B, V] (float32 or bfloat16, any device; not changed).

    Returns one outcome per row, in order. A row whose logits hold NaN or +inf, or leave no token to choose,
    has a `SamplingError` in its place. A logit of -inf only excludes its token. `end_tokens` are the model's
    own: with the request's `stop_token_ids` they cannot be drawn before `min_tokens` tokens, unless
    `ignore_eos` makes them ordinary.
    """
    assert logits.ndim == 2 and logits.shape[0] == len(rows), (tuple(logits.shape), len(rows))
    logits = logits.detach()
    greedy = [i for i, row in enumerate(rows) if _is_plain_greedy(row)]
    if len(greedy) == len(rows):
        return _argmax_rows(logits, greedy)
    outcomes: dict[int, Sampled | SamplingError] = {}
    if greedy:
        outcomes.update(zip(greedy, _argmax_rows(logits[greedy], greedy), strict=True))
    others = [i for i in range(len(rows)) if i not in outcomes]
    for i, raw in zip(others, logits[others].float().cpu().numpy(), strict=True):
        outcomes[i] = _sample_row(raw, i, rows[i], end_tokens)
    return [outcomes[i] for i in range(len(rows))]


def token_logprob(raw: Floats, token_id: int, top: int) -> TokenLogprob:
    """Log-probability of `token_id` under the raw logits raw[V], and the `top` likeliest tokens.

    Ties go to the lower id; bits do not depend on other rows. Prompt log-probabilities come from here, too.
    Tokens with a logit of -inf are never listed as alternatives, so `top` may be cut short.
    """
    logprobs = torch.log_softmax(torch.from_numpy(raw), dim=0).numpy()
    best: tuple[tuple[int, float], ...] = ()
    if top > 0:
        best = tuple((int(i), float(logprobs[i])) for i in _largest(raw, top) if np.isfinite(raw[i]))
    return TokenLogprob(token_id, float(logprobs[token_id]), best)


def _is_plain_greedy(row: SampleRow) -> bool:
    """Whether the row's token is just the largest raw logit."""
    params = row.params
    return params.temperature == 0 and params.logprobs is None and not _adjusts(row)


def _adjusts(row: SampleRow) -> bool:
    params = row.params
    return (
        params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
        or bool(params.logit_bias)
        or row.index < params.min_tokens
    )


def _argmax_rows(logits: torch.Tensor, positions: Sequence[int]) -> list[Sampled | SamplingError]:
    """Greedy tokens of logits[B, V], ties to the lowest id; `positions` names the rows in errors."""
    if logits.device.type == "cpu":  # NumPy's argmax is vectorised: 12 times as fast as torch's
        scores = logits.float().numpy()
        ids = scores.argmax(axis=1)
        peaks = scores[np.arange(len(ids)), ids]
    else:
        indices = logits.argmax(dim=1, keepdim=True)
        peaks = logits.gather(1, indices).squeeze(1).float().cpu().numpy()
        ids = indices.squeeze(1).cpu().numpy()
    # Argmax returns a NaN if there is one, so the peak alone tells whether a row is sound.
    return [
        Sampled(int(token)) if np.isfinite(peak) else SamplingError(row, _unsound(float(peak)))
        for row, token, peak in zip(positions, ids, peaks, strict=True)
    ]


def _unsound(peak: float) -> str:
    if peak == -np.inf:
        return "every logit is -inf"
    return f"logits contain {'NaN' if np.isnan(peak) else '+inf'}"


def _sample_row(
    raw: Floats, position: int, row: SampleRow, end_tokens: frozenset[int]
) -> Sampled | SamplingError:
    params = row.params
    peak = float(raw.max())
    if not np.isfinite(peak):
        return SamplingError(position, _unsound(peak))
    outside = [token for token, _ in params.logit_bias if not 0 <= token < raw.size]
    if outside:
        return SamplingError(position, f"logit_bias names token {outside[0]}, the vocabulary has {raw.size}")
    scores = _adjusted(raw, row, end_tokens) if _adjusts(row) else raw
    if not np.isfinite(scores.max()):
        return SamplingError(position, "penalties, logit_bias and min_tokens leave no token to choose")
    if params.temperature == 0:
        token = int(scores.argmax())
    else:
        token = _draw(scores, params, uniform(params.seed, row.choice, row.index))
    if params.logprobs is None:
        return Sampled(token)
    return Sampled(token, token_logprob(raw, token, params.logprobs))


def _adjusted(raw: Floats, row: SampleRow, end_tokens: frozenset[int]) -> Floats:
    """Logits after penalties, bias and the `min_tokens` mask; worked out in float64, rounded once."""
    params = row.params
    scores = raw.astype(np.float64)
    generated = np.asarray(row.generated, dtype=np.int64)
    if params.repetition_penalty != 1:
        seen = np.zeros(raw.size, dtype=bool)
        seen[np.asarray(row.prompt, dtype=np.int64)] = True
        seen[generated] = True
        old = scores[seen]
        scores[seen] = np.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
    if params.presence_penalty != 0 or params.frequency_penalty != 0:
        tokens, counts = np.unique(generated, return_counts=True)
        scores[tokens] -= params.presence_penalty + params.frequency_penalty * counts
    for token, bias in params.logit_bias:
        scores[token] += bias
    if row.index < params.min_tokens:
        barred = set(params.stop_token_ids) if params.ignore_eos else end_tokens.union(params.stop_token_ids)
        scores[[token for token in barred if 0 <= token < raw.size]] = -np.inf
    return scores.astype(np.float32)


def _draw(scores: Floats, params: SamplingParams, point: float) -> int:
    """The token at `point` of the cumulative distribution over scores[V], likeliest first, in float64."""
    order = _largest(scores, params.top_k) if params.top_k > 0 else _descending(scores)
    ranked = scores[order].astype(np.float64)
    with np.errstate(over="ignore", under="ignore"):  # a tiny temperature sends the others to exp(-inf) = 0
        weights = np.exp((ranked - ranked[0]) / params.temperature)
    cumulative = np.cumsum(weights)
    kept = weights.size
    if params.top_p < 1:
        kept = min(kept, 1 + int(np.searchsorted(cumulative, params.top_p * cumulative[-1])))
    if params.min_p > 0:  # the likeliest token weighs 1, so min_p is relative to it as it stands
        kept = min(kept, int(np.count_nonzero(weights >= params.min_p)))
    # `point` is at most 1 - 2**-53, so the product stays below the last sum and no weightless token is found.
    return int(order[np.searchsorted(cumulative[:kept], point * cumulative[kept - 1], side="right")])


def _largest(scores: Floats, count: int) -> npt.NDArray[np.int64]:
    """The first `count` of `_descending(scores)`, without sorting the others."""
    if count >= scores.size:
        return _descending(scores)
    floor = np.partition(scores, scores.size - count)[scores.size - count]
    contenders = np.flatnonzero(scores >= floor)  # ties with the last one, too: the lower positions win
    return contenders[_descending(scores[contenders])][:count]


def _descending(scores: Floats) -> npt.NDArray[np.int64]:
    """Positions of scores[n] (no NaN) from the largest to the smallest, ties by lower position.

    Score and position are packed into one integer, which NumPy sorts 20 times as fast as a stable argsort.
    """
    bits = (np.float32(0) - scores).view(np.int32)  # 0 - x: ascending order, and no -0.0 beside 0.0
    ascending = bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))  # float order as integer order
    keys = (ascending.astype(np.int64) << 32) | np.arange(scores.size, dtype=np.int64)
    keys.sort()
    return keys & 0xFFFFFFFF
