"""Exact text on real weights, fp32, whatever happens on the way: chunks, company, preemption, a move.

The last test asks transformers itself, so that the golden file is not the only oracle.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import golden_engine as ge
import pytest
import torch
from golden_engine import two_threads  # noqa: F401

from engine.decode import decode_step
from engine.local import Completion
from engine.model import Model
from engine.pool import PagePool
from engine.prefill import PrefillEngine, PrefillJob, run_to_end
from engine.request import GenerationRequest, SamplingParams
from engine.restore import restore, take_snapshot
from policies import make_recipe
from policies.recipe import Recipe

REPOSITORY = Path(__file__).parent.parent
FEW = 16

# (recipe, golden run, golden prompt): eight of three recipes, one of them with room for its whole prompt.
MIXED = [
    *((ge.FULL, "full", i) for i in range(4)),
    (ge.SNAPKV_256, "snapkv256", 4),
    (ge.SNAPKV_256, "snapkv256", 5),
    (make_recipe(policy="snapkv", budget=384), "full", 5),
    (ge.SNAPKV_512, "snapkv512", 6),
]


@pytest.fixture(scope="module")
def fp32(smollm2_path: Path) -> Model:
    return ge.model(smollm2_path, "float32")


@pytest.mark.parametrize("chunk_tokens", [64, 512])
def test_text_in_a_mixed_batch_is_golden_for_any_chunk(smollm2_path: Path, chunk_tokens: int):
    engine = ge.local_engine(smollm2_path, tokens=2400, chunk_tokens=chunk_tokens)
    found = engine.generate([ge.greedy(f"{run} {i}", ge.prompt(i), recipe, FEW) for recipe, run, i in MIXED])
    for _, run, index in MIXED:
        ge.assert_continues(found[f"{run} {index}"].tokens[0], run, index, FEW)


@pytest.mark.parametrize(
    ("recipe", "run", "index"),
    [(ge.FULL, "full", 2), (ge.SNAPKV_256, "snapkv256", 4), (ge.SNAPKV_512, "snapkv512", 7)],
)
def test_text_alone_is_golden(smollm2_path: Path, recipe: Recipe, run: str, index: int):
    engine = ge.local_engine(smollm2_path, tokens=800)
    found = engine.generate([ge.greedy("alone", ge.prompt(index), recipe, FEW)])
    ge.assert_continues(found["alone"].tokens[0], run, index, FEW)


def test_text_is_golden_after_preemptions(smollm2_path: Path):
    steps = 24
    trio = [(ge.SNAPKV_256, "snapkv256", 4), (ge.FULL, "full", 3), (ge.SNAPKV_256, "snapkv256", 5)]
    # Together they end at 18 + 10 + 18 pages per head: the youngest must give way once.
    engine = ge.local_engine(smollm2_path, tokens=44 * 16)
    found: dict[str, list[int]] = {}
    by_hand = 0
    requests = [ge.greedy(f"{run} {i}", ge.prompt(i), recipe, steps) for recipe, run, i in trio]
    for request_id, events in engine.stream(requests):
        found.setdefault(request_id, []).extend(
            event.token_id for event in events if hasattr(event, "token_id")
        )
        if by_hand == 0 and engine.decode.running == 3 and len(found[request_id]) == 5:
            by_hand = 3
            for _ in range(by_hand):
                engine.decode.preempt(0)
            assert engine.decode.use.used == 0
            engine.decode.check()
    assert by_hand and engine.decode.preemptions > by_hand
    for _, run, index in trio:
        ge.assert_continues(found[f"{run} {index}"], run, index, steps)


def test_text_goes_on_from_a_snapshot_in_another_process(smollm2_path: Path, fp32: Model, tmp_path: Path):
    here, there = 6, 12
    pair = [(ge.FULL, "full", 3), (ge.SNAPKV_256, "snapkv256", 5)]
    pool = PagePool(fp32.spec, ge.pages_for(fp32, 600), 2, ge.CONTEXT)
    rows, texts, metas = open_rows(fp32, pool, [(recipe, index) for recipe, _, index in pair])
    ge.continue_greedily(fp32, pool, rows, texts, here - 1)
    files = []
    for place, (row, text, meta) in enumerate(zip(rows, texts, metas, strict=True)):
        _, buffer = take_snapshot(pool, row, meta, text)
        files.append(tmp_path / f"{place}.snapshot")
        files[-1].write_bytes(buffer.numpy().tobytes())
    command = [sys.executable, str(Path(ge.__file__)), str(smollm2_path), str(there), *map(str, files)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for text, line, (_, run, index) in zip(texts, done.stdout.splitlines(), pair, strict=True):
        generated = text[len(ge.prompt(index)) :] + json.loads(line)
        ge.assert_continues(generated, run, index, here + there)


def open_rows(loaded: Model, pool: PagePool, wanted: list[tuple[Recipe, int]]):
    """Prefill golden prompts and restore each: pool rows, texts (prompt and first token), snapshot metadata."""
    engine = PrefillEngine(loaded)
    for place, (recipe, index) in enumerate(wanted):
        request = ge.greedy(str(place), ge.prompt(index), recipe)
        engine.add(PrefillJob(request, engine.open_workspace(request)))
    rows, texts, metas = [0] * len(wanted), [[0]] * len(wanted), [None] * len(wanted)
    for done in run_to_end(engine):
        place = int(done.job.request.request_id)
        buffer = torch.empty(done.layout.nbytes, dtype=torch.uint8)
        done.pack(buffer)
        rows[place] = restore(pool, done.layout, buffer)
        texts[place] = [*done.job.request.prompt, done.first[0].token_id]
        metas[place] = done.layout.meta
    return rows, texts, metas


def test_logits_of_a_row_have_the_same_bits_in_any_company(fp32: Model):
    pool = PagePool(fp32.spec, ge.pages_for(fp32, 1200), 10, ge.CONTEXT)
    rows, texts, _ = open_rows(fp32, pool, [(ge.FULL, 0), (ge.FULL, 2), (ge.SNAPKV_256, 4)])
    step = partial(step_of, fp32, pool, texts)
    alone = [step([(row, place)]) for place, row in enumerate(pool.fork(row) for row in rows)]
    twins = [(pool.fork(rows[0]), 0) for _ in range(4)]
    together = step([(rows[2], 2), *twins, (rows[1], 1), (rows[0], 0)])
    assert torch.equal(together[0], alone[2][0])
    assert torch.equal(together[5], alone[1][0])
    assert torch.equal(together[6], alone[0][0])


def step_of(
    loaded: Model, pool: PagePool, texts: list[list[int]], batch: list[tuple[int, int]]
) -> torch.Tensor:
    """Logits of one decode step of (pool row, text) pairs."""
    inputs = [texts[text] for _, text in batch]
    return decode_step(
        loaded, pool, [row for row, _ in batch], [t[-1] for t in inputs], [len(t) - 1 for t in inputs]
    )


def seeded(name: str, index: int, seed: int, **more: object) -> GenerationRequest:
    return GenerationRequest(
        name,
        ge.prompt(index),
        SamplingParams(temperature=0.9, seed=seed, max_tokens=FEW, ignore_eos=True, **more),
    )


def test_a_seed_gives_the_same_text_in_any_company(smollm2_path: Path):
    def run(requests: list[GenerationRequest]) -> dict[str, Completion]:
        return ge.local_engine(smollm2_path, tokens=1200).generate(requests)

    wanted = seeded("wanted", 1, seed=7, top_p=0.95, n=2)
    alone = run([wanted])["wanted"]
    company = [
        ge.greedy("greedy", ge.prompt(0), ge.FULL, FEW),
        seeded("other seed", 1, seed=8, top_p=0.95),
        ge.greedy("evicting", ge.prompt(4), ge.SNAPKV_256, 5),
        wanted,
        seeded("same seed", 2, seed=7),
        seeded("penalised", 3, seed=7, presence_penalty=1.0, logprobs=2),
        seeded("short", 1, seed=9, top_k=5),
    ]
    together = run(company)
    assert together["wanted"].tokens == alone.tokens
    assert together["wanted"].texts == alone.texts
    assert alone.tokens[0] != alone.tokens[1]
    assert together["other seed"].tokens[0] not in alone.tokens


def test_greedy_text_is_what_transformers_generates_here(smollm2_path: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    oracle = AutoModelForCausalLM.from_pretrained(
        smollm2_path, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    prompts = {
        "story": tokenizer("The lighthouse keeper counted the ships every evening, and on Tuesday")[
            "input_ids"
        ],
        "code": tokenizer("def fibonacci(n):\n    if n < 2:\n        return n\n")["input_ids"],
    }
    engine = ge.local_engine(smollm2_path, tokens=200)
    found = engine.generate([ge.greedy(name, ids, ge.FULL, FEW) for name, ids in prompts.items()])
    for name, ids in prompts.items():
        out = oracle.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            do_sample=False,
            max_new_tokens=FEW,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        top = torch.cat(out.logits).topk(2).values
        undecided = torch.nonzero(top[:, 0] - top[:, 1] < ge.TIE_MARGIN)
        stop = int(undecided[0]) if len(undecided) else FEW
        assert stop > FEW // 2, "the prompt runs into a tie"
        assert found[name].tokens[0][:stop] == out.sequences[0, len(ids) : len(ids) + stop].tolist()
