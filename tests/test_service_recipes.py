"""Recipes through both services: reports come back, streams outgrow the context, what cannot be met is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from service_stand import CONTEXT, ask, expected, model, stand

from engine.errors import ContextOverflow, InvalidRequest
from policies.recipe import make_recipe

SLOT = make_recipe(decode={"rule": "streaming_llm", "budget": 24}, positions="slot")


@pytest.mark.parametrize("by_reply", [False, True])
async def test_a_report_comes_with_the_prompt_event(by_reply):
    kept = make_recipe(policy="snapkv", budget=24, window=8, heads="ada")
    request = replace(ask("r", recipe=kept), report=True)
    async with stand(by_reply=by_reply) as s:
        done = await s.run(request)
        assert done.tokens == expected(request).tokens
        other = (await s.run(ask("other", recipe=kept))).prompt.report
    report = done.prompt.report
    assert report is not None and report.layers == (0, 1) and report.budgets == (24, 24)
    assert [sum(counts) for counts in report.counts] == [48, 48] and 0 < report.entropy <= 1
    assert report.kept_mass is not None and all(0 < mass < 1 for mass in report.kept_mass)
    assert other is not None and other.entropy == report.entropy and other.kept_mass is None


async def test_an_answer_in_slot_positions_outgrows_the_context():
    request = ask("r", CONTEXT - 20, recipe=SLOT, max_tokens=100)
    async with stand() as s:
        done = await s.run(request)
        with pytest.raises(ContextOverflow):
            await s.run(ask("plain", CONTEXT - 20, max_tokens=100))
        with pytest.raises(ContextOverflow):
            await s.run(ask("long", CONTEXT, recipe=SLOT))
    assert done.tokens == expected(request).tokens and len(done.tokens[0]) == 100


@pytest.mark.parametrize("max_tokens", [1, 5])
@pytest.mark.parametrize(
    ("recipe", "field"),
    [
        (SLOT, "kv.positions"),
        (make_recipe(policy="expected_attention", budget=24), "kv.policy"),
        (make_recipe(policy="snapkv", budget=24, window=8, critical=True), "kv.critical"),
    ],
    ids=["slot", "rotation", "output weight"],
)
async def test_a_recipe_that_this_model_cannot_serve_is_refused_before_prefill(
    recipe, field, max_tokens, monkeypatch
):
    layers = tuple(replace(layer, rotation=None, output_weight=None) for layer in model().spec.layers)
    async with stand() as s:
        monkeypatch.setattr(s.decode.engine.model, "spec", replace(model().spec, layers=layers))
        with pytest.raises(InvalidRequest) as refused:
            await s.run(ask("r", recipe=recipe, max_tokens=max_tokens))
        assert refused.value.field == field and s.client.asked == []
        monkeypatch.undo()


async def test_what_only_the_models_shape_tells_is_refused_by_its_field():
    async with stand() as s:
        for max_tokens in (1, 5):
            small = make_recipe(policy="snapkv", budget="1kB", window=8)
            with pytest.raises(InvalidRequest) as refused:
                await s.run(ask("r", recipe=small, max_tokens=max_tokens))
            assert refused.value.field == "kv.budget"


async def test_what_a_rule_notes_counts_towards_transfer_memory_before_anything_is_computed():
    noted = make_recipe(decode={"rule": "scissorhands", "budget": 24, "window": 60, "recent": 4, "every": 2})
    async with stand(staging=256 << 10) as s:
        payload = 300 * model().spec.kv_bytes_per_token
        assert payload < s.prefill.endpoint.capacity
        with pytest.raises(InvalidRequest, match="transfer memory") as refused:
            await s.run(ask("r", 300, recipe=noted))
        assert refused.value.field == "kv.budget" and s.prefill.engine._orders == 0
        await s.run(ask("plain", 300))


async def test_a_policy_that_fails_while_it_is_planned_leaves_nothing_behind(monkeypatch):
    kept = make_recipe(policy="snapkv", budget=24, window=8)

    def broken(self, n):
        raise ArithmeticError("a policy may be anybody's")

    async with stand() as s:
        monkeypatch.setattr("policies.snapkv.SnapKV.queries_wanted", broken)
        for max_tokens in (1, 5):
            with pytest.raises(ArithmeticError):
                await s.prefill.prefill(ask("r", recipe=kept, max_tokens=max_tokens))
        assert s.prefill.stats()["queue"] == 0
        monkeypatch.undo()
        await s.run(ask("again", recipe=kept))
