"""Prefix reuse behind the reply: later prompts find whole blocks, and failures of the tier cost nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from service_stand import (
    FULL,
    SNAPKV,
    LockedTier,
    Stand,
    ask,
    expected,
    model,
    prefix_cache,
    prompt_of,
    stand,
)

from deployments.forecast import prefill_bytes
from deployments.reply import PrefillReply
from engine.request import GenerationRequest
from engine.snapshot import parse_snapshot
from kv_tiers.block import BlockFault, open_block, read_layer_run
from kv_tiers.keys import BlockKey
from kv_tiers.tier import ReadLease, UnknownLease, WriteLease
from policies.recipe import make_recipe


async def test_a_second_request_over_the_same_prompt_reports_what_it_found(tmp_path):
    prefix = prefix_cache(tmp_path)
    request = ask("first", 100)
    async with stand(prefix=prefix) as s:
        first = await s.run(request)
        await s.at_rest()
        second = await s.run(replace(request, request_id="second"))
        other = await s.run(replace(request, request_id="other", tenant="somebody"))
        whole = await s.run(replace(request, request_id="whole", recipe=FULL))
    assert first.prompt.cached_tokens == 0
    assert second.prompt.cached_tokens == 80, "5 blocks of 16, the last 8 tokens are scored with"
    assert other.prompt.cached_tokens == 0
    assert whole.prompt.cached_tokens == 96
    assert first.tokens == second.tokens == other.tokens == expected(request).tokens
    assert whole.tokens == expected(replace(request, recipe=FULL)).tokens
    prefix.tier.inner.check()


@pytest.mark.parametrize("tokens", [15, 16, 17, 32, 48])
async def test_a_prompt_cached_whole_computes_its_last_token(tmp_path, tokens):
    prefix = prefix_cache(tmp_path)
    request = ask("first", tokens, recipe=FULL)
    async with stand(prefix=prefix) as s:
        first = await s.run(request)
        await s.at_rest()
        again = await s.run(replace(request, request_id="again"))
    assert again.tokens == first.tokens == expected(request).tokens
    assert again.prompt.cached_tokens == (tokens - 1) // 16 * 16
    assert prefix.tier.inner.stats().visible == tokens // 16


class PausedTier(LockedTier):
    """Stops a spill between its first and second phase, with all blocks written or none."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.go = threading.Event()
        self.arrived = threading.Event()
        self.leases: list[WriteLease] = []

    def prepare_write(self, keys: Sequence[BlockKey], owner: str, **more: Any) -> WriteLease:
        lease = super().prepare_write(keys, owner, **more)
        self.leases.append(lease)
        return lease

    def complete_write(self, lease_id: int, written: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        self.arrived.set()
        self.go.wait(10)
        return super().complete_write(lease_id, written)


async def test_the_reply_does_not_wait_for_the_spill_which_holds_its_workspace_and_shows_nothing(tmp_path):
    prefix = prefix_cache(tmp_path, PausedTier)
    tier = prefix.tier
    request = ask("first", 100)
    need = prefill_bytes(model().spec, request)
    async with stand(prefix=prefix, workspace_bytes=need) as s:
        done = await s.run(request)
        assert done.tokens == expected(request).tokens
        await s.until(tier.arrived.is_set)
        assert s.prefill.stats()["spills_running"] == 1
        assert s.prefill.stats()["workspace_bytes"] == need
        assert tier.inner.longest_run(prefix.keys(request.prompt, None)) == 0, "visible before it is complete"
        # Another prompt finds no room for its workspace until the spill is done.
        waiting = asyncio.create_task(s.run(replace(request, request_id="second")))
        await asyncio.sleep(0.05)
        assert s.prefill.engine.queued == 0 and s.prefill.stats()["queue"] == 1
        tier.go.set()
        assert (await waiting).prompt.cached_tokens == 80


async def test_what_becomes_visible_is_whole_and_what_was_computed(tmp_path):
    prefix = prefix_cache(tmp_path, VerifyingTier)
    prefix.tier.prefix = prefix
    requests = [ask(f"r{i}", 64 + i, seed=i % 5, recipe=FULL, max_tokens=2) for i in range(20)]
    async with stand(prefix=prefix) as s:
        await asyncio.gather(*(s.run(request) for request in requests))
        await s.at_rest()
        cold = {request.request_id: expected(request).tokens for request in requests}
        warm = await asyncio.gather(*(s.run(replace(r, request_id=f"w{r.request_id}")) for r in requests))
    assert [done.tokens for done in warm] == [cold[request.request_id] for request in requests]
    assert all(done.prompt.cached_tokens >= 48 for done in warm)
    assert prefix.tier.verified >= 20 and prefix.counters.blocks_corrupt == 0


class VerifyingTier(LockedTier):
    """Opens every block when it becomes visible."""

    prefix = None
    verified = 0

    def prepare_write(self, keys: Sequence[BlockKey], owner: str, **more: Any) -> WriteLease:
        lease = super().prepare_write(keys, owner, **more)
        self.open = {**getattr(self, "open", {}), lease.id: lease}
        return lease

    def complete_write(self, lease_id: int, written: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        spec = model().spec
        for entry in self.open[lease_id].entries:
            if entry.key in written:
                view = self.prefix.slab.view(entry.offset, spec.blocks.nbytes)
                assert not isinstance(open_block(view, spec.blocks, spec.fingerprint, entry.key), BlockFault)
                self.verified += 1
        return super().complete_write(lease_id, written)


class BrokenTier(LockedTier):
    """Fails where it is told to."""

    fails = ""

    def _maybe(self, call: str) -> None:
        if self.fails == call:
            raise {"complete_write": UnknownLease(1), "prepare_write": OSError("gone")}.get(
                call, RuntimeError(call)
            )

    def prepare_write(self, keys: Sequence[BlockKey], owner: str, **more: Any) -> WriteLease:
        self._maybe("prepare_write")
        return super().prepare_write(keys, owner, **more)

    def complete_write(self, lease_id: int, written: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        self._maybe("complete_write")
        return super().complete_write(lease_id, written)

    def prepare_read(self, keys: Sequence[BlockKey], owner: str, **more: Any) -> ReadLease:
        if self.fails == "prepare_read":
            raise OSError("gone")
        return super().prepare_read(keys, owner, **more)

    def complete_read(self, lease_id: int) -> None:
        super().complete_read(lease_id)
        if self.fails == "complete_read":
            raise UnknownLease(lease_id)


@pytest.mark.parametrize("call", ["prepare_write", "complete_write", "prepare_read", "complete_read"])
async def test_a_tier_that_fails_fails_no_request(tmp_path, call):
    prefix = prefix_cache(tmp_path, BrokenTier)
    async with stand(prefix=prefix) as s:
        await s.run(ask("before"))
        await s.at_rest()
        prefix.tier.fails = call
        found = await s.run(ask("during"))
        await s.at_rest()
        assert found.tokens == expected(ask()).tokens
        # A lease that was reclaimed during the read is no loss: what was copied was verified.
        assert (found.prompt.cached_tokens == 0) == (call == "prepare_read")
        assert (await s.run(ask("new", seed=3))).tokens == expected(ask(seed=3)).tokens


async def test_a_corrupt_block_is_recomputed_and_counted(tmp_path):
    prefix = prefix_cache(tmp_path)
    request = ask("first", 100)
    async with stand(prefix=prefix) as s:
        await s.run(request)
        await s.at_rest()
        lease = prefix.tier.prepare_read(prefix.keys(request.prompt, None)[:3], "test")
        prefix.tier.complete_read(lease.id)
        prefix.slab.view(lease.entries[2].offset, model().spec.blocks.nbytes)[-5] ^= 0xFF
        again = await s.run(replace(request, request_id="again"))
        assert again.prompt.cached_tokens == 32
        assert again.tokens == expected(request).tokens
        assert s.prefill.stats()["prefix_blocks_corrupt"] == 1


class SlowTier(LockedTier):
    """Reads wait."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.go = threading.Event()
        self.reading = threading.Event()

    def prepare_read(self, keys: Sequence[BlockKey], owner: str, **more: Any) -> ReadLease:
        self.reading.set()
        self.go.wait(0.3)
        return super().prepare_read(keys, owner, **more)


@pytest.mark.parametrize("times", [1, 2])
async def test_leaving_while_blocks_are_loaded_leaves_no_pin_and_no_workspace(tmp_path, times):
    prefix = prefix_cache(tmp_path, SlowTier)
    async with stand(prefix=prefix) as s:
        run = asyncio.create_task(s.run(ask()))
        await s.until(prefix.tier.reading.is_set)
        for _ in range(times):
            run.cancel()
            await asyncio.sleep(0.01)
        assert s.prefill.stats()["workspace_bytes"] > 0, "the thread may still write to it"
        prefix.tier.go.set()
        with pytest.raises(asyncio.CancelledError):
            await run
        await s.at_rest()
        stats = prefix.tier.inner.stats()
        assert stats.read_leases == stats.write_leases == stats.pinned == 0


class Gate:
    """Wraps the reading of layers: the last layer is read when `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.reached = threading.Event(), threading.Event()
        self.layers: list[int] = []
        monkeypatch.setattr("engine.prefix.read_layer_run", self)

    def __call__(self, bufs: Any, layout: Any, headers: Any, layer: int, keys: Any, values: Any) -> int:
        if layer == len(layout.layers) - 1:
            self.reached.set()
            self.go.wait(10)
        self.layers.append(layer)
        return read_layer_run(bufs, layout, headers, layer, keys, values)


async def test_the_engine_has_a_prompt_before_its_blocks_are_all_in(tmp_path, monkeypatch):
    prefix, gate = prefix_cache(tmp_path), Gate(monkeypatch)
    async with stand(prefix=prefix) as s:
        await s.run(ask("first", 100))
        await s.at_rest()
        run = asyncio.create_task(s.run(ask("second", 100)))
        await s.until(gate.reached.is_set)
        await s.until(lambda: s.prefill.engine.queued == 1)
        assert s.prefill.stats()["prefix_tokens_found"] == 0
        gate.go.set()
        done = await run
        assert s.prefill.stats()["prefix_tokens_found"] == done.prompt.cached_tokens == 80
    assert done.tokens == expected(ask("first", 100)).tokens


@pytest.mark.parametrize("times", [1, 2])
async def test_leaving_while_layers_arrive_waits_until_nobody_writes_and_ends_the_lease(
    tmp_path, monkeypatch, times
):
    prefix, gate = prefix_cache(tmp_path), Gate(monkeypatch)
    async with stand(prefix=prefix) as s:
        await s.run(ask("first", 100))
        await s.at_rest()
        run = asyncio.create_task(s.run(ask("second", 100)))
        await s.until(lambda: gate.reached.is_set() and s.prefill.engine.queued == 1)
        for _ in range(times):
            run.cancel()
            await asyncio.sleep(0.01)
        await s.until(lambda: s.prefill.engine.queued == 0)
        assert not run.done() and s.prefill.stats()["workspace_bytes"] > 0, "the thread still writes to it"
        gate.go.set()
        with pytest.raises(asyncio.CancelledError):
            await run
        await s.at_rest()
        stats = prefix.tier.inner.stats()
        assert stats.read_leases == stats.pinned == s.prefill.stats()["prefix_tokens_found"] == 0


class HeldLease(LockedTier):
    """Ends no read before it is told to; notes the order of calls."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.go = threading.Event()
        self.go.set()
        self.calls: list[str] = []

    def complete_read(self, lease_id: int) -> None:
        self.go.wait(10)
        self.calls.append("complete_read")
        super().complete_read(lease_id)

    def prepare_write(self, keys: Sequence[BlockKey], owner: str, **more: Any) -> WriteLease:
        self.calls.append("prepare_write")
        return super().prepare_write(keys, owner, **more)


async def test_the_reply_waits_for_no_lease_and_the_spill_for_the_whole_load(tmp_path):
    """O-7: nothing is written down before it is there."""
    prefix = prefix_cache(tmp_path, HeldLease)
    tier = prefix.tier
    async with stand(prefix=prefix) as s:
        await s.run(ask("first", 100))
        await s.at_rest()
        tier.calls.clear()
        tier.go.clear()
        assert (await s.run(ask("second", 100))).prompt.cached_tokens == 80
        assert s.prefill.stats()["spills_running"] == 1 and tier.calls == []
        tier.go.set()
        await s.at_rest()
    assert tier.calls == ["complete_read", "prepare_write"]


async def test_leaving_with_the_first_tokens_still_keeps_the_blocks(tmp_path):
    prefix = prefix_cache(tmp_path)
    async with stand(prefix=prefix) as s:
        stream = s.decode.generate(ask("gone", 100, max_tokens=500))
        await anext(stream)
        await stream.aclose()
        await s.at_rest()
        assert (await s.run(ask("next", 100))).prompt.cached_tokens == 80


Kept = dict[tuple[int, int], list[int]]


def note_kept(s: Stand) -> dict[str, Kept]:
    """By request id, filled as prompts are done: the positions that are shipped of every layer and head."""
    shipped: dict[str, Kept] = {}

    async def note(request: GenerationRequest, reply: PrefillReply) -> None:
        assert reply.snapshot is not None
        meta = parse_snapshot(model().spec, torch.from_numpy(reply.snapshot.payload.copy())).meta
        shipped[request.request_id] = {place: kept.tolist() for place, kept in meta.positions.items()}

    s.client.after = note
    return shipped


@pytest.mark.parametrize(
    ("recipe", "reused"),
    [
        (SNAPKV, 160),
        (make_recipe(policy="keydiff", budget=24), 160),
        (make_recipe(policy="h2o", budget=24, recent=8), 0),
    ],
    ids=["snapkv", "keydiff", "h2o, which must meet every query"],
)
async def test_a_second_question_over_a_document_selects_anew_and_equals_its_cold_answer(
    tmp_path, recipe, reused
):
    """O-29: survivors chosen for one question are never the start of another; questions branch off at any point."""
    document, questions = prompt_of(165), [prompt_of(20 + i, seed=i) for i in (1, 2, 3, 4)]

    def asked(name: str, *parts: tuple[int, ...]) -> GenerationRequest:
        return replace(ask(name, recipe=recipe), prompt=sum((document, *parts), ()))

    async with stand(prefix=prefix_cache(tmp_path), by_reply=True) as s:
        shipped = note_kept(s)
        first = asked("first", questions[0])
        answer = (await s.run(first)).tokens[0]
        await s.at_rest()
        # Two other questions over the document at once, then two over the document, its question and its answer.
        warm = [asked("second", questions[1]), asked("branch", questions[2])]
        later = [asked(f"turn {i}", questions[0], tuple(answer), questions[i]) for i in (1, 3)]
        done = [*await asyncio.gather(*map(s.run, warm)), *[await s.run(request) for request in later]]
        again = await s.run(replace(first, request_id="again"))
    async with stand(by_reply=True) as s:
        cold = note_kept(s)
        for request, found in zip([*warm, *later, first], [*done, again], strict=True):
            assert found.tokens == (await s.run(request)).tokens == expected(request).tokens
            assert shipped[request.request_id] == cold[request.request_id]
    assert [found.prompt.cached_tokens for found in done[:2]] == [reused, reused]
    assert all(found.prompt.cached_tokens >= reused for found in [*done, again])
    assert shipped["again"] == shipped["first"]
    assert all(shipped[request.request_id] != shipped["first"] for request in (*warm, *later))
