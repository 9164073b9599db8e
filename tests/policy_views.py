"""Random prompts, and layers of them as policies see them: what the tests of policies share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from simulation import Prompt, protected_tokens
from torch import Tensor

from kernels.rotary import Rotation
from policies import POLICIES, LayerView, ObservedLayer, Policy, Recipe, make_recipe


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Modules that import this run on one thread: these matrices are too small to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


DIM = 8
INV_FREQ = torch.tensor([1.0, 0.3, 0.05])
"""Of six dims; the last two are not rotated."""


def random_prompt(
    seed: int, n: int, group: int = 3, kv_heads: int = 2, *, softcap: float = 0.0, sinks: bool = False
) -> Prompt:
    """float64 copies of random float32 numbers, with attention about as peaked as a trained model's."""
    rng = np.random.default_rng(seed)

    def numbers(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32).astype(np.float64)

    heads = kv_heads * group
    return Prompt(
        q=2 * numbers(heads, n, DIM),
        k=numbers(kv_heads, n, DIM),
        v=numbers(kv_heads, n, DIM),
        scale=DIM**-0.5,
        softcap=softcap,
        sinks=numbers(heads) if sinks else None,
        inv_freq=INV_FREQ.double().numpy(),
    )


def output_weight(prompt: Prompt, hidden: int = 20) -> np.ndarray:
    rng = np.random.default_rng(prompt.n)
    return rng.standard_normal((hidden, len(prompt.q) * DIM), dtype=np.float32).astype(np.float64)


def single(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))


def log_sum_exp(queries: Tensor, keys: Tensor, start: int, layer: ObservedLayer) -> Tensor:
    """float32 [Hq, T]: what attention hands to an observer beside a piece of queries."""
    group = queries.shape[0] // keys.shape[0]
    logits = queries.double() @ keys.double().repeat_interleave(group, 0).transpose(1, 2) * layer.scale
    if layer.softcap:
        logits = layer.softcap * torch.tanh(logits / layer.softcap)
    rows = torch.arange(start, start + queries.shape[1])
    logits = logits.masked_fill(rows.unsqueeze(1) < torch.arange(keys.shape[1]), -torch.inf)
    total = logits.logsumexp(-1)
    if layer.sinks is not None:
        total = torch.logaddexp(total, layer.sinks.double().unsqueeze(-1))
    return total.float()


def observe(
    policy: Policy, layer: ObservedLayer, queries: Tensor, keys: Tensor, pieces: Sequence[int] = ()
) -> object | None:
    """What the policy's observer makes of all queries [Hq, N, D], fed in `pieces` (by default a few uneven ones)."""
    observer = policy.observer(layer)
    if observer is None:
        return None
    n = keys.shape[1]
    start = 0
    for piece in pieces or (n // 3, n // 2, n):
        stop = min(n, start + piece)
        if stop > start:
            seen = keys[:, :stop]
            part = queries[:, start:stop]
            observer.add(part, seen, log_sum_exp(part, seen, start, layer), start)
        start = stop
    return observer.result()


def layer_view(
    policy: Policy,
    budget: int,
    queries: Tensor,
    keys: Tensor,
    values: Tensor | None = None,
    *,
    index: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    rotation: Rotation | None = None,
    weight: Tensor | None = None,
    pieces: Sequence[int] = (),
) -> LayerView:
    """A layer of a prompt as long as `keys` [Hk, N, D]; `queries` [Hq, ≤ N, D] end with it and hold what is wanted."""
    kv_heads, n, dim = keys.shape
    scale = dim**-0.5 if scale is None else scale
    wanted = policy.queries_wanted(n)
    shape = ObservedLayer(kv_heads, queries.shape[0], dim, n, scale, softcap, sinks, rotation)
    return LayerView(
        index=index,
        keys=keys,
        values=keys if values is None else values,
        queries=queries[:, queries.shape[1] - wanted :] if wanted else None,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        budget=budget,
        rotation=rotation,
        output_weight=weight,
        observed=observe(policy, shape, queries, keys, pieces),
    )


def view_of(
    prompt: Prompt, policy: Policy, budget: int, *, index: int = 0, pieces: Sequence[int] = ()
) -> LayerView:
    """A random prompt as `policy` sees it."""
    return layer_view(
        policy,
        budget,
        single(prompt.q),
        single(prompt.k),
        single(prompt.v),
        index=index,
        scale=prompt.scale,
        softcap=prompt.softcap,
        sinks=None if prompt.sinks is None else single(prompt.sinks),
        rotation=Rotation(INV_FREQ, DIM),
        weight=single(output_weight(prompt)),
        pieces=pieces,
    )


SCORED = [name for name in POLICIES if name != "full"]

OWN_OPTIONS: dict[str, dict[str, st.SearchStrategy[object]]] = {
    "snapkv": {
        "window": st.integers(1, 12),
        "kernel": st.sampled_from([1, 3, 7, 13]),
        "pool": st.sampled_from(["avg", "max"]),
        "group": st.sampled_from(["mean", "max"]),
        "order": st.sampled_from(["reduce_pool", "pool_reduce"]),
    },
    "h2o": {
        "normalize": st.sampled_from(["visible_count", "none"]),
        "recent": st.sampled_from([0, 3, 0.25, 0.5]),
    },
    "scissorhands": {"window": st.integers(1, 30), "threshold": st.sampled_from(["uniform", 0.5, 0.9])},
    "tova": {"window": st.integers(1, 2)},
    "expected_attention": {
        "future": st.integers(1, 40),
        "epsilon": st.sampled_from([0.0, 0.01]),
        "covariance": st.booleans(),
        "value_norm": st.booleans(),
    },
    "random": {"seed": st.integers(0, 2**63 - 1)},
}
RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5)), max_size=2).map(
    lambda drawn: [(start, start + length) for start, length in drawn]
)


@st.composite
def recipes(draw: st.DrawFn, name: str, *, plain: bool = False) -> Recipe:
    """A recipe of the policy, a few tokens larger than what it protects; `plain`: scores alone choose, head by head."""
    fields: dict[str, object] = {"recent": draw(st.integers(0, 6)), "tail": draw(st.integers(0, 3))}
    if name != "sliding_window":
        fields["sinks"] = draw(st.integers(0, 4))
    fields |= {option: draw(values) for option, values in OWN_OPTIONS.get(name, {}).items()}
    if fields.get("value_norm") is False:
        del fields["epsilon"]  # has nothing to be added to
    if not plain:
        fields["spans"] = draw(RANGES)
        fields["structure"] = draw(RANGES)
        fields["heads"] = draw(st.sampled_from(["uniform", "ada"]))
        fields["critical"] = draw(st.booleans())
        if fields["heads"] == "ada":
            fields["alpha"] = draw(st.sampled_from([0.0, 0.2, 0.7, 1.0]))
    recent = fields["recent"] if isinstance(fields["recent"], int) else 0
    needed = sum(int(fields.get(part, 0)) for part in ("sinks", "window", "tail")) + recent  # type: ignore[call-overload]
    spans = sum(stop - start for start, stop in fields.get("spans", []))  # type: ignore[attr-defined]
    budget = needed + spans + draw(st.integers(1, 16))
    return make_recipe(policy=name, budget=budget, **fields)


def protected_of(recipe: Recipe, n: int, budget: int) -> set[int]:
    """What the recipe's words promise to keep of `n` tokens, worked out again."""
    kept_window = recipe.window if recipe.policy == "snapkv" else 0
    at_end = recipe.tail + kept_window
    if isinstance(recipe.recent, float):
        others = protected_tokens(n, sinks=recipe.sinks, at_end=0, spans=recipe.spans)
        at_end = max(at_end, min(int(recipe.recent * budget), budget - len(others)))
    else:
        at_end = max(at_end, recipe.recent or 0)
    return protected_tokens(n, sinks=recipe.sinks, at_end=at_end, spans=recipe.spans)
