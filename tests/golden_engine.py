"""The engine on real weights, set against tests/golden/e2e_smollm2.npz: what the test_golden_* files share.

Run as a program it is the other process of the snapshot tests: it loads the model, takes snapshots from files and
prints, one JSON list a line, the greedy tokens that follow each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.decode import decode_step
from engine.local import LocalEngine
from engine.model import Model, load_model
from engine.pool import PagePool
from engine.prefill import PrefillDone, PrefillEngine, PrefillResult
from engine.prefix import PrefixCache
from engine.request import GenerationRequest, SamplingParams
from engine.restore import restore
from engine.snapshot import parse_snapshot
from engine.text import TokenPieces
from policies.recipe import Recipe, make_recipe

GOLDEN = Path(__file__).parent / "golden" / "e2e_smollm2.npz"
STEPS = 48
TIE_MARGIN = 1e-3
CONTEXT = 2100

FULL = make_recipe(policy="full")


def golden_snapkv(budget: int) -> Recipe:
    """The recipe of the golden SnapKV runs."""
    return make_recipe(policy="snapkv", budget=budget, window=32, kernel=7, pool="avg", sinks=0)


SNAPKV_512 = golden_snapkv(512)
SNAPKV_256 = golden_snapkv(256)
RUN_OF = {FULL: "full", SNAPKV_512: "snapkv512", SNAPKV_256: "snapkv256"}


@pytest.fixture(autouse=True, scope="module")
def two_threads() -> Iterator[None]:
    """Modules that import this share their products between two threads: these matrices are large enough."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@cache
def arrays() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as archive:
        return {name: archive[name] for name in archive.files}


def prompt(index: int) -> tuple[int, ...]:
    off = arrays()["prompt_off"]
    return tuple(arrays()["prompt_flat"][off[index] : off[index + 1]].tolist())


def decided(run: str, index: int, steps: int = STEPS) -> list[int]:
    """The golden continuation up to the first step that a rounding error could turn."""
    open_steps = np.flatnonzero(arrays()[f"{run}/margin"][index] < TIE_MARGIN)
    stop = min(steps, int(open_steps[0]) if len(open_steps) else STEPS)
    assert stop > 8, "too few steps to say anything"
    return arrays()[f"{run}/tokens"][index][:stop].tolist()


def assert_continues(tokens: Sequence[int], run: str, index: int, steps: int = STEPS) -> None:
    """`tokens` are `steps` tokens, the golden ones as far as those are decided."""
    expected = decided(run, index, steps)
    assert len(tokens) == steps
    assert list(tokens[: len(expected)]) == expected, f"{run} of prompt {index}"


def golden_kept(run: str, index: int) -> np.ndarray:
    """Kept positions of a golden SnapKV run, bool [L, Hk, N]."""
    packed = arrays()[f"{run}/{index}/kept_bits"]
    return np.unpackbits(packed, axis=-1, count=len(prompt(index))).astype(bool)


@cache
def model(path: Path, dtype: str) -> Model:
    """Loaded once for all test_golden_* files."""
    return load_model(path, dtype)


@cache
def pieces(path: Path) -> TokenPieces:
    from transformers import AutoTokenizer

    return TokenPieces(AutoTokenizer.from_pretrained(path))


def greedy(
    name: str, tokens: Sequence[int], recipe: Recipe, steps: int = STEPS, logprobs: int | None = None
) -> GenerationRequest:
    """End-of-text is an ordinary token, as in the golden runs."""
    sampling = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True, logprobs=logprobs)
    return GenerationRequest(name, tuple(tokens), sampling, recipe)


class ObservedPrefill(PrefillEngine):
    """Shows every finished prompt to `observe` while its workspace is still there."""

    def __init__(self, model: Model, observe: Callable[[PrefillDone], None]) -> None:
        super().__init__(model)
        self._observe = observe

    def step(self) -> list[PrefillResult]:
        results = super().step()
        for result in results:
            if isinstance(result, PrefillDone):
                self._observe(result)
        return results


def local_engine(
    path: Path,
    dtype: str = "float32",
    *,
    tokens: int,
    chunk_tokens: int = 1024,
    prefix: PrefixCache | None = None,
) -> LocalEngine:
    """An engine whose pool holds about `tokens` tokens over all its sequences."""
    loaded = model(path, dtype)
    pool = PagePool(loaded.spec, pages_for(loaded, tokens), 32, CONTEXT)
    return LocalEngine(loaded, pieces(path), pool, chunk_tokens=chunk_tokens, prefix=prefix)


def pages_for(loaded: Model, tokens: int) -> int:
    """Pages of `tokens` tokens in every head of the demo model, 16 to a page."""
    heads = sum(layer.kv_heads for layer in loaded.spec.layers)
    return -(-tokens // 16) * heads


def continue_greedily(
    loaded: Model, pool: PagePool, rows: Sequence[int], texts: list[list[int]], steps: int
) -> None:
    """Append `steps` greedy tokens to each text, whose last token is the next input of its row."""
    for _ in range(steps):
        last = [text[-1] for text in texts]
        logits = decode_step(loaded, pool, rows, last, [len(text) - 1 for text in texts])
        for text, token in zip(texts, logits.argmax(dim=-1).tolist(), strict=True):
            text.append(token)


def main(model_path: str, steps: str, *snapshots: str) -> None:
    torch.set_num_threads(1)
    loaded = load_model(Path(model_path), "float32")
    pool = PagePool(loaded.spec, pages_for(loaded, 400 * len(snapshots)), len(snapshots), CONTEXT)
    rows, texts = [], []
    for path in snapshots:
        buffer = torch.from_numpy(np.fromfile(path, np.uint8))
        layout = parse_snapshot(loaded.spec, buffer)
        rows.append(restore(pool, layout, buffer))
        texts.append(layout.meta.tokens.tolist())
    continue_greedily(loaded, pool, rows, texts, int(steps))
    for text in texts:
        print(json.dumps(text[-int(steps) :]))


if __name__ == "__main__":
    main(*sys.argv[1:])
