"""The NVMe tier over a device that fails, fills up, is slow or hangs: values, never wrong bytes, never a stuck loop."""

from __future__ import annotations

import asyncio
import os

import pytest
from nvme_stand import KEYS, SLOT, Arena, Clock, block_bytes, io_error, nbytes_for, no_space, started

from kv_tiers.nvme import NvmeTier
from kv_tiers.nvme_calls import Deadline
from kv_tiers.nvme_file import NvmeFile
from kv_tiers.nvme_io import Motion
from kv_tiers.tier import Fetched, Stored

HIT, MISS, FAILED = Fetched.HIT, Fetched.MISS, Fetched.FAILED
ARENA = Arena(40)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tier.kvnvme"


async def put(tier, keys):
    return await tier.put(keys, ARENA.filled(keys))


async def get(tier, keys):
    buffers = ARENA.scratch(len(keys))
    answers = await tier.get(keys, buffers)
    for key, buffer, answer in zip(keys, buffers, answers, strict=True):
        assert answer is not HIT or buffer == block_bytes(key)
    return answers


async def test_o25_no_space_once_is_tried_again_in_slots_of_evicted_blocks(path):
    tier, engine = await started(path, 10)
    await put(tier, KEYS[:10])
    refusals = iter([no_space] * 2)
    engine.fault = lambda motion, span: (
        next(refusals, lambda *_: None)(motion, span) if span.offset >= nbytes_for(10) - 10 * SLOT else None
    )
    assert await put(tier, KEYS[10:14]) == [Stored.STORED] * 4
    assert await get(tier, KEYS[10:14]) == [HIT] * 4
    assert tier.stats().blocks_evicted == 6 and tier.faults.write_errors == 2
    tier.check()
    await tier.close()


async def test_o25_no_space_for_good_stops_writing_while_reads_go_on_until_space_returns(path):
    clock = Clock()
    tier, engine = await started(path, 20, clock=clock, breaker_pause_s=5.0)
    await put(tier, KEYS[:10])
    engine.fault = no_space
    for start in (10, 12, 14):
        assert await put(tier, KEYS[start : start + 2]) == [Stored.FAILED] * 2
        tier.check()
    survivors = tier.manifest().keys
    runs = len(engine.runs)
    assert await put(tier, KEYS[16:20]) == [Stored.FAILED] * 4
    assert len(engine.runs) == runs and tier.faults.refused == 4 and tier.left_alone
    assert survivors and await get(tier, survivors) == [HIT] * len(survivors)
    del engine.fault
    clock.now += 5.0
    assert await put(tier, KEYS[16:20]) == [Stored.STORED] * 4 and not tier.left_alone
    assert await put(tier, KEYS[20:22]) == [Stored.STORED] * 2
    assert await get(tier, KEYS[16:22]) == [HIT] * 6
    tier.check()
    await tier.close()


async def test_o12_a_failed_read_is_no_hit_and_a_second_one_drops_the_block(path):
    tier, engine = await started(path, 10)
    await put(tier, KEYS[:4])
    bad = nbytes_for(10) - (10 - 2) * SLOT  # slot 2: free slots are given out in order
    engine.fault = lambda motion, span: (
        io_error(motion, span) if motion is Motion.READ and span.offset == bad else None
    )
    assert await get(tier, KEYS[:4]) == [HIT, HIT, FAILED, HIT]
    assert tier.stats().blocks_read == 3 and tier.faults.read_errors == 1
    assert tier.longest_run(KEYS) == 4
    assert await get(tier, KEYS[:4]) == [HIT, HIT, FAILED, HIT]
    assert tier.longest_run(KEYS) == 2
    assert await get(tier, KEYS[:4]) == [HIT, HIT, MISS, HIT]
    tier.check()
    await tier.close()


async def test_one_read_error_among_successes_never_adds_up_to_a_dropped_block(path):
    tier, engine = await started(path, 10)
    await put(tier, KEYS[:2])
    for _ in range(4):
        engine.fault = io_error
        assert await get(tier, KEYS[:1]) == [FAILED]
        del engine.fault
        assert await get(tier, KEYS[:2]) == [HIT, HIT]
    await tier.close()


async def test_repeated_read_errors_are_answered_at_once_then_tried_again(path):
    clock = Clock()
    tier, engine = await started(path, 10, clock=clock, breaker_pause_s=5.0)
    await put(tier, KEYS[:8])
    engine.fault = io_error
    for index in range(3):
        assert await get(tier, [KEYS[index]]) == [FAILED]
    del engine.fault
    runs = len(engine.runs)
    assert await get(tier, [KEYS[5], KEYS[30]]) == [FAILED, MISS]
    assert len(engine.runs) == runs
    clock.now += 5.0
    assert await get(tier, KEYS[:8]) == [HIT] * 8
    await tier.close()


async def test_o13_a_block_that_goes_between_lookup_and_read_is_a_miss_wherever_it_stood(path):
    tier, _ = await started(path, 10)
    for gone in (0, 2, 4):
        await put(tier, KEYS[:5])
        assert tier.longest_run(KEYS) == 5
        await tier.drop([KEYS[gone]])
        assert await get(tier, KEYS[:5]) == [MISS if index == gone else HIT for index in range(5)]
        assert tier.longest_run(KEYS) == gone
    await tier.close()


async def test_an_index_that_cannot_be_written_leaves_no_visible_block_and_none_that_is_torn(path):
    tier, engine = await started(path, 10)
    await put(tier, KEYS[:4])
    data = nbytes_for(10) - 10 * SLOT
    engine.fault = lambda motion, span: io_error(motion, span) if span.offset < data else None
    assert await put(tier, KEYS[4:6]) == [Stored.FAILED] * 2
    tier.check()
    assert tier.longest_run(KEYS) <= 4
    del engine.fault
    assert await put(tier, KEYS[6:8]) == [Stored.STORED] * 2
    kept = set(tier.manifest().keys)
    await tier.close()
    tier, _ = await started(path, 10)
    assert set(tier.manifest().keys) == kept
    assert await get(tier, sorted(kept)) == [HIT] * len(kept)
    await tier.close()


async def test_a_hung_read_keeps_its_buffers_and_nothing_else(path):
    tier, engine = await started(path, 10, deadline=Deadline(0.05))
    await put(tier, KEYS[:4])
    engine.open.clear()
    engine.begun.clear()
    buffers = ARENA.scratch(2)
    hung = [asyncio.create_task(tier.get([KEYS[at]], [buffers[at]])) for at in range(2)]
    hung.append(asyncio.create_task(tier.get([KEYS[2]], [ARENA.buffers[5]])))
    async with asyncio.timeout(10):
        while tier.faults.late < 3:
            await asyncio.sleep(0.01)
    assert not any(task.done() for task in hung)
    # The loop runs, others are answered at once, and the slots cannot change hands.
    assert await tier.get(KEYS[:5], ARENA.buffers[10:15]) == [FAILED] * 4 + [MISS]
    assert tier.stats().pinned == 3
    engine.open.set()
    assert await asyncio.gather(*hung) == [[FAILED]] * 3
    assert all(buffer == b"\xee" * SLOT for buffer in buffers)
    assert tier.stats().pinned == 0 and tier.longest_run(KEYS) == 4
    tier.check()
    await tier.close()


async def test_tries_on_a_device_that_hangs_end_at_their_deadline_and_hold_nothing(path):
    clock = Clock()
    tier, engine = await started(path, 10, clock=clock, deadline=Deadline(0.05), breaker_pause_s=5.0)
    await put(tier, KEYS[:6])
    engine.open.clear()
    hung = [asyncio.create_task(tier.get([KEYS[at]], [ARENA.buffers[at]])) for at in range(4)]
    await asyncio.wait(hung, timeout=0.2)
    assert tier.faults.late == 4, "every thread is in the device"
    for _ in range(3):
        clock.now += 10.0
        buffers = ARENA.scratch(1)
        assert await asyncio.wait_for(tier.get(KEYS[5:6], buffers), 5) == [FAILED]
        assert await asyncio.wait_for(put(tier, KEYS[7:8]), 5) == [Stored.FAILED]
    assert tier.stats().pinned == 4 and tier.stats().free == 4
    engine.open.set()
    assert await asyncio.gather(*hung) == [[FAILED]] * 4
    assert tier.longest_run(KEYS) == 6 and tier.stats().pinned == 0
    clock.now += 10.0
    assert await get(tier, KEYS[:6]) == [HIT] * 6
    tier.check()
    await tier.close()


async def test_a_hung_write_is_failed_and_its_slot_free_only_afterwards(path):
    tier, engine = await started(path, 2, deadline=Deadline(0.05))
    await put(tier, KEYS[:1])
    engine.open.clear()
    hung = asyncio.create_task(put(tier, KEYS[1:3]))
    await asyncio.wait((hung,), timeout=0.2)
    assert not hung.done() and tier.stats().free == 0
    engine.open.set()
    assert await hung == [Stored.FAILED] * 2
    assert tier.stats().free == 2 and tier.faults.late == 1
    assert await put(tier, KEYS[1:3]) == [Stored.STORED] * 2
    tier.check()
    await tier.close()


@pytest.mark.parametrize("call", ["get", "put", "drop", "clear"])
async def test_a_cancelled_call_returns_when_its_io_has_ended_and_leaves_the_tier_whole(path, call):
    tier, engine = await started(path, 10)
    await put(tier, KEYS[:4])
    engine.open.clear()
    engine.begun.clear()
    buffers = ARENA.filled(KEYS[4:8]) if call == "put" else ARENA.scratch(4)
    work = {
        "get": lambda: tier.get(KEYS[:4], buffers),
        "put": lambda: tier.put(KEYS[4:8], buffers),
        "drop": lambda: tier.drop(KEYS[:2]),
        "clear": tier.clear,
    }[call]
    task = asyncio.create_task(work())
    await asyncio.to_thread(engine.begun.wait, 10)
    task.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not task.done()
    engine.open.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    stats = tier.stats()
    assert (stats.read_leases, stats.write_leases, stats.writing, stats.condemned) == (0, 0, 0, 0)
    if call == "get":
        assert all(buffer == b"\xee" * SLOT for buffer in buffers)
    tier.check()
    assert await put(tier, KEYS[:8]) and await get(tier, KEYS[:8]) == [HIT] * 8
    await tier.close()


async def test_a_clear_while_writing_leaves_nothing_visible_also_after_a_restart(path):
    tier, engine = await started(path, 10)
    data = nbytes_for(10) - 10 * SLOT
    reached = []

    def hold_blocks(motion, span):
        if span.offset >= data:
            reached.append(span)
            engine.open.clear()

    engine.fault = hold_blocks
    writing = asyncio.create_task(put(tier, KEYS[:4]))  # stands before it records what it wrote
    while not reached:
        await asyncio.sleep(0.001)
    clearing = asyncio.create_task(tier.clear())
    await asyncio.sleep(0)
    del engine.fault
    engine.open.set()
    assert await writing == [Stored.FAILED] * 4
    await clearing
    assert tier.manifest().keys == () and tier.stats().free == 10
    copy = path.with_name("killed-now.kvnvme")
    copy.write_bytes(path.read_bytes())
    copy.chmod(0o600)
    after, _ = await started(copy, 10)
    assert after.manifest().keys == ()
    await after.close()
    await tier.close()


async def test_close_stops_what_is_under_way_and_answers_afterwards_are_failures(path):
    tier, engine = await started(path, 10)
    await put(tier, KEYS[:4])
    engine.open.clear()
    engine.begun.clear()
    reading = asyncio.create_task(tier.get(KEYS[:4], ARENA.scratch(4)))
    await asyncio.to_thread(engine.begun.wait, 10)
    closing = asyncio.create_task(tier.close())
    await asyncio.sleep(0)
    engine.open.set()
    assert await reading == [FAILED] * 4
    await closing
    assert await get(tier, [KEYS[0], KEYS[9]]) == [FAILED, MISS]
    assert await put(tier, KEYS[8:9]) == [Stored.FAILED]
    again, _ = await started(path, 10)
    assert again.longest_run(KEYS) == 4
    await again.close()


async def test_nixl_gives_way_to_threads_at_its_first_error_and_every_block_has_its_own_answer(path):
    tier = NvmeTier(path, nbytes_for(30), SLOT, engine="nixl", memory=ARENA.place)
    await tier.start()
    assert tier.engine == "nixl"
    await put(tier, KEYS[:30])
    os.truncate(path, nbytes_for(30) - 5 * SLOT)
    answers = await get(tier, KEYS[:30])
    assert answers.count(HIT) == 25 and answers.count(FAILED) == 5
    os.truncate(path, nbytes_for(30))
    answers = await get(tier, KEYS[:30])
    assert answers.count(HIT) == 25 and answers.count(Fetched.CORRUPT) == 5
    assert await get(tier, KEYS[:30]) == [MISS if answer is Fetched.CORRUPT else HIT for answer in answers]
    tier.check()
    await tier.close()


def test_a_small_tmpfs_refuses_the_tier_that_does_not_fit_and_serves_the_one_that_does(tmp_path):
    mounted = os.system(f"mount -t tmpfs -o size=256k tmpfs {tmp_path} 2>/dev/null") == 0
    if not mounted:
        pytest.skip("mounting needs root")
    try:
        asyncio.run(on_small_tmpfs(tmp_path))
    finally:
        os.system(f"umount {tmp_path}")


async def on_small_tmpfs(folder):
    with pytest.raises(OSError, match=f"does not fit: {folder}"):
        await started(folder / "big.kvnvme", 100)
    assert os.listdir(folder) == []
    tier, _ = await started(folder / "small.kvnvme", 50)
    (folder / "filler").write_bytes(bytes((64 - 52) * 4096 - 4096))
    for start in (0, 30, 60):
        assert await put(tier, KEYS[start : start + 30]) == [Stored.STORED] * 30
    assert await get(tier, KEYS[60:90]) == [HIT] * 30
    tier.check()
    await tier.close()


@pytest.mark.parametrize("synced", [True, False])
async def test_o24_blocks_are_on_the_disk_before_their_records_are_written(path, monkeypatch, synced):
    """Through the page cache, where the order is the kernel's: what a power failure shows, and a kill does not."""
    tier, engine = await started(path, 10, direct=False)
    happened = []

    def fault(motion, span):
        happened.append("blocks" if span.offset >= tier.geometry.data else "records")

    def sync(file):
        happened.append("sync")
        return None if synced else OSError(5, "Input/output error")

    engine.fault = fault
    monkeypatch.setattr(NvmeFile, "sync", sync)
    assert await put(tier, KEYS[:3]) == [Stored.STORED if synced else Stored.FAILED] * 3
    ends = happened[happened.index("blocks") :]
    once = [what for at, what in enumerate(ends) if at == 0 or ends[at - 1] != what]
    assert once[:3] == ["blocks", "sync", "records"] if synced else "records" not in ends
    assert tier.longest_run(KEYS) == (3 if synced else 0)
    await tier.close()
