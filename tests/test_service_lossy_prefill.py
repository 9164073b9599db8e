"""Lossy blocks that arrive beside the computation: less of them than was found, late, or at several prompts at once."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from service_stand import FULL, SNAPKV, LockedTier, ask, expected, model, prefix_cache, stand

from engine.arrival import Arrival
from engine.workspace import Workspace
from kv_tiers.at_rest import AtRest
from kv_tiers.keys import lossy_key
from kv_tiers.lossy_blocks import decode_blocks, encode_blocks

INT4 = AtRest.INT4
BLOCKS = model().spec.blocks


def keep_lossily(prefix, prompt, first=0, count=None):
    """Put what int4 makes of a prompt's known blocks from `first` on into the slab, and drop those blocks."""
    books, slab = prefix.tier.inner, prefix.slab
    keys = prefix.keys(prompt, None)[first:count]
    names = [lossy_key(key, INT4) for key in keys]
    exact = [slab.view(books.offset_of(key), BLOCKS.nbytes) for key in keys]
    encoded = [bytearray(BLOCKS.kept_as(INT4).nbytes) for _ in keys]
    encode_blocks(exact, encoded, keys, INT4)
    lease = books.reserve(names, "test")
    into = [slab.view(entry.offset, BLOCKS.nbytes) for entry in lease.entries]
    assert all(decode_blocks(encoded, into, names, INT4))
    books.complete_write(lease.id, names)
    books.drop(keys)
    return names


def holds(prefix, prompt):
    return [prefix.tier.inner.holds(key) for key in prefix.keys(prompt, None)]


@pytest.mark.parametrize("recipe", [FULL, SNAPKV], ids=["full", "snapkv"])
async def test_only_the_exact_beginning_of_a_prompt_that_read_lossy_blocks_is_kept(tmp_path, recipe):
    prefix = prefix_cache(tmp_path)
    request = ask("first", 200, recipe=recipe)
    async with stand(prefix=prefix) as s:
        cold = await s.run(request)
        await s.at_rest()
        keep_lossily(prefix, request.prompt, first=4)
        lossy = await s.run(replace(request, request_id="lossy", at_rest=INT4))
        await s.at_rest()
        assert lossy.prompt.cached_tokens - lossy.prompt.lossy_tokens == 64
        assert lossy.prompt.lossy_tokens >= 112
        assert holds(prefix, request.prompt) == [True] * 4 + [False] * 8
        assert s.prefill.stats()["prefix_tokens_lossy"] == lossy.prompt.lossy_tokens
        again = await s.run(replace(request, request_id="again"))
        await s.at_rest()
    assert (again.prompt.cached_tokens, again.prompt.lossy_tokens) == (64, 0)
    assert again.tokens == cold.tokens == expected(request).tokens
    assert all(holds(prefix, request.prompt))


@pytest.mark.parametrize("bad", [4, 7])
async def test_what_a_corrupt_lossy_block_leaves_decides_what_is_exact(tmp_path, bad):
    """Its payload: found by the load, layers into it, while the engine computes behind."""
    prefix = prefix_cache(tmp_path)
    request = ask("first", 200, recipe=FULL)
    async with stand(prefix=prefix) as s:
        await s.run(request)
        await s.at_rest()
        names = keep_lossily(prefix, request.prompt, first=4)
        offset = prefix.tier.inner.offset_of(names[bad - 4])
        prefix.slab.view(offset + BLOCKS.layer_offset(1), 1)[0] ^= 1
        found = await s.run(replace(request, request_id="lossy", at_rest=INT4))
        await s.at_rest()
    assert found.prompt.cached_tokens == 16 * bad
    assert found.prompt.lossy_tokens == 16 * (bad - 4)
    assert holds(prefix, request.prompt) == [True] * 4 + [bad == 4] * 8
    if bad == 4:
        assert found.tokens == expected(request).tokens, "nothing lossy was left"


async def test_prompts_that_share_steps_with_lossy_ones_stay_exact(tmp_path):
    prefix = prefix_cache(tmp_path)
    first, other = ask("first", 200, recipe=FULL), ask("other", 180, seed=3, recipe=FULL)
    async with stand(prefix=prefix) as s:
        await s.run(first)
        await s.at_rest()
        keep_lossily(prefix, first.prompt)
        lossy, exact = await asyncio.gather(
            s.run(replace(first, request_id="lossy", at_rest=INT4)), s.run(other)
        )
        await s.at_rest()
    assert lossy.prompt.lossy_tokens == 192 and exact.prompt.lossy_tokens == 0
    assert exact.tokens == expected(other).tokens
    assert all(holds(prefix, other.prompt)) and not any(holds(prefix, first.prompt))


class ForgetfulTier(LockedTier):
    """Answers the second question of a request with nothing, as an agent that is late does."""

    asked = 0

    def prepare_read(self, keys, owner, **more):
        self.asked += 1
        return super().prepare_read(keys if self.asked % 2 else (), owner, **more)


async def test_who_gets_no_answer_about_lossy_blocks_keeps_the_exact_ones(tmp_path):
    prefix = prefix_cache(tmp_path, ForgetfulTier)
    request = ask("first", 200, recipe=FULL)
    async with stand(prefix=prefix) as s:
        await s.run(request)
        await s.at_rest()
        keep_lossily(prefix, request.prompt, first=4)
        prefix.tier.asked = 0
        found = await s.run(replace(request, request_id="lossy", at_rest=INT4))
        await s.at_rest()
    assert (found.prompt.cached_tokens, found.prompt.lossy_tokens) == (64, 0)
    assert found.tokens == expected(request).tokens and all(holds(prefix, request.prompt))
    assert prefix.tier.inner.stats().read_leases == 0


@pytest.mark.parametrize(("come", "exact"), [(10, 64), (5, 64), (4, 200), (3, 200), (0, 200)])
def test_a_workspace_is_exact_again_when_no_lossy_block_comes(come, exact):
    space = Workspace(model().spec, 200)
    space.arrival, space.filled, space.exact = Arrival(10, 2), 160, 64
    space.arrival.landed(0, come)
    space.arrival.landed(1, come)
    space.arrival.end()
    assert space.settle()
    assert (space.filled, space.exact) == (16 * come, exact)
