"""`kvtide tiers` against a service over real HTTP, and its table as pure text."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
import uvicorn
from api_stub import StubBackend, application
from fastapi import FastAPI
from tier_stub import IDENTITY, StubAgent, StubNodes

from deployments.cli import main
from deployments.tiers_view import bar, size, table
from kv_tiers.keys import block_keys

TEXT = "hello world, again and again"
KEY = "hunter2"


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """The application on a port of this machine; → its URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        (socket,) = server.servers[0].sockets
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def stand() -> StubNodes:
    return StubNodes(node_a=StubAgent(cpu=[], nvme=[], redis=[]), node_b=StubAgent(cpu=[]))


@pytest.fixture(scope="module")
def url(stand: StubNodes) -> Iterator[str]:
    with served(application(StubBackend(), tiers=stand.control, api_key=KEY)) as url:
        yield url


@pytest.fixture
def keys(stand: StubNodes, url: str, capsys: pytest.CaptureFixture[str]) -> list:
    """Of the blocks of `TEXT`, all of them in node_a's CPU tier; other tiers empty, no pins."""
    for agent in stand.agents.values():
        agent.pins.clear()
        for held in agent.tiers.values():
            held.clear()
    assert main(["tiers", "pin", url, "--prompt", TEXT, f"api_key={KEY}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    stand.agents["node_a"].pins.clear()
    stand.agents["node_b"].pins.clear()
    tokens = application(StubBackend()).state.edge.card.encode(TEXT)
    made = block_keys(IDENTITY.fingerprint, tokens, IDENTITY.block_tokens)
    assert [block["key"] for block in found["blocks"]] == [key.digest.hex() for key in made]
    stand.agents["node_a"].tiers["cpu"].update(made)
    return made


def test_tiers_are_shown_as_a_table(url, keys, capsys):
    assert main(["tiers", f"{url}/", f"api_key={KEY}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["node", "tier", "used", "pinned", "hits", "GB/s", "evicted", "state"]
    assert [line.split()[:2] for line in lines[1:5]] == [
        ["node_a", "cpu"],
        ["node_a", "nvme"],
        ["node_a", "redis"],
        ["node_b", "cpu"],
    ]
    assert f"{size(len(keys) * 4096)} of 400.0 KiB" in lines[1] and "75%" in lines[1]
    assert f"directory: {len(keys)} blocks of 2 nodes ({len(keys)} in cpu), 2 shards" in lines


def test_json_is_the_services_answer(url, keys, capsys):
    assert main(["tiers", "--json", f"{url}/v1", f"api_key={KEY}"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["nodes"][0]["tiers"][0]["blocks"] == len(keys)


def test_the_key_may_come_from_the_environment(url, keys, capsys, monkeypatch):
    assert main(["tiers", url]) == 1
    said = capsys.readouterr().err
    assert said.startswith("kvtide: ") and "api_key=" in said and "KVTIDE_API_KEY" in said
    monkeypatch.setenv("KVTIDE_API_KEY", KEY)
    assert main(["tiers", url]) == 0
    assert main(["tiers", url, "api_key=wrong"]) == 1, "the option goes first"


def test_pin_and_unpin(url, stand, keys, capsys):
    key = f"api_key={KEY}"
    assert main(["tiers", "pin", "--prompt", TEXT, "--ttl", "60", url, key]) == 0
    said = capsys.readouterr().out
    assert f"node_a: pinned {len(keys)} in cpu, 0 in nvme, 0 in redis" in said
    assert f"{len(keys)} blocks, {len(keys)} of them in a tier" in said
    assert stand.agents["node_a"].pins == [(tuple(keys), 60.0)]
    assert main(["tiers", "unpin", url, "--prompt", TEXT, key]) == 0
    assert not stand.agents["node_a"].pins


def test_prefetch_evict_and_flush(url, stand, keys, capsys, monkeypatch):
    words = [url, "--prompt", "-", f"api_key={KEY}"]
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT))
    assert main(["tiers", "prefetch", *words]) == 0
    assert f"{len(keys)} of {len(keys)} blocks in the CPU tier of node_a" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT))
    assert main(["tiers", "evict", "--tier", "cpu", *words]) == 0
    assert f"node_a: evicted {len(keys)} in cpu" in capsys.readouterr().out
    stand.agents["node_a"].tiers["nvme"].update(keys)
    assert main(["tiers", "flush", url, f"api_key={KEY}"]) == 0
    assert f"node_a: cleared 0 in cpu, {len(keys)} in nvme, 0 in redis" in capsys.readouterr().out
    assert not stand.agents["node_a"].tiers["nvme"]


def test_a_chat_and_a_salt_have_blocks_of_their_own(url, keys, capsys):
    words = ["tiers", "pin", url, "--json", "--prompt", TEXT, f"api_key={KEY}"]
    for more in (["--chat"], ["--salt", "tenant"]):
        assert main([*words, *more]) == 0
        blocks = json.loads(capsys.readouterr().out)["blocks"]
        assert blocks and not any(block["places"] for block in blocks)


def test_what_was_not_done_everywhere_is_said_and_is_no_success(url, stand, keys, capsys):
    stand.agents["node_a"].stuck.add("cpu")
    try:
        # The directory's entries are waited for, for a bounded time, which another stand has shorter.
        hasty = stand.made(call_s=1.0)
        with served(application(StubBackend(), tiers=hasty)) as other:
            assert main(["tiers", "flush", other]) == 1
    finally:
        stand.agents["node_a"].stuck.clear()
    said = capsys.readouterr().out
    assert f"not cleared: node_a cpu: {len(keys)} blocks are left" in said
    assert f"not cleared: directory cpu: it names {len(keys)} blocks still" in said


def test_watch_shows_them_again_and_waits_for_a_service_that_is_away(keys, stand, capsys, monkeypatch):
    shown: list[str] = []

    def pause(seconds: float) -> None:
        shown.append(capsys.readouterr().out)
        if len(shown) == 2:
            leave.close()
        if len(shown) == 3:
            raise KeyboardInterrupt

    clock = SimpleNamespace(sleep=pause, monotonic=time.monotonic)
    monkeypatch.setattr("deployments.tiers_command.time", clock)
    with ExitStack() as leave:
        url = leave.enter_context(served(application(StubBackend(), tiers=stand.control)))
        assert main(["tiers", "--watch", url]) == 130
    assert "node_a" in shown[0] and "node_a" in shown[1] and shown[0].startswith("\x1b[H")
    assert "no kvtide answers" in shown[2]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["http://127.0.0.1:1"], "no kvtide answers at http://127.0.0.1:1/v1/kv/stats"),
        (["localhost:8000"], "is no URL"),
        (["pin", "evict"], "one of pin, unpin"),
        (["http://a", "http://b"], "one URL"),
        (["--prompt", "x"], "what to do? Valid: pin"),
        (["flush", "--watch"], "--watch"),
    ],
)
def test_a_command_that_cannot_be_is_one_line(words, part, capsys):
    assert main(["tiers", *words]) in (1, 2)
    said = capsys.readouterr().err
    assert said.startswith("kvtide: ") and said.count("\n") == 1 and part in said


def test_the_services_refusal_is_one_line(url, capsys):
    assert main(["tiers", "pin", url, f"api_key={KEY}"]) == 1
    said = capsys.readouterr().err
    assert "exactly one of prompt, messages, tokens" in said and said.count("\n") == 1
    assert main(["tiers", "evict", url, "--prompt", "x", "--tier", "gpu", f"api_key={KEY}"]) == 1
    assert "'cpu', 'nvme' or 'redis'" in capsys.readouterr().err


def test_a_server_that_is_no_kvtide_is_said(capsys):
    bare = FastAPI()
    bare.get("/v1/kv/stats")(lambda: [1])
    with served(bare) as url:
        assert main(["tiers", url]) == 1
        assert "other JSON" in capsys.readouterr().err
        assert main(["tiers", "flush", url]) == 1
        assert "404 Not Found" in capsys.readouterr().err


def tier(name: str, **figures: float) -> dict:
    return {"tier": name, "blocks": 50, "capacity": 200, **figures}


def body_of(*tiers: dict, node: str = "n" * 56) -> dict:
    return {"nodes": [{"node": node, "tiers": list(tiers)}], "directory": None, "unanswered": []}


def test_the_table_says_speed_state_and_who_did_not_answer():
    cpu = tier("cpu", slot_bytes=1 << 20, pinned=7, hits=1, misses=3, evicted=12, bytes_read=10**9)
    redis = tier("redis", failures=4, open=1, read_bytes_per_s=2.5e8)
    body = {**body_of(cpu, redis), "unanswered": [{"source": "m", "reason": "gone"}]}
    lines = table(body).splitlines()
    assert " ".join(lines[1].split()) == ("nnnnnnnnnnnn cpu ██░░░░░░░░ 50.0 MiB of 200.0 MiB 7 25% – 12 ok")
    assert " ".join(lines[2].split()) == (
        "nnnnnnnnnnnn redis ██░░░░░░░░ 50 of 200 blocks – – 0.25 – out of use, 4 failures"
    )
    assert lines[-1] == "m: gone"
    later = body_of({**cpu, "bytes_read": 4 * 10**9}, redis)
    assert " 1.50 " in table(later, body, 2.0).splitlines()[1]
    again = body_of({**cpu, "bytes_read": 0}, redis)
    assert " 0.00 " in table(again, later, 2.0).splitlines()[1], "an agent that started again"


def test_the_table_says_when_there_is_nothing():
    empty = {"nodes": [], "directory": None, "unanswered": []}
    assert table(empty).splitlines()[0] == "no node with tiers"
    assert " – " in table(body_of({"tier": "cpu", "blocks": 0, "capacity": 0}))


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 50, "1024.0 TiB")]
)
def test_sizes_are_readable(nbytes, text):
    assert size(nbytes) == text


@pytest.mark.parametrize(("share", "text"), [(0, "░" * 10), (0.5, "█████░░░░░"), (1.2, "█" * 10)])
def test_a_bar_fills_with_its_share(share, text):
    assert bar(share) == text
