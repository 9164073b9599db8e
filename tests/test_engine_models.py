"""Every served family computes what transformers computes: chunked prefill, paged decode, mixed batches, windows."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pytest
import tiny_models
import torch
from tiny_models import FAMILIES, Pair, one_thread, tiny, tokens_of  # noqa: F401
from torch import Tensor

from engine.decode import decode_step
from engine.model import Model, step_rows
from engine.workspace import PrefillPort, Workspace
from policies import Recipe

# Largest difference of logits, whose spread is about 1, between two orders of fp32 sums.
TOLERANCE = 1e-4
WINDOWED = ["mistral", "gemma2", "gemma3", "gpt_oss", "gemma3n", "gemma4"]


def prefill_logits(model: Model, prompts: Sequence[Sequence[int]], chunk: int) -> list[Tensor]:
    """Logits of every prompt token, computed in flattened steps of `chunk` tokens of each prompt."""
    spaces = [Workspace(model.spec, len(prompt), 0) for prompt in prompts]
    parts: list[list[Tensor]] = [[] for _ in prompts]
    while any(space.filled < space.tokens for space in spaces):
        runs = [
            (i, spaces[i].filled, min(chunk, spaces[i].tokens - spaces[i].filled)) for i in range(len(spaces))
        ]
        runs = [run for run in runs if run[2]]
        tokens = [token for i, start, count in runs for token in prompts[i][start : start + count]]
        positions = [place for _, start, count in runs for place in range(start, start + count)]
        port = PrefillPort([(spaces[i], start, count) for i, start, count in runs])
        logits = model.forward(tokens, positions, port, range(len(tokens)))
        for (i, start, count), part in zip(runs, logits.split([run[2] for run in runs]), strict=True):
            spaces[i].filled = start + count
            parts[i].append(part)
    return [torch.cat(part) for part in parts]


def assert_logits(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)


def attention_matters(pair: Pair, tokens: Sequence[int]) -> bool:
    """Whether early tokens change late logits far beyond the tolerance (or these tests would prove nothing)."""
    changed = [*tokens_of(len(tokens) - 4, seed=9), *tokens[-4:]]
    return bool((pair.full_logits(tokens)[-1] - pair.full_logits(changed)[-1]).abs().max() > 100 * TOLERANCE)


@pytest.mark.parametrize("chunk", [1, 7, 16, 33, 200])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill_of_mixed_lengths_equals_one_forward_pass(family: str, chunk: int) -> None:
    pair = tiny(family)
    prompts = [tokens_of(length, length) for length in (3, 61, 17, 1) if chunk > 1 or length < 60]
    for prompt, logits in zip(prompts, prefill_logits(pair.model, prompts, chunk), strict=True):
        assert_logits(logits, pair.full_logits(prompt))


@pytest.mark.parametrize("family", FAMILIES)
def test_paged_decode_of_a_mixed_batch_equals_one_forward_pass(family: str) -> None:
    pair, steps = tiny(family), 40
    lengths = (5, 50, 19, 20, 1, 21)
    texts = [tokens_of(length + steps, length) for length in lengths]
    assert attention_matters(pair, texts[1])
    wanted = [pair.full_logits(text) for text in texts]
    requests = [
        tiny_models.request(str(i), text[:length])
        for i, (text, length) in enumerate(zip(texts, lengths, strict=True))
    ]
    done = tiny_models.prefill_all(pair.model, requests, chunk=13)
    pool = tiny_models.new_pool(pair.model)
    rows = [tiny_models.join(pool, done[str(i)]) for i in range(len(texts))]
    for step in range(steps):
        places = [length + step for length in lengths]
        newest = [text[place] for text, place in zip(texts, places, strict=True)]
        logits = decode_step(pair.model, pool, rows, newest, places)
        assert_logits(logits, torch.stack([full[place] for full, place in zip(wanted, places, strict=True)]))
        pool.check()


@pytest.mark.parametrize("family", WINDOWED)
def test_windowed_layers_stay_equal_and_small_far_beyond_the_window(family: str) -> None:
    pair, total, start = tiny(family), 260, 70
    spec = pair.model.spec
    text = tokens_of(total)
    wanted = pair.full_logits(text)
    done = tiny_models.prefill_all(pair.model, [tiny_models.request("a", text[:start])], chunk=32)["a"]
    pool = tiny_models.new_pool(pair.model)
    row = tiny_models.join(pool, done)
    for place in range(start, total):
        logits = decode_step(pair.model, pool, [row], [text[place]], [place])
        assert_logits(logits[0], wanted[place])
    for index, layer in enumerate(spec.layers):
        held = int((pool.pages(row, index) >= 0).sum())
        slots = int(pool.slots[index])
        tokens = total if layer.window is None else layer.window + slots
        assert held <= layer.kv_heads * -(-tokens // slots)
    pool.check()
    pool.close(row)
    assert pool.use.used == 0


@functools.cache
def bfloat16_model(family: str) -> Model:
    """Wide enough (2048 columns) that one row alone takes another path through the matrix products."""
    network = tiny_models.build_network(family, intermediate_size=2048)
    return tiny_models.wrap_model(network.to(torch.bfloat16), frozenset())


# A mixture of experts multiplies a row together with the others of its expert, so its last bits may differ.
DENSE = sorted(set(FAMILIES) - {"gpt_oss"})


# How products are shared between threads depends on their shapes, which the families have in common.
@pytest.mark.parametrize(
    ("family", "threads"), [*((family, 1) for family in DENSE), ("llama", 2), ("gemma3n", 2)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_do_not_feel_their_neighbours(family: str, dtype: str, threads: int) -> None:
    torch.set_num_threads(threads)
    model = tiny(family).model if dtype == "float32" else bfloat16_model(family)
    prompts = [tokens_of(length, length) for length in (30, 9, 44, 25, 12, 18, 40, 33, 28, 10, 11)]
    done = tiny_models.prefill_all(
        model, [tiny_models.request(str(i), prompt) for i, prompt in enumerate(prompts)]
    )
    pool = tiny_models.new_pool(model, rows=32)
    together = [tiny_models.join(pool, done[str(i)]) for i in range(len(prompts))]
    alone = [tiny_models.join(pool, done[str(i)]) for i in range(len(prompts))]
    places = [len(prompt) for prompt in prompts]
    for step in range(3):
        inputs = [prompt[step] for prompt in prompts]
        batched = decode_step(model, pool, together, inputs, [place + step for place in places])
        for i, row in enumerate(alone):
            single = decode_step(model, pool, [row], [inputs[i]], [places[i] + step])
            assert torch.equal(single[0], batched[i])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_matrix_product_has_the_same_bits_in_every_padded_step(dtype: torch.dtype) -> None:
    """The measured rule behind `step_rows`, at the shapes of SmolLM2-135M and of wider models."""
    for columns, inner in ((576, 576), (192, 576), (1536, 576), (576, 1536), (2048, 512), (512, 2048)):
        generator = torch.Generator().manual_seed(columns)
        weight = torch.randn(columns, inner, generator=generator).to(dtype)
        rows = torch.randn(48, inner, generator=generator).to(dtype)

        def product(count: int, weight: Tensor = weight, rows: Tensor = rows) -> Tensor:
            """Rows in steps of `count`, each padded with zeros."""
            steps = []
            for start in range(0, 48 - count + 1, count):
                padded = rows.new_zeros(step_rows(count, dtype), rows.shape[1])
                padded[:count] = rows[start : start + count]
                steps.append(torch.nn.functional.linear(padded, weight)[:count])
            return torch.cat(steps)

        alone = product(1)
        for count in (*range(2, 17), 24, 48):
            found = product(count)
            assert torch.equal(found, alone[: len(found)]), (columns, inner, count)


def test_what_a_layer_needs_is_read_from_its_own_call() -> None:
    def windows(family: str) -> list[int | None]:
        return [layer.window for layer in tiny(family).model.spec.layers]

    assert windows("llama") == [None, None]
    assert windows("mistral") == [20, 20]
    assert windows("gemma2") == windows("gemma3") == [20, None, 20, None]
    assert {layer.softcap for layer in tiny("gemma2").model.spec.layers} == {5.0}
    assert {layer.head_dim for layer in tiny("gemma3").model.spec.layers} == {32}
    assert tiny("gemma3").model.spec.layers[0].scale == pytest.approx(20**-0.5)
    assert all(layer.sinks is not None for layer in tiny("gpt_oss").model.spec.layers)


def test_the_fingerprint_names_weights_and_configuration_and_nothing_else() -> None:
    def digest(*args: object, **changes: object) -> bytes:
        network = tiny_models.build_network(*args, **changes)  # type: ignore[arg-type]
        return tiny_models.wrap_model(network, frozenset()).spec.fingerprint.digest

    first = digest("llama")
    assert digest("llama") == first == tiny("llama").model.spec.fingerprint.digest
    assert digest("llama", 1) != first, "other weights"
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    assert digest("llama", rope_parameters=rope) != first, "another RoPE regime"


# bf16 keeps 8 bits; a recipe that drops a tenth of flat random attention costs more than that.
@pytest.mark.parametrize(
    ("recipe", "tolerance"), [(tiny_models.FULL, 0.1), (tiny_models.snapkv(36), 0.5)], ids=["full", "snapkv"]
)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_a_bfloat16_model_serves_its_own_dtype(family: str, recipe: Recipe, tolerance: float) -> None:
    network = tiny_models.build_network(family).to(torch.bfloat16)
    model = tiny_models.wrap_model(network, frozenset())
    text = tokens_of(60)
    done = tiny_models.prefill_all(model, [tiny_models.request("a", text[:40], recipe)], chunk=16)["a"]
    pool = tiny_models.new_pool(model)
    logits = tiny_models.decode_row(model, pool, tiny_models.join(pool, done), text[40:], 40)
    wanted = tiny(family).full_logits(text)[40:]
    assert logits.dtype is torch.bfloat16
    error = (logits.float() - wanted).abs().mean()
    assert error < tolerance * wanted.std(), float(error)


def test_a_row_at_its_first_step_sees_exactly_the_window() -> None:
    """The window counts the query's own token: 19 earlier tokens of a window of 20 matter, the 20th does not."""
    pair = tiny("mistral")
    text = list(tokens_of(40))
    layer_reach = len(pair.model.spec.layers) * 19

    def last_logits(tokens: Sequence[int]) -> Tensor:
        done = tiny_models.prefill_all(pair.model, [tiny_models.request("a", tokens[:-1])], chunk=11)["a"]
        counts = done.layout.meta.counts
        assert np.array_equal(counts, np.full_like(counts, 19))
        pool = tiny_models.new_pool(pair.model)
        return tiny_models.decode_row(
            pair.model, pool, tiny_models.join(pool, done), tokens[-1:], len(tokens) - 1
        )

    base = last_logits(text)
    for back, matters in ((layer_reach, True), (layer_reach + 1, False)):
        changed = list(text)
        changed[len(text) - 1 - back] = (text[len(text) - 1 - back] + 1) % 90 + 3
        assert torch.equal(base, last_logits(changed)) is not matters
