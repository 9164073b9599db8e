"""A prompt's KV is a function of the prompt: not of the chunks it was computed in, nor of who shared its steps."""

from __future__ import annotations

import pytest
import torch
from tiny_models import one_thread, request, tiny, tokens_of  # noqa: F401

from engine.prefill import PrefillEngine, PrefillJob, run_to_end
from engine.schedule import PrefillNeed, plan_prefill
from engine.workspace import Workspace


def computed(family: str, lengths: list[int], chunk_tokens: int) -> list[Workspace]:
    engine = PrefillEngine(tiny(family).model, chunk_tokens=chunk_tokens)
    engine.piece_tokens = 32  # the tiny model's prompts are shorter than a real piece
    for index, length in enumerate(lengths):
        asked = request(f"r{index}", tokens_of(length, seed=length))
        engine.add(PrefillJob(asked, engine.open_workspace(asked)))
    done = {finished.job.request.request_id: finished.job.workspace for finished in run_to_end(engine)}
    return [done[f"r{index}"] for index in range(len(lengths))]


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3"])
def test_kv_has_the_same_bits_whoever_shares_the_steps_and_whatever_the_chunks(family: str) -> None:
    alone = computed(family, [200], 128)[0]
    for others in (computed(family, [75, 200, 9], 128)[1], computed(family, [200], 64)[0]):
        for mine, theirs in zip(alone.keys + alone.values, others.keys + others.values, strict=True):
            assert torch.equal(mine, theirs)


def test_an_unfinished_prompt_gets_whole_pieces_and_a_finished_one_its_rest() -> None:
    plan = plan_prefill([PrefillNeed(0, 1000), PrefillNeed(1, 30)], 512, 128)
    assert plan == {0: 384, 1: 30}
    assert plan_prefill([PrefillNeed(0, 300), PrefillNeed(1, 2000)], 512, 128) == {0: 300, 1: 128}
