"""Selection in the engine: what scorers are shown, what they cost, what is reported, and whose errors they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import (  # noqa: F401
    FULL,
    local_engine,
    one_thread,
    pieces,
    plain_spec,
    prefill_all,
    request,
    snapkv,
    tiny,
    tokens_of,
)

from engine.attention import AttentionCall
from engine.errors import GenerationFailed, InvalidRequest
from engine.model import Model
from engine.plan import plan_prompt
from engine.prefill import PrefillDone, PrefillEngine, PrefillFailed, PrefillJob, run_to_end
from engine.prefix import PrefixCache
from engine.request import GenerationRequest
from engine.survivors import layer_view
from engine.watch import QueryWatch
from engine.workspace import Workspace
from kv_tiers.books import SlotBooks
from kv_tiers.slab import Slab
from policies import POLICIES, load_policy, make_recipe
from policies.policy import LayerView, Needs, ObservedLayer, Policy
from policies.recipe import Recipe

MODEL = tiny("llama").model
LAYERS = range(len(MODEL.spec.layers))

RECIPES = {
    "snapkv": snapkv(40),
    "snapkv with a tail": make_recipe(policy="snapkv", budget=40, window=8, tail=5, kernel=5),
    "h2o": make_recipe(policy="h2o", budget=40),
    "scissorhands": make_recipe(policy="scissorhands", budget=40, window=50),
    "tova": make_recipe(policy="tova", budget=40, tail=3),
    "expected_attention": make_recipe(policy="expected_attention", budget=40, recent=4),
    "keydiff": make_recipe(policy="keydiff", budget=40, recent=4),
    "streaming_llm": make_recipe(policy="streaming_llm", budget=40),
    "ada": make_recipe(policy="snapkv", budget=40, window=8, kernel=5, heads="ada"),
    "critical": make_recipe(policy="knorm", budget=40, recent=4, critical=True),
    "bands": make_recipe(policy="snapkv", budget=40, window=8, bands={"0-0": 1.0}),
    "h2o to the end": make_recipe(policy="h2o", budget=40, decode="h2o"),
    "scissorhands later": make_recipe(
        policy="keydiff", budget=40, decode={"rule": "scissorhands", "window": 20}
    ),
}
EVERY = pytest.mark.parametrize("name", RECIPES)


class Everything(Policy):
    """A user's policy that asks for all queries and brings no observer, so they are kept for it."""

    needs = Needs.ALL_QUERIES

    def score(self, layer: LayerView) -> torch.Tensor:
        assert layer.queries is not None and layer.queries.shape[1] == layer.tokens
        return layer.queries.unflatten(0, (layer.kv_heads, -1)).sum((1, 3))


def finished(
    wanted: GenerationRequest,
    chunk: int = 64,
    piece: int = 32,
    company: Sequence[int] = (),
    model: Model = MODEL,
) -> PrefillDone:
    """A prompt computed beside prompts of other lengths."""
    engine = PrefillEngine(model, chunk_tokens=chunk)
    engine.piece_tokens = piece
    for asked in [request(f"with{n}", tokens_of(n, n)) for n in company] + [wanted]:
        engine.add(PrefillJob(asked, engine.open_workspace(asked)))
    return {done.job.request.request_id: done for done in run_to_end(engine)}[wanted.request_id]


def kept(done: PrefillDone) -> dict[tuple[int, int], list[int]]:
    return {place: rows.tolist() for place, rows in done.layout.meta.positions.items()}


def own(name: str, **fields: object) -> Recipe:
    """A recipe of a policy in this file."""
    return make_recipe(policy=load_policy(f"{__name__}:{name}"), **fields)


def all_queries(prompt: tuple[int, ...]) -> list[torch.Tensor]:
    """Every query [Hq, N, D] of a prompt, per layer."""
    workspace = finished(request("all", prompt, own("Everything", budget=20))).job.workspace
    found = [workspace.watches[layer].last(len(prompt)) for layer in LAYERS]
    return [queries for queries in found if queries is not None]


def attention(workspace: Workspace, queries: torch.Tensor, layer: int) -> torch.Tensor:
    """Causal attention of the last queries, written out: float64 [Hk, G, W, N]."""
    keys, spec = workspace.keys[layer].double(), workspace.spec.layers[layer]
    rows = queries.double().unflatten(0, (spec.kv_heads, -1))
    logits = torch.einsum("hgwd,hnd->hgwn", rows, keys) * spec.scale
    n, width = keys.shape[1], queries.shape[1]
    hidden = torch.arange(n) > torch.arange(n - width, n).unsqueeze(1)
    return torch.softmax(logits.masked_fill(hidden, -math.inf), -1)


# What scorers are shown


@pytest.mark.parametrize("chunk", [32, 64, 1024])
@pytest.mark.parametrize(
    ("window", "tail", "length"), [(8, 0, 150), (8, 5, 150), (30, 40, 150), (50, 14, 67)]
)
def test_a_window_with_its_tail_is_the_end_of_the_prompt(chunk, window, tail, length):
    prompt = tokens_of(length)
    recipe = make_recipe(policy="snapkv", budget=window + tail + 1, window=window, tail=tail, sinks=1)
    done = finished(request("a", prompt, recipe), chunk, company=(75, 9))
    truth = all_queries(prompt)
    plan = plan_prompt(MODEL.spec, done.job.request)
    for layer in LAYERS:
        view = layer_view(done.job.workspace, plan, layer)
        torch.testing.assert_close(view.queries, truth[layer][:, -(window + tail) :])
        for head in range(2):
            rows = done.layout.meta.positions[layer, head].tolist()
            assert rows == [0, *range(length - window - tail, length)], "nothing but what is protected fits"


@pytest.mark.parametrize("company", [(), (75, 9)])
def test_column_sums_do_not_depend_on_the_chunks(company):
    prompt = tokens_of(200)
    found = []
    for chunk in (64, 128, 1024):
        done = finished(request("a", prompt, RECIPES["h2o"]), chunk, company=company)
        watches = done.job.workspace.watches
        assert all(watch.last(0) is None and watch.nbytes == 0 for watch in watches.values()), (
            "no query is kept"
        )
        found.append([watches[layer].observed() for layer in LAYERS])
    truth = all_queries(prompt)
    for layer in LAYERS:
        wanted = attention(done.job.workspace, truth[layer], layer).mean(1).sum(1)
        torch.testing.assert_close(found[0][layer].double(), wanted, rtol=1e-4, atol=1e-5)
        assert all(torch.equal(found[0][layer], other[layer]) for other in found[1:])


def test_a_policy_of_all_queries_without_an_observer_finds_them_all():
    prompt = tokens_of(100)
    truth = all_queries(prompt)
    assert [queries.shape for queries in truth] == [(4, 100, 16)] * 2
    for layer in LAYERS:
        again = all_queries(prompt)[layer]
        assert torch.equal(truth[layer], again)


class Diary:
    """An observer that notes what it is shown."""

    def __init__(self) -> None:
        self.queries: list[torch.Tensor] = []
        self.sums: list[torch.Tensor] = []
        self.spans: list[tuple[int, int]] = []

    def add(self, queries, keys, lse, start):
        assert keys.shape[1] == start + queries.shape[1]
        self.queries.append(queries.clone())
        self.sums.append(lse.clone())
        self.spans.append((start, keys.shape[1]))

    def result(self):
        return torch.cat(self.queries, 1)


@pytest.mark.parametrize("window", [0, 7, 40])
def test_queries_of_layers_that_share_a_cache_join_its_group(window):
    spec = plain_spec([(2, 16, None)], group=3)
    shared = replace(spec.layers[0], readers=3)
    spec = replace(spec, layers=(shared,))
    diary = Diary()
    watch = QueryWatch(shared, 40, window, torch.float32, diary)
    workspace = Workspace(spec, 40, {0: watch}, piece_tokens=8)
    keys, values = torch.randn(2, 2, 40, 16)
    queries = torch.randn(3, 6, 40, 16)  # [reader, Hq, N, D]
    for start, stop in ((0, 20), (20, 40)):
        cut = slice(start, stop)
        for reader in range(3):
            call = AttentionCall(0, 0.25, None, 0.0, None, stored=reader == 0, reader=reader)
            # What a reader is called with is in the cache already; it must not be written again.
            own = (keys[:, cut], values[:, cut]) if reader == 0 else (torch.full((2, 20, 16), math.nan),) * 2
            out = workspace.attend(call, queries[reader][:, cut], *own, start)
            wanted = _attend(queries[reader][:, cut], keys[:, :stop], values[:, :stop])
            torch.testing.assert_close(out, wanted, atol=1e-5, rtol=0)
    joined = queries.unflatten(1, (2, 3)).transpose(0, 1).flatten(0, 2)  # [Hk · readers · G, N, D]
    last = watch.last(window)
    assert last is None if window == 0 else torch.equal(last, joined[:, -window:])
    assert torch.equal(watch.observed(), joined)
    assert diary.spans == [(0, 8), (8, 16), (16, 20), (20, 24), (24, 32), (32, 40)]
    logits = torch.einsum("hrnd,hkd->hrnk", joined.unflatten(0, (2, 9)), keys) * 0.25
    hidden = torch.ones(40, 40, dtype=torch.bool).triu(1)
    lse = logits.masked_fill(hidden, -math.inf).logsumexp(-1).flatten(0, 1)
    torch.testing.assert_close(torch.cat(diary.sums, 1), lse, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_a_model_whose_layers_share_a_cache_scores_it_once_for_all_of_them(family):
    model, prompt = tiny(family).model, tokens_of(100)
    shared = model.spec.layers[1]
    assert shared.window is None and shared.readers == 3
    everything = finished(request("a", prompt, own("Everything", budget=20)), model=model).job.workspace
    queries = everything.watches[1].last(100)
    assert queries.shape == (shared.scored_heads, 100, shared.head_dim)
    done = finished(request("b", prompt, make_recipe(policy="h2o", budget=30)), model=model, company=(75,))
    wanted = attention(everything, queries, 1).mean(1).sum(1)
    torch.testing.assert_close(
        done.job.workspace.watches[1].observed().double(), wanted, rtol=1e-4, atol=1e-5
    )
    assert done.report.layers == (1,) and done.report.counts == ((30, 30),)
    # Three layers' queries, not one's three times.
    heads = queries.unflatten(0, (2, 3, 2))
    assert all((heads[:, a] - heads[:, b]).abs().max() > 0.1 for a, b in ((0, 1), (0, 2), (1, 2)))


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention of the last queries over all keys, by torch."""
    rows, n = query.shape[1], keys.shape[1]
    mask = torch.arange(n) <= torch.arange(n - rows, n).unsqueeze(1)
    group = query.shape[0] // keys.shape[0]
    k, v = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    return torch.nn.functional.scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=0.25)


# What it costs


@pytest.mark.parametrize(
    "recipe",
    [
        FULL,
        snapkv(100),
        make_recipe(policy="h2o", budget=1.0),
        make_recipe(policy="tova", budget=150),
        make_recipe(policy="expected_attention", budget="64MiB"),
        make_recipe(policy="snapkv", budget=200, heads="ada"),
        make_recipe(policy="keydiff", budget=30, bands={"0-1": 100}),
        make_recipe(policy="full", decode={"rule": "streaming_llm", "budget": 50}),
    ],
    ids=lambda recipe: recipe.recipe_id,
)
def test_a_prompt_that_stays_whole_costs_nothing(recipe, monkeypatch):
    wanted = replace(request("a", tokens_of(100), recipe), report=True)
    engine = PrefillEngine(MODEL, chunk_tokens=64)
    assert engine.must_compute(wanted) == 1 and engine.open_workspace(wanted).watches == {}
    for name in ("select", "score"):
        monkeypatch.setattr(POLICIES[recipe.policy], name, lambda *_: pytest.fail("asked"))
    done = finished(wanted)
    assert done.report.kept_mass == (1.0, 1.0) and done.report.entropy == 1.0
    assert done.report.counts == ((100, 100), (100, 100))
    listed = recipe.decode.evicts
    assert all((layer.positions is not None) == listed for layer in done.survivors)
    assert set(kept(done)) == ({(layer, head) for layer in LAYERS for head in range(2)} if listed else set())


@EVERY
def test_what_must_be_computed_is_what_is_read(name):
    recipe, engine = RECIPES[name], PrefillEngine(MODEL)
    wanted = request("a", tokens_of(100), recipe)
    need = {"h2o": 100, "h2o to the end": 100, "expected_attention": 100, "snapkv with a tail": 13, "tova": 4}
    need |= {"scissorhands": 50, "scissorhands later": 20, "keydiff": 1, "streaming_llm": 1, "critical": 1}
    assert engine.must_compute(wanted) == need.get(name, 8)
    assert engine.must_compute(replace(wanted, prompt_logprobs=0)) == 100
    reported = engine.must_compute(replace(wanted, report=True))
    assert reported == max(need.get(name, 8), recipe.window + recipe.tail)
    short = request("b", tokens_of(3), recipe)
    assert 1 <= engine.must_compute(short) <= 3


def test_layers_that_stay_whole_are_not_shown_to_the_policy():
    done = finished(request("a", tokens_of(100), RECIPES["bands"]))
    assert set(done.job.workspace.watches) == {1} and set(kept(done)) == {(1, 0), (1, 1)}
    assert done.report.budgets == (100, 40) and done.report.counts == ((100, 100), (40, 40))


def test_windowed_layers_keep_their_window_whatever_the_recipe():
    model = tiny("gemma3").model
    for recipe in (RECIPES["snapkv with a tail"], RECIPES["h2o"], RECIPES["keydiff"]):
        done = prefill_all(model, [request("a", tokens_of(100), recipe)])["a"]
        assert set(done.job.workspace.watches) <= {1, 3} == set(done.report.layers)
        assert done.layout.meta.counts.tolist() == [[19, 19], [40, 40]] * 2
        assert done.layout.meta.firsts.tolist() == [81, -1, 81, -1]
    done = prefill_all(tiny("mistral").model, [request("a", tokens_of(100), RECIPES["h2o"])])["a"]
    assert done.report.layers == done.report.counts == () and done.job.workspace.watches == {}


# What is reported


@EVERY
def test_the_report_says_what_was_kept(name):
    recipe = RECIPES[name]
    prompt = tokens_of(120)
    done = finished(replace(request("a", prompt, recipe), report=True))
    counts = [[int(count) for count in row] for row in done.layout.meta.counts]
    assert done.report.counts == tuple(map(tuple, counts))
    shares = np.array(counts).ravel() / np.sum(counts)
    assert done.report.entropy == pytest.approx(-(shares * np.log(shares)).sum() / math.log(4))
    truth = all_queries(prompt)
    rows = recipe.window + recipe.tail
    for layer in LAYERS:
        weights = attention(done.job.workspace, truth[layer][:, -rows:], layer).mean(1).sum(1)
        chosen = kept(done).get((layer, 0), range(120)), kept(done).get((layer, 1), range(120))
        share = sum(float(weights[head, list(chosen[head])].sum()) for head in (0, 1)) / (2 * rows)
        assert done.report.kept_mass[layer] == pytest.approx(share, abs=1e-5)
    plain = finished(request("a", prompt, recipe))
    assert plain.report.kept_mass is None and plain.report.counts == done.report.counts


def test_budgets_that_heads_share_are_reported_per_head():
    done = finished(request("a", tokens_of(120), RECIPES["ada"]))
    assert done.report.budgets == (40, 40)
    assert [sum(row) for row in done.report.counts] == [80, 80]
    assert done.report.counts != ((40, 40), (40, 40)) and 0.5 < done.report.entropy < 1.0


def test_the_prompt_event_carries_the_report_and_kept_mass_on_request_or_where_it_is_known():
    wanted = [
        request("no", tokens_of(60), snapkv(20)),
        request("whole", tokens_of(60), snapkv(60)),
        replace(request("yes", tokens_of(60), snapkv(20)), report=True),
    ]
    done = local_engine(MODEL).generate(wanted)
    assert done["no"].prompt.report.kept_mass is None and done["no"].prompt.report.entropy == 1.0
    assert done["whole"].prompt.report.kept_mass == (1.0, 1.0)
    assert 0 < min(done["yes"].prompt.report.kept_mass) < 1.0
    assert done["yes"].prompt.report.counts == ((20, 20), (20, 20)) == done["no"].prompt.report.counts
    assert done["yes"].tokens == done["no"].tokens


# Whose errors they are


class Faulty(Everything):
    """Cannot cope with prompts of 75 tokens, wherever `at` says."""

    at = ""

    def queries_wanted(self, n: int) -> int:
        return 0

    def observer(self, layer: ObservedLayer) -> Diary:
        if self.at == "observer" and layer.tokens == 75:
            raise ZeroDivisionError("75")
        return FaultyDiary(layer.tokens if layer.tokens == 75 else 0, self.at)

    def score(self, layer: LayerView) -> torch.Tensor:
        return layer.keys.sum(-1)


class FaultyDiary(Diary):
    def __init__(self, tokens: int, at: str) -> None:
        super().__init__()
        self._tokens, self._at = tokens, at

    def add(self, queries, keys, lse, start):
        if self._tokens and self._at == "add" and start:
            raise ZeroDivisionError("75")
        super().add(queries, keys, lse, start)

    def result(self):
        if self._tokens and self._at == "result":
            raise ZeroDivisionError("75")
        return super().result()


@pytest.mark.parametrize("at", ["observer", "add", "result"])
def test_an_observer_that_raises_fails_its_own_prompt_only(at, monkeypatch):
    monkeypatch.setattr(Faulty, "at", at)
    recipe = own("Faulty", budget=20)
    engine = PrefillEngine(MODEL, chunk_tokens=64)
    alone = kept(finished(request("alone", tokens_of(60), recipe)))
    asked = [request(f"r{length}", tokens_of(length), recipe) for length in (60, 75, 80)]
    if at == "observer":
        with pytest.raises(GenerationFailed, match="ZeroDivisionError"):
            engine.open_workspace(asked.pop(1))
    for one in asked:
        engine.add(PrefillJob(one, engine.open_workspace(one)))
    results = {}
    while engine.queued:
        results |= {result.job.request.request_id: result for result in engine.step()}
        engine.check()
    assert kept(results["r60"]) == alone and isinstance(results["r80"], PrefillDone)
    if at != "observer":
        failed = results["r75"]
        assert isinstance(failed, PrefillFailed) and "ZeroDivisionError" in str(failed.error)
        assert (failed.job.remaining > 0) == (at == "add"), "what is lost is not computed to its end"


def test_recipes_that_the_model_cannot_meet_are_refused_by_field():
    engine = PrefillEngine(MODEL)
    tight = make_recipe(policy="snapkv", budget="1000B", window=8)
    with pytest.raises(InvalidRequest) as refused:
        engine.open_workspace(request("a", tokens_of(100), tight))
    assert refused.value.field == "kv.budget"
    spec = replace(MODEL.spec, layers=tuple(replace(layer, rotation=None) for layer in MODEL.spec.layers))
    for tokens in (100, 30):  # whatever the prompt's length: the second would stay whole
        with pytest.raises(InvalidRequest, match="rotary") as refused:
            plan_prompt(spec, request("a", tokens_of(tokens), RECIPES["expected_attention"]))
        assert refused.value.field == "kv.policy"


# What decoding starts from


def of_survivors(per_token: torch.Tensor, done: PrefillDone, layer: int, head: int) -> torch.Tensor:
    """[..., N] at the positions that a head kept."""
    return per_token[..., torch.tensor(kept(done)[layer, head])]


@pytest.mark.parametrize("fields", [{"policy": "h2o", "budget": 40}, {"policy": "h2o", "budget": 1.0}])
def test_h2o_goes_on_with_the_sums_of_the_whole_prompt(fields):
    prompt = tokens_of(120)
    decode = {"rule": "h2o", "budget": 50}
    done = finished(request("a", prompt, make_recipe(**fields, decode=decode)), company=(75,))
    arrays, truth = done.layout.meta.arrays, all_queries(prompt)
    assert set(arrays) == {"caps", "mass"} and arrays["caps"].tolist() == [[50, 50]] * 2
    for layer in LAYERS:
        wanted = attention(done.job.workspace, truth[layer], layer).mean(1).sum(1)
        for head in range(2):
            found = arrays["mass"][layer, head]
            torch.testing.assert_close(
                found.double(), of_survivors(wanted[head], done, layer, head), rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("policy", [{"policy": "full"}, {"policy": "streaming_llm", "budget": 60}])
def test_a_rule_is_shown_the_queries_that_it_asks_for_whatever_the_policy(policy):
    prompt = tokens_of(120)
    decode = {"rule": "snapkv", "budget": 50, "window": 20, "every": 4}
    wanted = request("a", prompt, make_recipe(**policy, decode=decode))
    assert PrefillEngine(MODEL).must_compute(wanted) == 20
    done, truth = finished(wanted, company=(75,)), all_queries(prompt)
    queries = done.layout.meta.arrays["queries"]
    for layer in LAYERS:
        torch.testing.assert_close(queries[layer], truth[layer][:, -20:])  # 120 is a multiple of 20


@pytest.mark.parametrize(("rule", "length"), [("streaming_llm", 60), ("sliding_window", 60), ("tova", 40)])
def test_a_rule_that_starts_from_nothing_costs_a_prompt_nothing_but_its_positions(rule, length):
    recipe = make_recipe(policy="full", decode={"rule": rule, "budget": 50})
    wanted = request("a", tokens_of(length), recipe)
    engine = PrefillEngine(MODEL)
    assert engine.must_compute(wanted) == 1 and engine.open_workspace(wanted).watches == {}
    done = finished(wanted)
    assert set(done.layout.meta.arrays) == {"caps"} and kept(done)[1, 1] == list(range(length))


# Cached beginnings


@pytest.fixture
def cache(tmp_path):
    """A prefix cache with an empty CPU tier."""
    nbytes = MODEL.spec.blocks.nbytes
    with Slab.create(tmp_path / "blocks.kvslab", 100 * nbytes) as slab:
        yield PrefixCache(MODEL.spec, SlotBooks(100, nbytes), slab, "test")


@EVERY
def test_a_second_question_selects_anew_and_equals_its_cold_answer(name, cache):
    recipe, document = RECIPES[name], tokens_of(300)
    engine, selected = PrefillEngine(MODEL, chunk_tokens=64), []
    questions = tokens_of(13, 21), tokens_of(30, 22), tokens_of(13, 21)
    for question, shared in zip(questions, (0, 300, 313), strict=True):
        wanted = request("q", (*document, *question), recipe, max_tokens=12)
        keys = cache.keys(wanted.prompt, None)
        workspace = engine.open_workspace(wanted)
        limit = len(wanted.prompt) - engine.must_compute(wanted)
        known = cache.load(workspace, keys, limit)
        assert known == min(limit, shared) // 16 * 16, "as much as the scorer allows"
        engine.add(PrefillJob(wanted, workspace, known))
        (warm,) = run_to_end(engine)
        cache.store(workspace, keys)
        cold = finished(wanted)
        assert kept(warm) == kept(cold) != {}
        answers = [local_engine(MODEL, prefix=prefix).generate([wanted])["q"] for prefix in (cache, None)]
        assert answers[0].tokens == answers[1].tokens
        selected.append(kept(warm))
    assert selected[0] == selected[2] != selected[1]
