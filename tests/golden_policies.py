"""Golden vectors of prompt selection (tests/golden/README.md), and how kept sets are compared with them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from policy_views import layer_view
from torch import Tensor

from policies import LayerView, Policy, get_policy, make_recipe

GOLDEN = Path(__file__).parent / "golden"
RTOL = 1e-5
ATOL = 1e-9

Case = dict[str, Any]
Arrays = dict[str, np.ndarray]


@cache
def load(file: str) -> tuple[Arrays, dict[str, Case]]:
    with np.load(GOLDEN / f"{file}.npz") as archive:
        arrays = {name: archive[name] for name in archive.files}
    cases = json.loads(str(arrays["meta"]))["cases"]
    return arrays, {case["name"]: case for case in cases}


def cases_of(file: str, *methods: str) -> list[str]:
    """Names of the file's cases by these methods, or of all that have a method's result."""
    cases = load(file)[1].values()
    return [case["name"] for case in cases if case["method"] in methods or (not methods and case["params"])]


def policy(name: str, budget: int, **fields: object) -> Policy:
    """A policy set up as other people's code is: no sinks unless asked for."""
    return get_policy(make_recipe(policy=name, budget=budget, **{"sinks": 0, **fields}))


def snapkv(params: Case, **fields: object) -> Policy:
    pool = params["pool"].removesuffix("pool")
    chosen = {"window": params["window"], "kernel": params["kernel"], "pool": pool}
    return policy("snapkv", params["budget"], **chosen, **fields)


def view(
    policy: Policy,
    budget: int,
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray | None = None,
    **more: Any,
) -> LayerView:
    tensors = [torch.from_numpy(array) for array in (queries, keys, keys if values is None else values)]
    return layer_view(policy, budget, *tensors, **more)


def golden_sets(arrays: Arrays, name: str, layer: int, heads: int) -> list[set[int]]:
    flat, off = arrays[f"{name}/kept_flat"], arrays[f"{name}/kept_off"]
    rows = range(layer * heads, (layer + 1) * heads)
    return [set(flat[off[row] : off[row + 1]].tolist()) for row in rows]


def sets_of_bits(arrays: Arrays, name: str, layer: int, n: int) -> list[set[int]]:
    rows = np.unpackbits(arrays[f"{name}/kept_bits"][layer], axis=-1, count=n)
    return [set(np.flatnonzero(row).tolist()) for row in rows]


def assert_scores(scores: Tensor, golden: np.ndarray, rtol: float = RTOL, atol: float = ATOL) -> None:
    np.testing.assert_allclose(scores.double().numpy(), golden, rtol=rtol, atol=atol)


def kept_sets(policy: Policy, layer: LayerView) -> list[set[int]]:
    selection = policy.select(layer)
    rows = [selection.head(head).tolist() for head in range(layer.kv_heads)]
    assert all(len(set(row)) == len(row) for row in rows)
    return [set(row) for row in rows]


def assert_same_sets(
    kept: Sequence[set[int]],
    golden: Sequence[set[int]],
    scores: Tensor,
    protected: Iterable[int],
    *,
    together: bool = False,
) -> None:
    """Equal sets, but for positions within the README's tolerance of the boundary, by our `scores` [H, N].

    `together`: a layer's heads are one set of (head, position), as they are where heads share a budget.
    """
    assert len(kept) == len(golden)
    values = scores.double().numpy()
    safe = set(protected)
    mine = [{(head, j) for j in row} for head, row in enumerate(kept)]
    theirs = [{(head, j) for j in row} for head, row in enumerate(golden)]
    if together:
        mine, theirs = [set().union(*mine)], [set().union(*theirs)]
    for own, other in zip(mine, theirs, strict=True):
        assert len(own) == len(other)
        differing = own ^ other
        if differing:
            boundary = min(values[place] for place in own if place[1] not in safe)
            tolerance = min(1e-6 * max(1.0, abs(boundary)), 1e-4 * abs(boundary))
            assert all(abs(values[place] - boundary) <= tolerance for place in differing), differing
