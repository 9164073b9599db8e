"""A recalled prompt has the KV of a cold one, bit by bit, in what comes back and in what is computed behind it.

Whatever tier it came from, however much of it, whether before the computation or beside it, and whoever shared the
steps. So the next token is the same too, however nearly two are tied.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import golden_engine as ge
import pytest
import torch
from agent_stand import Cluster, until
from redis_server import shared_server
from tiny_models import build_network, one_thread, request, tiny, tokens_of  # noqa: F401

from deployments import node as node_module
from deployments import node_tiers
from deployments.config import AppArgs
from deployments.node_options import NodeOptions
from engine import model as model_module
from engine.model import Model, wrap_model
from engine.prefill import PrefillDone, PrefillEngine, PrefillJob, run_to_end
from engine.prefix import PrefixCache, PrefixLoad
from engine.request import GenerationRequest
from engine.workspace import Workspace

TIERS = ("cpu", "nvme", "redis")
WORTH_S = 1000.0  # computing is slow: whatever is known is worth its load
GARBAGE = 0x5A


@dataclass
class Node:
    """A running agent with all three tiers, and a replica on it; `written`: every block as it first lay in the slab."""

    agent: object
    cache: PrefixCache
    engine: PrefillEngine
    prompt: tuple[int, ...]
    written: dict[object, bytes]

    @property
    def store(self):
        return self.agent.target._store

    @property
    def keys(self):
        return self.cache.keys(self.prompt, None)

    def in_slab(self) -> dict[object, bytes]:
        """The blocks of the prompt that lie in the slab now."""
        books, nbytes = self.store._books, self.cache.spec.blocks.nbytes
        held = [key for key in self.keys if books.holds(key)]
        return {key: bytes(self.agent.target._slab.view(books.offset_of(key), nbytes)) for key in held}

    async def only_in(self, tier: str, blocks: int | None = None) -> None:
        """Take the prompt out of all other tiers and, from a block on, out of this one; the slab holds garbage then."""
        for other in self.store.lower:
            if other.name != tier:
                await other.drop(self.keys)
        if tier != "cpu":
            self.store._books.clear()
            free = self.store._books.reserve(
                [tokens_key(at) for at in range(self.store._books.slots)], "test"
            )
            for entry in free.entries:
                nbytes = self.cache.spec.blocks.nbytes
                self.agent.target._slab.view(entry.offset, nbytes)[:] = bytes([GARBAGE]) * nbytes
            self.store._books.complete_write(free.id, [])
        if blocks is not None:
            gone = self.keys[blocks:]
            self.store._books.drop(gone)
            for other in self.store.lower:
                await other.drop(gone)


def tokens_key(number: int):
    return node_module.BlockKey(number.to_bytes(32, "big"))


@pytest.fixture
async def cluster(tmp_path, monkeypatch):
    monkeypatch.setattr(node_module, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(node_tiers, "RETRY_S", 0.05)
    with shared_server().client() as client:
        client.flushall()
    made = Cluster(tmp_path)
    await made.start_directory()
    yield made
    for actor in made.agents:
        await actor.target._store.settle()
        await actor.target._store.write_down()
        actor.target._store.check()
        await made.kill(actor)


async def node(cluster: Cluster, model: Model, prompt: Sequence[int]) -> tuple[Node, PrefillDone]:
    """The prompt's blocks are in all three tiers; → that, and the cold prefill."""
    args = AppArgs(
        admission="always", tier_policy="lru", cpu_tier_gib=1, nvme_tier_gib=1, redis_url=shared_server().url
    )
    options = NodeOptions.of("app", args, model.spec.blocks)
    fields = {**vars(options), "cpu_bytes": 80 * options.slot_bytes, "nvme_bytes": 90 * options.slot_bytes}
    del fields["cpu_folder"], fields["nvme_folder"]
    agent = await cluster.start("node-a", **fields)
    await until(lambda: [tier.name for tier in agent.target._store.lower] == ["nvme", "redis"])
    await until(lambda: not any(tier.left_alone for tier in agent.target._store.lower))
    tier = await cluster.replica("prefill", agent)
    made = Node(
        agent, PrefixCache(model.spec, tier, tier, "prefill"), PrefillEngine(model), tuple(prompt), {}
    )
    wanted = request("cold", prompt)
    made.engine.add(PrefillJob(wanted, made.engine.open_workspace(wanted)))
    (cold,) = await asyncio.to_thread(lambda: list(run_to_end(made.engine)))
    await asyncio.to_thread(made.cache.store, cold.job.workspace, made.keys)
    made.written |= made.in_slab()
    assert len(made.written) == len(made.keys) == len(prompt) // 16
    await agent.target.write_down()
    assert all(map(all, (await agent.target.where(made.keys)).values()))
    return made, cold


def recall(node: Node, beside: bool, others: Sequence[GenerationRequest] = ()) -> PrefillDone:
    """The prompt again, loaded first or layer by layer beside its computation; `others` share the steps."""
    wanted = request("again", node.prompt)
    space = node.engine.open_workspace(wanted)
    scribble(space)
    limit = len(wanted.prompt) - node.engine.must_compute(wanted)
    opened = threading.Event()
    load = PrefixLoad(node.cache, wanted, space, limit, WORTH_S)
    thread = threading.Thread(target=load.run, args=(opened.set,))
    thread.start()
    if not beside:
        thread.join(20)
    assert opened.wait(20)
    for other in others:
        node.engine.add(PrefillJob(other, node.engine.open_workspace(other)))
    node.engine.add(PrefillJob(wanted, space, space.filled))
    found = {done.job.request.request_id: done for done in run_to_end(node.engine)}
    thread.join(20)
    assert not thread.is_alive()
    return found["again"]


def scribble(space: Workspace) -> None:
    """Fresh memory is zeros as a rule, which hides who reads what was never written."""
    for rows in (*space.keys, *space.values):
        rows.fill_(float("nan"))


def assert_same_bits(found: Workspace, wanted: Workspace) -> None:
    for mine, other in zip(found.keys + found.values, wanted.keys + wanted.values, strict=True):
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))


async def assert_recalls(node: Node, cold: PrefillDone, tier: str, blocks: int | None) -> None:
    """Both ways of loading, alone and with others in their steps."""
    space = cold.job.workspace
    cached = 16 * (len(node.keys) if blocks is None else blocks)
    cached = min(cached, (len(node.prompt) - 1) // 16 * 16)
    others = [request(f"other {at}", node.prompt[at : at + size]) for at, size in enumerate((3, 41, 90))]
    for beside, company in ((True, ()), (False, ()), (True, others)):
        await node.only_in(tier, blocks)
        found = await asyncio.to_thread(recall, node, beside, company)
        assert found.job.cached == cached, "from there, and no further"
        again = node.in_slab()
        assert again and all(again[key] == node.written[key] for key in again), "the block, header and all"
        assert_same_bits(found.job.workspace, space)
    if tier != "cpu":
        assert node.store.stats().sources[tier].hits >= 3 * cached // 16


@pytest.mark.parametrize("tier", TIERS)
async def test_a_recall_brings_back_the_bits_that_were_written(cluster, tier):
    made, cold = await node(cluster, tiny("llama").model, tokens_of(600))
    await assert_recalls(made, cold, tier, None)
    await assert_recalls(made, cold, tier, 21)


async def test_a_block_that_rots_in_a_tier_ends_what_comes_and_the_rest_is_as_written(cluster):
    """Found while the piece is read from the disk."""
    made, cold = await node(cluster, tiny("llama").model, tokens_of(600))
    await made.only_in("nvme")
    file = next(cluster.folder.glob("*.kvnvme"))
    place = file.read_bytes().index(made.written[made.keys[30]]) + made.cache.spec.blocks.header_bytes + 7
    with file.open("r+b") as slots:
        slots.seek(place)
        byte = slots.read(1)[0]
        slots.seek(place)
        slots.write(bytes([byte ^ 1]))
    found = await asyncio.to_thread(recall, made, True)
    assert found.job.cached == 30 * 16
    assert_same_bits(found.job.workspace, cold.job.workspace)


@pytest.mark.parametrize(("tier", "blocks"), [("nvme", None), ("redis", 15)])
async def test_real_weights_in_bfloat16_come_back_as_they_were(cluster, smollm2_path, tier, blocks):
    made, cold = await node(cluster, ge.model(smollm2_path, "bfloat16"), ge.prompt(4)[:330])
    await assert_recalls(made, cold, tier, blocks)


def wide_model() -> Model:
    """A bf16 model as on a processor without bf16 products."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_module, "has_bf16_products", lambda: False)
        return wrap_model(build_network("llama").to(torch.bfloat16), frozenset({1}))


@pytest.fixture(params=["plain", "wide"])
def bf16_model(request: pytest.FixtureRequest) -> Iterator[Model]:
    if request.param == "wide":
        yield wide_model()
    else:
        yield wrap_model(build_network("llama").to(torch.bfloat16), frozenset({1}))


@pytest.mark.parametrize("rest", [1, 7, 30, 63, 64, 100])
def test_who_shares_the_steps_of_a_short_rest_changes_none_of_its_bits(bf16_model, rest):
    """Also where bf16 products are computed in fp32: whether they are must not depend on the others."""
    engine = PrefillEngine(bf16_model)
    prompt = tokens_of(320 + rest)

    def behind(others: Sequence[int]) -> Workspace:
        wanted = request("a", prompt)
        space = engine.open_workspace(wanted)
        for mine, computed in zip(space.keys + space.values, cold.keys + cold.values, strict=True):
            mine[:, :320].copy_(computed[:, :320])
        space.filled = 320
        for at, size in enumerate(others):
            other = request(f"o{at}", tokens_of(size, at + 1))
            engine.add(PrefillJob(other, engine.open_workspace(other)))
        engine.add(PrefillJob(wanted, space, 320))
        list(run_to_end(engine))
        return space

    run: Callable[[GenerationRequest], Workspace] = functools.partial(_computed, engine)
    cold = run(request("cold", prompt))
    for others in ((), (1,), (2, 61), (200,), (5, 333, 80)):
        assert_same_bits(behind(others), cold)


def _computed(engine: PrefillEngine, wanted: GenerationRequest) -> Workspace:
    engine.add(PrefillJob(wanted, engine.open_workspace(wanted)))
    (done,) = run_to_end(engine)
    return done.job.workspace
