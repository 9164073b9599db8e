"""The NVMe tier's file: what is in it, who may use it, and what a restart finds."""

from __future__ import annotations

import os

import pytest
from nvme_stand import KEYS, SLOT, Arena, Clock, block_bytes, nbytes_for

from kv_tiers.nvme import NvmeTier
from kv_tiers.nvme_file import nvme_path
from kv_tiers.nvme_index import PAGE, Geometry
from kv_tiers.tier import Fetched, Stored

HIT, MISS, CORRUPT = Fetched.HIT, Fetched.MISS, Fetched.CORRUPT
ARENA = Arena(120)


@pytest.fixture(params=["threads", "nixl"])
def engine(request):
    return request.param


@pytest.fixture
def path(tmp_path):
    return nvme_path(tmp_path, "app")


async def opened(path, slots, engine="threads", **options):
    tier = NvmeTier(path, nbytes_for(slots), SLOT, engine=engine, memory=ARENA.place, **options)
    await tier.start()
    return tier


async def put(tier, keys, **options):
    return await tier.put(keys, ARENA.filled(keys), **options)


async def get(tier, keys):
    """Answers; bytes of hits are compared."""
    buffers = ARENA.scratch(len(keys))
    answers = await tier.get(keys, buffers)
    for key, buffer, answer in zip(keys, buffers, answers, strict=True):
        assert answer is not HIT or buffer == block_bytes(key)
    return answers


async def test_blocks_come_back_byte_for_byte_and_unknown_ones_are_misses(path, engine):
    tier = await opened(path, 20, engine)
    assert tier.engine == engine
    assert await put(tier, KEYS[:10]) == [Stored.STORED] * 10
    assert await get(tier, [KEYS[3], KEYS[50], KEYS[0], KEYS[9]]) == [HIT, MISS, HIT, HIT]
    assert tier.longest_run(KEYS[:20]) == 10
    tier.check()
    await tier.close()


async def test_buffers_outside_the_registered_memory_are_served_too(path, engine):
    tier = await opened(path, 20, engine)
    other = Arena(4)
    keys = KEYS[:8]
    buffers = [*ARENA.filled(keys)[:4], *other.filled(keys[4:])]
    assert await tier.put(keys, buffers) == [Stored.STORED] * 8
    assert await get(tier, keys) == [HIT] * 8
    assert await tier.get(keys[:4], other.scratch(4)) == [HIT] * 4
    assert [bytes(buffer) for buffer in other.buffers] == [block_bytes(key) for key in keys[:4]]
    await tier.close()


async def test_the_file_is_private_and_keeps_to_its_bound_while_blocks_come_and_go(path, engine):
    tier = await opened(path, 8, engine)
    for start in range(0, 40, 5):
        await put(tier, KEYS[start : start + 5])
        tier.check()
    status = path.stat()
    assert status.st_size == nbytes_for(8) and status.st_blocks * 512 <= nbytes_for(8)
    assert status.st_mode & 0o777 == 0o600
    assert tier.stats().visible == 8 and tier.stats().blocks_evicted == 32
    await tier.close()
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
    ("nbytes", "slots"), [(3 * PAGE, 1), (4 * PAGE, 2), (76 * PAGE - 1, 73), (77 * PAGE, 74)]
)
def test_metadata_counts_against_the_bound(nbytes, slots):
    geometry = Geometry.within(nbytes, PAGE)
    assert geometry.slots == slots and geometry.nbytes <= nbytes
    assert Geometry(slots + 1, PAGE).nbytes > nbytes


def test_a_bound_without_room_for_a_block_and_slots_of_broken_pages_are_refused(path):
    with pytest.raises(ValueError, match="hold no block"):
        NvmeTier(path, 2 * PAGE + SLOT - 1, SLOT)
    with pytest.raises(ValueError, match="multiple of 4096"):
        NvmeTier(path, 1 << 20, SLOT + 512)


async def test_a_restart_finds_every_block_and_evicts_in_the_order_of_before(path, engine):
    tier = await opened(path, 10, engine)
    await put(tier, KEYS[:5])
    await put(tier, KEYS[5:10])
    await tier.close()
    tier = await opened(path, 10, engine)
    assert set(tier.manifest().keys) == set(KEYS[:10])
    assert await put(tier, KEYS[10:12]) == [Stored.STORED] * 2
    # Oldest batch first, of a batch its tail.
    assert await get(tier, KEYS[:12]) == [HIT] * 3 + [MISS] * 2 + [HIT] * 7
    tier.check()
    await tier.close()


async def test_a_restart_forgets_what_was_dropped_expired_evicted_or_cleared(path):
    tier = await opened(path, 10)
    await put(tier, KEYS[:6])
    assert await tier.drop([KEYS[1], KEYS[30]]) == 1
    await tier.close()
    clock = Clock()
    tier = await opened(path, 10, ttl_s=60.0, clock=clock)
    assert set(tier.manifest().keys) == {KEYS[0], *KEYS[2:6]}
    tier.pin([KEYS[0]])
    clock.now += 61.0
    assert tier.expire() == 4
    await tier.close()
    tier = await opened(path, 10)
    assert tier.manifest().keys == (KEYS[0],)
    await tier.clear()
    await tier.close()
    tier = await opened(path, 10)
    assert tier.manifest().keys == ()
    await tier.close()


async def test_a_tenants_quota_holds_across_a_restart(path):
    tier = await opened(path, 10, tenant_share=0.3)
    await put(tier, KEYS[:3], tenant="a" * 1000)
    await put(tier, KEYS[3:5])
    await tier.close()
    tier = await opened(path, 10, tenant_share=0.3)
    await put(tier, KEYS[5:8], tenant="a" * 1000)
    assert await get(tier, KEYS[:8]) == [MISS] * 3 + [HIT] * 5
    await tier.close()


async def test_a_second_process_is_refused_while_the_first_has_the_file(path):
    tier = await opened(path, 4)
    await put(tier, KEYS[:4])
    with pytest.raises(BlockingIOError, match="another process uses"):
        await opened(path, 4)
    assert await get(tier, KEYS[:4]) == [HIT] * 4
    await tier.close()
    again = await opened(path, 4)
    assert again.longest_run(KEYS) == 4
    await again.close()


async def test_a_file_of_another_shape_or_version_is_made_anew_and_counted(path):
    tier = await opened(path, 10)
    await put(tier, KEYS[:10])
    await tier.close()
    tier = await opened(path, 6)
    assert tier.faults.recreated == 1 and tier.manifest().keys == ()
    assert path.stat().st_size == nbytes_for(6)
    await put(tier, KEYS[:3])
    await tier.close()
    with path.open("r+b") as file:
        file.seek(8)
        file.write(b"\x02")
    tier = await opened(path, 6)
    assert tier.faults.recreated == 1 and tier.manifest().keys == ()
    await put(tier, KEYS[:3])
    assert await get(tier, KEYS[:3]) == [HIT] * 3
    await tier.close()
    tier = await opened(path, 6)
    assert tier.faults.recreated == 0
    await tier.close()


async def test_a_file_that_was_never_finished_is_made_anew(path):
    path.write_bytes(bytes(nbytes_for(10)))
    path.chmod(0o600)
    tier = await opened(path, 10)
    assert tier.faults.recreated == 1
    assert await put(tier, KEYS[:10]) == [Stored.STORED] * 10
    await tier.close()
    os.truncate(path, 100)
    tier = await opened(path, 10)
    assert tier.faults.recreated == 1 and tier.manifest().keys == ()
    await tier.close()


async def test_a_link_or_a_file_that_others_may_open_is_refused_and_left_alone(path, tmp_path):
    path.touch()
    path.chmod(0o644)
    with pytest.raises(PermissionError):
        await opened(path, 4)
    assert path.stat().st_size == 0
    link = nvme_path(tmp_path, "link")
    link.symlink_to(path)
    with pytest.raises(PermissionError):
        await opened(link, 4)


async def test_a_flipped_bit_in_the_index_costs_that_record_and_no_other(path):
    tier = await opened(path, 100)
    await put(tier, KEYS[:100])
    await tier.close()
    flip(path, PAGE + 56 * 5 + 3)  # in the key of slot 5
    tier = await opened(path, 100)
    assert tier.faults.dropped_at_start == 1
    assert sorted(await get(tier, KEYS[:100]), key=str) == sorted([HIT] * 99 + [MISS], key=str)
    await put(tier, KEYS[:100])
    await tier.close()
    tier = await opened(path, 100)
    assert tier.faults.dropped_at_start == 0 and len(tier.manifest().keys) == 100
    await tier.close()


async def test_a_flipped_checksum_of_an_index_page_costs_nothing(path):
    tier = await opened(path, 10)
    await put(tier, KEYS[:10])
    await tier.close()
    flip(path, 2 * PAGE - 1)
    tier = await opened(path, 10)
    assert await get(tier, KEYS[:10]) == [HIT] * 10
    await tier.close()


async def test_an_index_page_in_another_pages_place_is_not_believed(path):
    tier = await opened(path, 100)
    await put(tier, KEYS[:100])
    await tier.close()
    raw = bytearray(path.read_bytes())
    raw[PAGE : 2 * PAGE], raw[2 * PAGE : 3 * PAGE] = raw[2 * PAGE : 3 * PAGE], raw[PAGE : 2 * PAGE]
    path.write_bytes(raw)
    tier = await opened(path, 100)
    assert tier.manifest().keys == () and tier.faults.dropped_at_start == 100
    await tier.close()


async def test_a_flipped_payload_bit_is_corrupt_once_then_a_miss_also_after_a_restart(path, engine):
    tier = await opened(path, 10, engine)
    await put(tier, KEYS[:10])
    tier.drain_changes()
    victim = KEYS[4]
    flip(path, path.read_bytes().index(block_bytes(victim)) + 500)
    expected = [HIT] * 4 + [CORRUPT] + [HIT] * 5
    assert await get(tier, KEYS[:10]) == expected
    assert await get(tier, KEYS[:10]) == [MISS if answer is CORRUPT else answer for answer in expected]
    assert tier.drain_changes().removed == (victim,) and tier.faults.corrupt == 1
    assert tier.stats().blocks_read == 18
    copy = path.with_name("killed-now.kvnvme")
    copy.write_bytes(path.read_bytes())
    copy.chmod(0o600)
    after = await opened(copy, 10, engine)
    assert set(after.manifest().keys) == set(KEYS[:10]) - {victim}
    await after.close()
    tier.check()
    await tier.close()


async def test_of_a_truncated_file_the_front_is_served_and_its_length_restored(path, engine):
    tier = await opened(path, 10, engine)
    await put(tier, KEYS[:10])
    await tier.close()
    os.truncate(path, nbytes_for(10) - 3 * SLOT + 100)
    tier = await opened(path, 10, engine)
    assert len(tier.manifest().keys) == 7 and tier.faults.dropped_at_start == 3
    answers = await get(tier, KEYS[:10])
    assert answers.count(HIT) == 7 and answers.count(MISS) == 3
    assert path.stat().st_size == nbytes_for(10)
    assert await put(tier, KEYS[:10]) == [
        Stored.PRESENT if answer is HIT else Stored.STORED for answer in answers
    ]
    assert await get(tier, KEYS[:10]) == [HIT] * 10
    await tier.close()


async def test_without_direct_io_everything_works_through_the_page_cache(path, engine):
    tier = await opened(path, 10, engine, direct=False)
    assert not tier.direct
    await put(tier, KEYS[:10])
    assert await get(tier, KEYS[:10]) == [HIT] * 10
    await tier.close()
    tier = await opened(path, 10, engine)
    assert await get(tier, KEYS[:10]) == [HIT] * 10
    await tier.close()


async def test_a_folder_without_room_is_refused_with_bytes_and_folder_and_nothing_is_left(path):
    free = os.statvfs(path.parent)
    nbytes = free.f_bavail * free.f_frsize + (4 << 30)
    tier = NvmeTier(path, nbytes, 1 << 30)
    nbytes = tier.geometry.nbytes
    with pytest.raises(OSError, match=rf"{nbytes} bytes does not fit: {path.parent} has \d+ bytes free"):
        await tier.start()
    assert os.listdir(path.parent) == []


def test_o23_every_name_has_its_own_short_file_inside_the_folder(tmp_path):
    names = [
        "org/model/name",
        "org/model-SEP-name",
        "org--model",
        "../x",
        "x" * 300,
        "x" * 301,
        "mödel",
        "模型",
    ]
    names += ["Model", "model", "", ".", "..", "\udcff", "a\0b"]
    paths = [nvme_path(tmp_path, name) for name in names]
    assert len({str(path).lower() for path in paths}) == len(names)
    for path in paths:
        path.touch(exist_ok=False)
        assert path.resolve().parent == tmp_path.resolve() and len(path.name) < 64


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
