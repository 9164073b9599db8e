"""A prompt's KV depends on the prompt and its cached beginning: not on its chunks, nor on who shares its steps."""

from __future__ import annotations

import pytest
import torch
from tiny_models import local_engine, one_thread, request, tiny, tokens_of  # noqa: F401

from engine.errors import GenerationFailed
from engine.prefill import PrefillDone, PrefillEngine, PrefillFailed, PrefillJob, run_to_end
from engine.schedule import PrefillNeed, plan_prefill
from engine.workspace import Workspace
from policies import load_policy, make_recipe
from policies.policy import LayerView
from policies.snapkv import SnapKV


def computed(
    family: str, lengths: list[int], chunk_tokens: int, cached: int = 0, known: Workspace | None = None
) -> list[Workspace]:
    """Workspaces of prompts computed together; the first `cached` tokens of the last one are `known`'s."""
    engine = PrefillEngine(tiny(family).model, chunk_tokens=chunk_tokens)
    engine.piece_tokens = 32  # the tiny model's prompts are shorter than a real piece
    for index, length in enumerate(lengths):
        asked = request(f"r{index}", tokens_of(length, seed=length))
        workspace = engine.open_workspace(asked)
        if known is not None and index == len(lengths) - 1:
            for mine, theirs in zip(parts(workspace), parts(known), strict=True):
                mine[:, :cached] = theirs[:, :cached]
            workspace.filled = cached
        engine.add(PrefillJob(asked, workspace, workspace.filled))
        engine.check()
    done = {finished.job.request.request_id: finished.job.workspace for finished in run_to_end(engine)}
    engine.check()
    return [done[f"r{index}"] for index in range(len(lengths))]


def parts(workspace: Workspace) -> list[torch.Tensor]:
    return workspace.keys + workspace.values


def assert_same_bits(mine: Workspace, others: Workspace) -> None:
    assert all(torch.equal(a, b) for a, b in zip(parts(mine), parts(others), strict=True))


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3"])
def test_kv_has_the_same_bits_whoever_shares_the_steps_and_whatever_the_chunks(family: str) -> None:
    alone = computed(family, [200], 128)[0]
    assert_same_bits(alone, computed(family, [75, 200, 9], 128)[1])
    assert_same_bits(alone, computed(family, [200], 64)[0])


@pytest.mark.parametrize("cached", [16, 32, 80, 144, 192])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_after_a_cached_beginning_too_and_it_is_the_same_kv_up_to_rounding(family: str, cached: int) -> None:
    cold = computed(family, [200], 128)[0]
    warm = computed(family, [200], 128, cached, cold)[0]
    assert_same_bits(warm, computed(family, [75, 9, 200], 128, cached, cold)[2])
    assert_same_bits(warm, computed(family, [200], 64, cached, cold)[0])
    for mine, theirs in zip(parts(warm), parts(cold), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


class Picky(SnapKV):
    """Cannot cope with prompts of 75 tokens."""

    def score(self, layer: LayerView) -> torch.Tensor:
        if layer.keys.shape[1] == 75:
            raise ZeroDivisionError("75")
        return super().score(layer)


def test_a_policy_that_raises_fails_its_own_prompt_only() -> None:
    recipe = make_recipe(policy=load_policy(f"{__name__}:Picky"), budget=20)
    model = tiny("llama").model
    engine = PrefillEngine(model, chunk_tokens=256)
    asked = [request(f"r{length}", tokens_of(length), recipe) for length in (60, 75, 80)]
    for one in asked:
        engine.add(PrefillJob(one, engine.open_workspace(one)))
    results = {result.job.request.request_id: result for result in engine.step()}
    engine.check()
    assert isinstance(results["r60"], PrefillDone) and isinstance(results["r80"], PrefillDone)
    failed = results["r75"]
    assert isinstance(failed, PrefillFailed) and engine.queued == 0
    assert isinstance(failed.error, GenerationFailed) and "ZeroDivisionError" in str(failed.error)
    local = local_engine(model, chunk=256)
    with pytest.raises(GenerationFailed, match="ZeroDivisionError"):
        local.generate(asked)
    assert local.prefill.queued == 0 and local.decode.idle


def test_an_unfinished_prompt_gets_whole_pieces_and_a_finished_one_its_rest() -> None:
    plan = plan_prefill([PrefillNeed(0, 1000), PrefillNeed(1, 30)], 512, 128)
    assert plan == {0: 384, 1: 30}
    assert plan_prefill([PrefillNeed(0, 300), PrefillNeed(1, 2000)], 512, 128) == {0: 300, 1: 128}


def test_after_a_cached_beginning_the_first_chunk_ends_at_a_piece() -> None:
    assert plan_prefill([PrefillNeed(0, 1000, 80)], 512, 128) == {0: 432}
    assert plan_prefill([PrefillNeed(0, 1000, 80), PrefillNeed(1, 30)], 512, 128) == {0: 432, 1: 30}
