"""What the HTTP edge shows of tiers: statistics, blocks by the beginning of their key, gauges, and their page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from api_stub import StubBackend, application, post
from api_tiers_stand import KEYS, app_of, get, nodes
from tier_stub import StubAgent, StubNodes

from deployments.api.metrics import GAUGES, TIER_GAUGES
from deployments.config import AppArgs
from kv_tiers.keys import BlockKey


async def test_stats_tell_of_every_node_tier_and_the_directory() -> None:
    body = (await get(app_of(nodes()), "/v1/kv/stats")).json()
    assert [node["node"] for node in body["nodes"]] == ["a", "b"]
    cpu, nvme, redis = body["nodes"][0]["tiers"]
    assert (cpu["tier"], nvme["tier"], redis["tier"]) == ("cpu", "nvme", "redis")
    assert (cpu["blocks"], cpu["capacity"], cpu["slot_bytes"]) == (3, 100, 4096)
    directory = body["directory"]
    assert (directory["epoch"], directory["nodes"], directory["shards"]) == (9, 2, 2)
    assert directory["tiers"] == {"cpu": 5, "nvme": 15, "redis": 1} and "reports" not in directory


async def test_blocks_are_found_by_the_beginning_of_their_key() -> None:
    app = app_of(nodes())
    wanted = KEYS[0].digest.hex()
    for prefix in (wanted[:4], wanted[:9].upper(), wanted):
        body = (await get(app, f"/v1/kv/blocks/{prefix}")).json()
        (block,) = body["blocks"]
        assert wanted.startswith(block["key"]) and len(block["key"]) == 32
        assert block["places"] == [
            {"node": "a", "tier": "cpu"}, {"node": "b", "tier": "cpu"}, {"node": "a", "tier": "nvme"}
        ]  # fmt: skip
        assert body["more"] is False
    other = wanted[:-8] + "00000000"
    assert (await get(app, f"/v1/kv/blocks/{other[:31]}0")).json()["blocks"] == []


async def test_more_blocks_than_are_shown_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.api.tiers.MAX_FOUND", 2)
    alike = [BlockKey(b"\x12\x34" + bytes([i]) * 30) for i in range(3)]
    body = (await get(app_of(StubNodes(a=StubAgent(cpu=alike))), "/v1/kv/blocks/1234")).json()
    assert [block["key"] for block in body["blocks"]] == [key.digest[:16].hex() for key in alike[:2]]
    assert body["more"] is True


@pytest.mark.parametrize("prefix", ["abc", "wxyz", "abcd-", "0" * 65, "%20abcd"])
async def test_a_prefix_that_is_none_is_refused(prefix: str) -> None:
    answer = await get(app_of(nodes()), f"/v1/kv/blocks/{prefix}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prefix" and "4 to 64" in answer.json()["error"]["message"]


async def test_what_agents_report_of_their_tiers_is_shown_with_help() -> None:
    names = [f"{tier}_tier_{figure}" for tier in ("cpu", "nvme", "redis") for figure in TIER_GAUGES]
    assert set(names) <= set(GAUGES)
    backend = StubBackend(gauges={"node:a": dict.fromkeys([*names, "spill_queue", "quarantined_slots"], 2.0)})
    text = (await get(application(backend), "/metrics")).text
    assert 'kvtide_nvme_tier_bytes_written{source="node:a"} 2.0' in text
    assert 'kvtide_spill_queue{source="node:a"} 2.0' in text
    assert "# HELP kvtide_redis_tier_open redis tier: 1 while" in text
    assert "Reported by replicas." not in text


OTHER_OPTIONS = ("redis_url", "admission", "tenant_share", "directory_shards", "block_tokens")
PAGE = (Path(__file__).parent.parent / "docs" / "tiers.md").read_text()
EXAMPLES = re.findall(
    r"^curl http://127\.0\.0\.1:8000(\S+)(?:.*?-d '(\{.*?\})')?$", PAGE.replace("\\\n", ""), re.MULTILINE
)


@pytest.mark.parametrize(("path", "body"), EXAMPLES, ids=[path for path, _ in EXAMPLES])
async def test_the_pages_examples_are_accepted(path: str, body: str) -> None:
    app = app_of(nodes())
    answer = await (post(app, path, body.encode()) if body else get(app, path))
    assert answer.status_code == 200, answer.text


def test_the_page_tells_of_every_command_option_and_gauge() -> None:
    commands = {"pin", "unpin", "prefetch", "evict", "flush", "stats", "blocks/9b1e"}
    assert {path.removeprefix("/v1/kv/") for path, _ in EXAMPLES} == commands
    options = [name for name in AppArgs.model_fields if "tier" in name or name in OTHER_OPTIONS]
    assert len(options) > 10 and not [name for name in options if f"`{name}`" not in PAGE]
    assert not [figure for figure in TIER_GAUGES if f"_{figure}`" not in PAGE]
