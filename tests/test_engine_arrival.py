"""Computing behind a prefix that is still being loaded: the same bits as load-then-compute, whatever fails."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FULL, local_engine, one_thread, request, snapkv, tiny, tokens_of  # noqa: F401

import engine.arrival
import engine.prefix
from engine.arrival import Arrival
from engine.model import Model
from engine.pace import PrefillPace
from engine.prefill import PrefillDone, PrefillEngine, PrefillJob, run_to_end
from engine.prefix import PrefixCache, PrefixLoad
from engine.request import GenerationRequest
from engine.workspace import Workspace
from kv_tiers.block import read_layer_run
from kv_tiers.books import SlotBooks
from kv_tiers.slab import Slab
from policies import make_recipe

WAIT_S = 10
BLOCK = 16


class Reading:
    """Wraps the reading of layers: a layer is read when its gate opens, and `at[layer]` says that it is its turn."""

    def __init__(self, layers: int) -> None:
        self.gates = [threading.Event() for _ in range(layers)]
        self.at = [threading.Event() for _ in range(layers)]
        self.read: list[tuple[int, int]] = []
        self.fails_at: int | None = None

    def __call__(
        self, bufs: Sequence[Any], layout: Any, headers: Any, layer: int, keys: Any, values: Any
    ) -> int:
        self.at[layer].set()
        assert self.gates[layer].wait(WAIT_S)
        if layer == self.fails_at:
            raise OSError("the slab is gone")
        self.read.append((layer, len(bufs)))
        return read_layer_run(bufs, layout, headers, layer, keys, values)

    def open(self) -> None:
        for gate in self.gates:
            gate.set()


class Stand:
    """An engine and a cache whose loads run beside it."""

    def __init__(self, model: Model, cache: PrefixCache, reading: Reading) -> None:
        self.model, self.cache, self.reading = model, cache, reading
        self.engine = PrefillEngine(model, chunk_tokens=256)
        self.threads: list[threading.Thread] = []
        self.errors: list[Exception] = []

    def begin(self, wanted: GenerationRequest) -> tuple[PrefillJob, PrefixLoad]:
        """Start a load and give the engine the prompt, as the service does."""
        space, opened = self.engine.open_workspace(wanted), threading.Event()
        limit = len(wanted.prompt) - self.engine.must_compute(wanted)
        load = PrefixLoad(self.cache, wanted, space, limit, self.engine.seconds_for(0, limit))

        def run() -> None:
            try:
                load.run(opened.set)
            except Exception as error:  # noqa: BLE001 - for the test to look at
                self.errors.append(error)

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()
        assert opened.wait(WAIT_S)
        job = PrefillJob(wanted, space, space.filled)
        self.engine.add(job)
        self.engine.check()
        return job, load

    def lockstep(self, space: Workspace) -> None:
        """Let every layer be read only when the engine waits for it."""
        arrived = space.arrived

        def asked(layer: int) -> bool:
            self.reading.gates[layer].set()
            return arrived(layer)

        space.arrived = asked  # type: ignore[method-assign]

    def join(self) -> None:
        for thread in self.threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()

    def store(self, wanted: GenerationRequest) -> Workspace:
        """Compute a prompt and write its blocks."""
        done = self.cold(wanted)
        self.cache.store(done.job.workspace, self.cache.keys(wanted.prompt, None))
        return done.job.workspace

    def cold(self, wanted: GenerationRequest) -> PrefillDone:
        engine = PrefillEngine(self.model, chunk_tokens=256)
        engine.add(PrefillJob(wanted, engine.open_workspace(wanted)))
        (done,) = run_to_end(engine)
        return done

    def load_then_compute(self, wanted: GenerationRequest) -> PrefillDone:
        self.reading.open()
        engine = PrefillEngine(self.model, chunk_tokens=256)
        space = engine.open_workspace(wanted)
        limit = len(wanted.prompt) - engine.must_compute(wanted)
        cached = self.cache.load(space, self.cache.keys(wanted.prompt, None), limit)
        engine.add(PrefillJob(wanted, space, cached))
        (done,) = run_to_end(engine)
        return done

    def damage(self, prompt: Sequence[int], block: int, layer: int) -> None:
        keys = self.cache.keys(prompt, None)[: block + 1]
        lease = self.cache.tier.prepare_read(keys, "vandal")
        layout = self.model.spec.blocks
        self.cache.slab.view(lease.entries[block].offset, layout.nbytes)[layout.layer_offset(layer) + 3] ^= 4
        self.cache.tier.complete_read(lease.id)


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Stand]]:
    """`stand(family)`; at its end no load runs and no lease is open."""
    made: list[Stand] = []
    names = itertools.count()

    def make(family: str = "llama") -> Stand:
        model = tiny(family).model
        nbytes = model.spec.blocks.nbytes
        slab = Slab.create(tmp_path / f"{next(names)}.kvslab", 64 * nbytes)
        reading = Reading(len(model.spec.layers))
        monkeypatch.setattr(engine.prefix, "read_layer_run", reading)
        made.append(Stand(model, PrefixCache(model.spec, SlotBooks(64, nbytes), slab, "test"), reading))
        return made[-1]

    yield make
    for one in made:
        one.reading.open()
        one.join()
        stats = one.cache.tier.stats()
        assert (stats.read_leases, stats.pinned, stats.writing) == (0, 0, 0)
        one.cache.tier.check()
        one.cache.slab.unlink()
        one.cache.slab.close()


def assert_same(mine: PrefillDone, others: PrefillDone) -> None:
    """Same bits of KV and of kept queries, same survivors, same first token."""
    a, b = mine.job.workspace, others.job.workspace
    assert mine.job.cached == others.job.cached
    assert all(torch.equal(x, y) for x, y in zip(a.keys + a.values, b.keys + b.values, strict=True))
    assert a.watches.keys() == b.watches.keys()
    for cache, watch in a.watches.items():
        window = watch._last.shape[3]
        assert torch.equal(watch.last(window), b.watches[cache].last(window))  # type: ignore[arg-type]
    kept = [{k: v.tolist() for k, v in done.layout.meta.positions.items()} for done in (mine, others)]
    assert kept[0] == kept[1]
    assert [first.token_id for first in mine.first] == [first.token_id for first in others.first]  # type: ignore[union-attr]


@pytest.mark.parametrize("recipe", [FULL, snapkv(30)], ids=["full", "snapkv"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma4", "gpt_oss"])
def test_computing_behind_each_layer_as_it_lands_gives_the_same_bits(stand, family, recipe) -> None:
    s, wanted = stand(family), request("a", tokens_of(100), recipe)
    s.store(wanted)
    job, _ = s.begin(wanted)
    cached = 96 if recipe is FULL else 80
    assert job.cached == cached and s.cache.counters.tokens_found == 0, "nothing is found before it is here"
    s.lockstep(job.workspace)
    (done,) = run_to_end(s.engine)
    s.join()
    assert s.reading.read == [(layer, cached // BLOCK) for layer in range(len(s.model.spec.layers))]
    assert s.cache.counters.tokens_found == cached
    assert_same(done, s.load_then_compute(wanted))


@pytest.mark.parametrize("recipe", [FULL, snapkv(30)], ids=["full", "snapkv"])
@pytest.mark.parametrize("block", [0, 2, 4])
@pytest.mark.parametrize(("family", "layer"), [*[("gemma3", i) for i in (0, 1, 3)], ("gemma4", 2)])
def test_a_layer_that_arrives_corrupt_shortens_the_beginning_and_the_rest_of_it_is_used(
    stand, family, layer, block, recipe
) -> None:
    s, wanted = stand(family), request("a", tokens_of(100), recipe)
    s.store(wanted)
    s.damage(wanted.prompt, block, layer)
    job, _ = s.begin(wanted)
    s.lockstep(job.workspace)
    (done,) = run_to_end(s.engine)
    s.join()
    assert done.job.cached == block * BLOCK == s.cache.counters.tokens_found
    assert s.cache.counters.blocks_corrupt == 1
    behind = [(i, block) for i in range(layer + 1, len(s.model.spec.layers))] if block else []
    assert s.reading.read[layer + 1 :] == behind, "the rest is still loaded"
    s.engine.check()
    assert_same(done, s.load_then_compute(wanted))
    assert s.cache.counters.blocks_corrupt == 1, "it was dropped"


@pytest.mark.parametrize("block", [0, 3])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_prompt_whose_load_fails_costs_those_of_its_step_nothing(stand, block, layer) -> None:
    s = stand("gemma3")
    failing, sound, cold = (
        request("a", tokens_of(100)),
        request("b", tokens_of(70, 1)),
        request("c", tokens_of(40, 2)),
    )
    s.store(failing)
    s.store(sound)
    s.damage(failing.prompt, block, layer)
    jobs = [s.begin(failing)[0], s.begin(sound)[0]]
    s.engine.add(PrefillJob(cold, s.engine.open_workspace(cold)))
    for job in jobs:
        s.lockstep(job.workspace)
    first = {done.job.request.request_id: done for done in s.engine.step()}
    assert first.keys() == {"b", "c"}, "they end with the step that the other one loses"
    s.engine.check()
    (again,) = run_to_end(s.engine)
    s.join()
    assert (again.job.cached, first["b"].job.cached) == (block * BLOCK, 64)
    assert s.cache.counters.tokens_found == block * BLOCK + 64
    assert_same(first["c"], s.cold(cold))
    assert_same(first["b"], s.load_then_compute(sound))
    assert_same(again, s.load_then_compute(failing))


def test_a_load_that_is_late_is_given_up_and_computed_when_it_writes_no_more(stand, monkeypatch) -> None:
    monkeypatch.setattr(engine.arrival, "LEAST_PATIENCE_S", 0.05)
    s, wanted, other = stand("gemma3"), request("a", tokens_of(100)), request("b", tokens_of(40, 1))
    s.store(wanted)
    s.engine._pace.note([(0, 1000)], 1e-6)  # computing costs nothing, so nobody waits for long
    s.reading.gates[0].set()
    job, _ = s.begin(wanted)
    assert s.engine.step() == [] and job.workspace.short
    assert s.reading.at[1].is_set()
    s.engine.add(PrefillJob(other, s.engine.open_workspace(other)))
    (done,) = s.engine.step()
    assert done.job.request.request_id == "b", "the engine goes on"
    assert s.engine.step() == [] and job.workspace.filled == 96, (
        "nothing is computed where the loader may write"
    )
    s.engine.check()
    s.reading.open()
    (late,) = run_to_end(s.engine)
    s.join()
    assert late.job.cached == 0
    assert (s.cache.counters.loads_late, s.cache.counters.tokens_found) == (1, 0)
    assert [layer for layer, _ in s.reading.read] == [0, 1], "what nobody waits for is not read"
    assert_same(late, s.cold(wanted))


def test_leaving_wakes_a_step_that_waits_and_stops_the_loader_after_its_layer(stand) -> None:
    s, wanted = stand("gemma3"), request("a", tokens_of(100))
    s.store(wanted)
    s.reading.gates[0].set()
    job, load = s.begin(wanted)
    results: list[Any] = []
    step = threading.Thread(target=lambda: results.append(s.engine.step()))
    step.start()
    assert s.reading.at[1].wait(WAIT_S)
    s.engine.abort(*job.key)
    load.stop()
    step.join(WAIT_S)
    assert not step.is_alive() and results == [[]]
    assert s.threads[0].is_alive(), "it is at its layer"
    assert s.cache.tier.stats().read_leases == 1
    s.reading.open()
    s.join()
    assert [layer for layer, _ in s.reading.read] == [0, 1]
    assert s.engine.step() == [] and s.engine.queued == 0
    assert (s.cache.counters.tokens_found, s.cache.counters.loads_late) == (0, 0)


def test_leaving_before_anything_is_known_copies_nothing(stand) -> None:
    s, wanted = stand(), request("a", tokens_of(100))
    s.store(wanted)
    s.reading.open()
    space = s.engine.open_workspace(wanted)
    load = PrefixLoad(s.cache, wanted, space, 99, 1.0)
    load.stop()
    load.run(lambda: pytest.fail("nobody may be told"))
    assert s.reading.read == [] and space.filled == 0
    assert s.cache.tier.stats().read_leases == 0


def test_a_loader_that_dies_leaves_everything_to_be_computed(stand) -> None:
    s, wanted = stand("gemma3"), request("a", tokens_of(100))
    s.store(wanted)
    s.reading.fails_at = 2
    job, _ = s.begin(wanted)
    s.lockstep(job.workspace)
    (done,) = run_to_end(s.engine)
    s.join()
    assert isinstance(s.errors[0], OSError)
    assert done.job.cached == 0 == s.cache.counters.tokens_found
    assert_same(done, s.cold(wanted))


def test_an_arrival_never_grows_and_ends_as_it_is() -> None:
    arrival = Arrival(5, 2)
    arrival.landed(0, 3)
    assert arrival.wait(0, 3) and not arrival.wait(0, 5)
    arrival.landed(1, 3)
    assert arrival.complete
    arrival.stop()
    arrival.end()
    assert (arrival.blocks, arrival.complete, arrival.ended, arrival.late) == (3, True, True, False)
    broken = Arrival(5, 2)
    broken.landed(0, 5)
    broken.end()
    assert not broken.complete and not broken.wait(1, 1)


def test_what_computing_costs_is_learned_from_steps() -> None:
    pace = PrefillPace()
    assert pace.seconds_for(0, 7000) > 1, "unmeasured, loading is worth while"

    def cost(start: int, stop: int) -> float:
        return 2e-4 * (stop - start) + 3e-8 * (stop * stop - start * start) / 2

    for start in range(0, 8192, 1024):
        pace.note([(start, 1024)], cost(start, start + 1024))
    assert pace.seconds_for(1000, 7000) == pytest.approx(cost(1000, 7000), rel=1e-3)
    for _ in range(200):
        pace.note([(6992, 32)], 10 * cost(6992, 7024))
    assert pace.seconds_for(0, 7000) == pytest.approx(cost(0, 7000), rel=0.5), "tiny steps outweigh nothing"
    for _ in range(400):
        pace.note([(0, 1024)], 2 * cost(0, 1024))
        pace.note([(4096, 1024)], 2 * cost(4096, 5120))
    assert pace.seconds_for(0, 7000) == pytest.approx(2 * cost(0, 7000), rel=0.05), (
        "a slower machine is noticed"
    )


@pytest.mark.parametrize("steps", [[(0, 100)], [(0, 100), (0, 100)], [(500, 10), (0, 100)]])
def test_an_estimate_is_never_negative(steps) -> None:
    pace = PrefillPace()
    for start, count in steps:
        pace.note([(start, count)], 0.5 / count)
    assert 0 <= pace.seconds_for(0, 100) <= pace.seconds_for(0, 1000)


def test_the_store_hears_what_computing_would_cost_and_whose_the_blocks_are(stand, monkeypatch) -> None:
    s, heard = stand(), []
    tier = s.cache.tier

    class Listening:
        def __getattr__(self, name: str) -> Any:
            return getattr(tier, name)

        def prepare_read(self, keys: Any, owner: str, **more: Any) -> Any:
            heard.append(more)
            return tier.prepare_read(keys, owner)

        def prepare_write(self, keys: Any, owner: str, **more: Any) -> Any:
            heard.append(more)
            return tier.prepare_write(keys, owner)

    s.cache.tier = Listening()
    s.reading.open()
    local = local_engine(s.model, prefix=s.cache)
    local.generate([request("a", tokens_of(100), tenant="x")])
    s.cache.tier = tier
    assert heard == [{"worth_s": pytest.approx(0.099)}, {"tenant": "x"}]
    assert 0 < local.prefill.seconds_for(0, 99) < 0.099 * 100


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_head_that_keeps_no_token_at_all_answers(family) -> None:
    recipe = make_recipe(policy="knorm", budget=2, sinks=0, heads="ada", alpha=0.0, decode="grow")
    model = tiny(family).model
    engine = PrefillEngine(model, chunk_tokens=256)
    wanted = request("a", tokens_of(60), recipe, max_tokens=12)
    engine.add(PrefillJob(wanted, engine.open_workspace(wanted)))
    (done,) = run_to_end(engine)
    assert min(count for row in done.report.counts for count in row) == 0, "the case is not the one meant"
    (tokens,) = local_engine(model).generate([wanted])["a"].tokens
    assert len(tokens) == 12
