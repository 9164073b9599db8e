"""The Redis tier over a real server that works: what is stored, what it costs, who else may use the server."""

from __future__ import annotations

import subprocess

import pytest
import torch
from redis_server import RedisServer, shared_server
from redis_stand import (
    KEYS,
    LARGE,
    LAYOUT,
    block,
    buffers,
    get,
    put,
    room,
    running,
    slot_bytes,
    until,
)

from kv_tiers.block import BlockLayout
from kv_tiers.keys import Fingerprint, block_keys
from kv_tiers.packing import FRAME_BYTES
from kv_tiers.redis import RedisTier
from kv_tiers.redis_values import UNCOMMITTED_S, part_name, part_names, parts_of, value_name
from kv_tiers.tier import Fetched, Stored

A, B, C, D = KEYS[:4]
HIT, MISS, CORRUPT, FAILED = Fetched.HIT, Fetched.MISS, Fetched.CORRUPT, Fetched.FAILED
STORED, PRESENT, NO_ROOM = Stored.STORED, Stored.PRESENT, Stored.NO_ROOM


@pytest.fixture
def server():
    server = shared_server()
    with server.client() as client:
        client.flushall()
    return server


@pytest.fixture
def client(server):
    with server.client() as client:
        yield client


# What is stored


@pytest.mark.parametrize("packing", ["none", "zstd"])
async def test_a_large_block_lies_in_parts_and_comes_back(server, client, packing):
    async with running(server.url, 3, LARGE, packing=packing) as tier:
        keys = KEYS[:2]
        assert await put(tier, keys, LARGE) == [STORED, STORED]
        assert await get(tier, keys, LARGE) == [HIT, HIT]
        names = client.keys()
        assert len(names) == 2 * (3 if packing == "none" else 2)
        share = sum(client.strlen(name) for name in names) / (2 * LARGE.nbytes)
        assert share > 1 if packing == "none" else share < 0.85
        assert all(client.ttl(name) == -1 for name in names), "parts of a whole block stay"
        assert await tier.drop(keys) == 2 and client.keys() == []


@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_half_a_block_is_a_miss_and_its_rest_goes(server, client, lost):
    async with running(server.url, 2, LARGE) as tier:
        await put(tier, [A], LARGE)
        client.delete([value_name(A), *part_names(A, 3 << 20)][lost])
        assert await get(tier, [A], LARGE) == [MISS]
        assert tier.longest_run([A]) == 0
        await until(lambda: client.keys() == [])


async def test_a_writer_that_died_leaves_parts_that_go_by_themselves(server, client):
    client.set(part_name(A, 1), b"x" * 100, ex=UNCOMMITTED_S)
    client.set(part_name(B, 1), b"x" * 100)
    client.set(value_name(C), b"no frame")
    async with running(server.url) as tier:
        assert client.keys() == [part_name(A, 1)]
        assert await get(tier, [A, B, C]) == [MISS] * 3


async def test_another_value_under_our_name_is_no_block(server, client):
    async with running(server.url) as tier:
        await put(tier, [A, B])
        client.set(value_name(B), client.get(value_name(A)))
        client.rpush(value_name(C), "a list")
        client.set(value_name(D), "text")
        assert await get(tier, [A, B, C, D]) == [HIT, CORRUPT, CORRUPT, CORRUPT]
        await until(lambda: client.keys() == [value_name(A)])
        assert await put(tier, [B, C]) == [STORED, STORED]
        assert await get(tier, [A, B, C, D]) == [HIT, HIT, HIT, MISS]


async def test_o22_nothing_that_changes_the_bytes_meets_on_one_redis(server):
    layouts = [
        LAYOUT,
        BlockLayout(layers=((2, 32),) * 4, dtype=torch.float16, block_tokens=16),
        BlockLayout(layers=((2, 32),) * 4, dtype=torch.bfloat16, block_tokens=8),
    ]
    cases = [
        (
            layout,
            Fingerprint.of(
                config=model, weights=b"w", dtype="d", layout=layout.layout_id, rope="r", adapter=lora
            ),
            tenant,
        )
        for layout in layouts
        for model in ("one", "other")
        for lora, tenant in ((None, None), ("x", None), (None, "x"))
    ]
    size = slot_bytes()
    async with running(server.url, len(cases)) as tier:
        for layout, fingerprint, tenant in cases:
            key = block_keys(fingerprint, range(layout.block_tokens), layout.block_tokens, tenant=tenant)[0]
            assert await tier.get([key], buffers(1)) == [MISS]
            assert await tier.put([key], [block(key, layout, fingerprint, size)]) == [STORED]
            assert await tier.get([key], buffers(1)) == [HIT]
        assert tier.stats().visible == len(cases)


async def test_bytes_that_are_no_block_are_not_stored(server, client):
    async with running(server.url) as tier:
        assert await tier.put([A], buffers(1)) == [Stored.FAILED]
        assert client.keys() == [] and tier.used_bytes == 0


# Bounds


@pytest.mark.parametrize(("layout", "packing"), [(LAYOUT, "none"), (LAYOUT, "zstd"), (LARGE, "none")])
async def test_what_blocks_take_in_redis_stays_within_the_bound(server, client, layout, packing):
    count = 120 if layout is LAYOUT else 6
    bound = room(count // 2, layout)
    before = client.info("memory")["used_memory"]
    async with running(server.url, count // 2, layout, packing=packing) as tier:
        for start in range(0, count, 4):
            assert STORED in await put(tier, KEYS[start : start + 4], layout)
            assert tier.used_bytes <= bound
            tier.check()
    # Without the tier's connections, whose buffers in the server are none of the blocks'.
    taken = client.info("memory")["used_memory"] - before
    assert 0.85 * tier.used_bytes < taken <= tier.used_bytes <= bound
    assert tier.used_bytes > 0.9 * bound and tier.stats().blocks_evicted > 0
    if packing == "zstd":
        assert tier.stats().visible > count // 2, "more than unpacked ones"


async def test_a_broken_block_is_so_for_all_who_ask_at_once_and_gone_when_the_tier_is_closed(server, client):
    async with running(server.url, 4, watch_s=60) as tier:
        await put(tier, [A, B])
        client.setrange(value_name(A), FRAME_BYTES + LAYOUT.header_bytes, b"broken")
        assert await get(tier, [A, A, B]) == [CORRUPT, CORRUPT, HIT]
    assert client.keys() == [value_name(B)]


async def test_what_a_tenant_gives_up_at_its_quota_leaves_redis_though_other_slots_are_free(server, client):
    async with running(server.url, 10, tenant_share=0.3) as tier:
        for start in (0, 3, 6):
            keys = KEYS[start : start + 3]
            assert await tier.put(keys, [block(key) for key in keys], tenant="acme") == [STORED] * 3
            tier.check()
            await until(lambda: len(client.keys()) == 3)
            assert sorted(client.keys()) == sorted(map(value_name, keys))


async def test_a_time_to_live_counts_in_redis_too_and_pins_are_renewed(server, client):
    async with running(server.url, ttl_s=3.0, watch_s=0.05) as tier:
        await put(tier, [A, B])
        tier.pin([A])
        assert 0 < client.pttl(value_name(A)) <= 3000
        client.pexpire(value_name(B), 1)
        await until(lambda: client.keys() == [value_name(A)])
        assert await get(tier, [B]) == [MISS] and tier.longest_run([B]) == 0
        client.pexpire(value_name(A), 2000)
        await until(lambda: client.pttl(value_name(A)) > 2000)
        client.pexpire(value_name(A), 1500)
        assert await get(tier, [A]) == [HIT] and client.pttl(value_name(A)) > 1500
        tier.unpin([A])


# Sharing


async def test_what_another_node_wrote_is_found_and_not_sent_again(server, client):
    async with running(server.url) as one, running(server.url) as other:
        await put(one, [A, B])
        assert other.longest_run([A]) == 0 and await get(other, [A, C]) == [HIT, MISS]
        written = client.info("stats")["total_net_input_bytes"]
        assert await put(other, [A, B]) == [PRESENT, PRESENT]
        assert client.info("stats")["total_net_input_bytes"] - written < 2000
        assert other.longest_run([A, B]) == 2 and other.used_bytes == one.used_bytes
        await one.drop([A])
        assert await get(other, [A, B]) == [MISS, HIT] and other.longest_run([A]) == 0


async def test_clear_and_start_touch_no_key_of_others(server, client):
    foreign = [b"mine", b"xkvtide:b1:", b"kvtide:b1:short", b"kvtide:b2:" + b"0" * 64]
    for name in foreign:
        client.set(name, "x")
    async with running(server.url) as one:
        await put(one, KEYS[:6])
        async with running(server.url) as other:
            assert other.longest_run(KEYS[:6]) == 6
            await other.clear()
            assert sorted(client.keys()) == sorted(foreign)
        assert await get(one, KEYS[:6]) == [MISS] * 6
        assert one.longest_run(KEYS[:1]) == 0


async def test_a_start_adopts_as_much_as_fits_and_removes_the_rest(server, client):
    async with running(server.url, 8) as tier:
        await put(tier, KEYS[:8])
    async with running(server.url, 5) as tier:
        kept = [key for key in KEYS[:8] if tier.longest_run([key])]
        assert len(kept) == 5 and tier.used_bytes == room(5)
        assert {value_name(key) for key in kept} == set(client.keys())
        assert set(tier.drain_changes().added) == set(kept)
        assert await get(tier, kept) == [HIT] * 5


@pytest.mark.parametrize("connections", [2, 3, 4])
async def test_connections_are_few_and_kept(server, client, connections):
    async with running(server.url, 40, connections=connections) as tier:
        await put(tier, KEYS[:40])
        for _ in range(3):
            assert await get(tier, KEYS[:40]) == [HIT] * 40
        before = client.info("stats")["total_connections_received"]
        assert await get(tier, KEYS[:40]) == [HIT] * 40
        assert client.info("stats")["total_connections_received"] == before
        # As many that carry blocks, as many at most for small commands, and this client.
        assert client.info("clients")["connected_clients"] <= 2 * connections + 1


# Doors


async def test_a_password_opens_and_a_wrong_one_is_a_tier_that_fails(tmp_path):
    server = RedisServer(tmp_path, "--requirepass", "sesame")
    try:
        async with running(f"redis://:sesame@127.0.0.1:{server.port}/3") as tier:
            assert await put(tier, [A]) == [STORED] and await get(tier, [A]) == [HIT]
            with server.client(password="sesame", db=3) as client:
                assert client.keys() == [value_name(A)]
        for url in (f"redis://:wrong@127.0.0.1:{server.port}", server.url):
            async with running(url) as tier:
                assert await put(tier, [A]) == [Stored.FAILED] and await get(tier, [A]) == [FAILED]
                assert tier.incarnation == 0
    finally:
        server.stop()


async def test_tls_carries_blocks_and_a_foreign_certificate_none(tmp_path):
    name = "-subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 {name} -keyout key.pem -out cert.pem"
    subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
    server = RedisServer(tmp_path, tls=tmp_path)
    try:
        async with running(f"{server.tcp_url}?ssl_ca_certs={tmp_path}/cert.pem", 3, LARGE) as tier:
            assert await put(tier, [A, B], LARGE) == [STORED, STORED]
            assert await get(tier, [A, B], LARGE) == [HIT, HIT]
        async with running(f"{server.tcp_url}?ssl_cert_reqs=none", 3, LARGE) as tier:
            assert await get(tier, [A], LARGE) == [HIT]
        async with running(server.tcp_url, 3, LARGE) as tier:
            assert await get(tier, [A], LARGE) == [FAILED]
    finally:
        server.stop()


async def test_a_cluster_is_spoken_to_through_its_client(tmp_path):
    server = RedisServer(tmp_path, "--cluster-enabled", "yes")
    try:
        with server.client() as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            await until(lambda: client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
            url = f"redis+cluster://127.0.0.1:{server.port}"
            async with running(url, 3, LARGE) as tier:
                assert tier.incarnation > 0
                assert await put(tier, KEYS[:3], LARGE) == [STORED] * 3
                assert await put(tier, [D], LARGE) == [STORED]
                assert (await get(tier, KEYS[:4], LARGE)).count(HIT) == 3
                survivors = [key for key in KEYS[:4] if tier.longest_run([key])]
                assert client.dbsize() == 9
                client.set(value_name(survivors[0]), client.get(value_name(survivors[1])))
                assert await get(tier, survivors, LARGE) == [CORRUPT, HIT, HIT]
            async with running(url, 3, LARGE) as tier:
                assert tier.longest_run(survivors[1:]) == 2
                await tier.clear()
                assert client.dbsize() == 0
    finally:
        server.stop()


def test_a_bound_for_less_than_a_block_is_refused():
    with pytest.raises(ValueError, match="hold no block"):
        RedisTier("redis://h", room(1) - 1, slot_bytes())
    with pytest.raises(ValueError, match="2 to 4"):
        RedisTier("redis://h", room(1), slot_bytes(), connections=1)


def test_parts_fill_their_allocator_class():
    frame = FRAME_BYTES + LARGE.nbytes
    assert parts_of(frame) == 3 and room(1, LARGE) < 1.06 * LARGE.nbytes
