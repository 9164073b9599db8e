"""Every tier behind the real service: what left the pools comes back exactly, from each of them and after any death.

Runs last, for it kills what it needs. Prompts are token ids: a document of whole blocks, and tails that are too short
for a block of their own, so what can be loaded is known to the token.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from cluster_stand import TIERS, Service
from redis_server import RedisServer
from tokenizers import Tokenizer

from deployments.cli import main
from kv_tiers.nvme_file import SUFFIX
from kv_tiers.nvme_index import Geometry

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("everything_is_freed")]

BLOCK = 16
LOWER = TIERS[1:]
TRIES = 4
"""A load that is late, on a machine with other work, is given up and computed; that it is found must show by then."""

Prompt = list[int]
Ask = dict[str, Any]
Asks = dict[str, tuple[Ask, int]]


class Answer(NamedTuple):
    """What one request was told."""

    texts: list[str]
    cached: int


class Tiers:
    """The service's API as this file needs it, for one tenant."""

    def __init__(self, service: Service, salt: str) -> None:
        self.service = service
        self.salt = salt

    def ask(self, ask: Ask, salt: str | None = None) -> Answer:
        """Complete a prompt; → texts, and the prompt tokens whose KV was loaded."""
        body = {"model": "demo", "temperature": 0, "max_tokens": 8, "cache_salt": salt or self.salt, **ask}
        answer = self.service.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        told = answer.json()
        texts = [choice["text"] for choice in sorted(told["choices"], key=lambda choice: choice["index"])]
        return Answer(texts, told["usage"]["prompt_tokens_details"]["cached_tokens"])

    def command(self, name: str, prompt: Prompt, **fields: object) -> dict[str, Any]:
        """POST /v1/kv/<name> about a prompt; the node must answer, the directory need not."""
        body = {"tokens": prompt, "cache_salt": self.salt, **fields}
        answer = self.service.client.post(f"/v1/kv/{name}", json=body)
        assert answer.status_code == 200, answer.text
        assert {each["source"] for each in answer.json()["unanswered"]} <= {"directory"}, answer.text
        return answer.json()

    def tiers_of(self, prompt: Prompt) -> list[list[str]]:
        """Per block the tiers that have it, as their nodes say. (Ends no pin, for there is none.)"""
        said = self.command("unpin", prompt)["blocks"]
        return [[place["tier"] for place in block["places"]] for block in said]

    def until_known(self, prompt: Prompt, tiers: Sequence[str], *, others: bool = False) -> None:
        """Wait until the directory knows a prompt's first and last block in these tiers, or more, and each once."""
        keys = [block["key"] for block in self.command("unpin", prompt)["blocks"]]

        def told(key: str) -> bool:
            blocks = self.service.client.get(f"/v1/kv/blocks/{key[:32]}").json()["blocks"]
            assert len(blocks) <= 1
            places = [place["tier"] for block in blocks for place in block["places"]]
            assert len(places) == len(set(places))
            return set(tiers) <= set(places) if others else places == list(tiers)

        self.service.until(
            lambda: told(keys[0]) and told(keys[-1]), 10, f"{', '.join(tiers)} in the directory"
        )

    def until_in(self, prompt: Prompt, tiers: Sequence[str] = TIERS) -> None:
        """Wait until all of a prompt is in all of these tiers."""

        def there() -> bool:
            return all(set(tiers) <= set(names) for names in self.tiers_of(prompt))

        self.service.until(there, 30, f"prompt in {', '.join(tiers)}")

    def leave_only(self, prompt: Prompt, tier: str) -> None:
        """Forget a prompt everywhere but in one tier, where all of it is.

        From the CPU tier it is written to the others first. Once more where the gateway knows no node, as the directory
        began anew.
        """
        blocks = len(prompt) // BLOCK

        def alone() -> bool:
            if self.command("prefetch", prompt)["blocks_loaded"] < blocks:
                return False
            self.command("evict", prompt, tiers=[other for other in TIERS if other != tier])
            return self.tiers_of(prompt) == [[tier]] * blocks

        self.service.until(alone, 20, f"prompt in {tier} alone")

    def node(self) -> str:
        """Name of the only node."""
        (node,) = self.service.client.get("/v1/kv/stats").json()["nodes"]
        return node["node"]

    def figures(self, name: str) -> dict[str, float]:
        """Tier to that figure, of the only node."""
        (node,) = self.service.client.get("/v1/kv/stats").json()["nodes"]
        return {tier["tier"]: tier[name] for tier in node["tiers"]}

    def recalls(self, document: Prompt, tier: str, ask: Ask, cold: Answer, cached: int) -> None:
        """From that tier alone the answer is the cold one, and exactly `cached` tokens were loaded."""
        found = []
        while len(found) < TRIES and cached not in found:
            self.leave_only(document, tier)
            warm = self.ask(ask)
            assert warm.texts == cold.texts, (tier, ask, warm.cached)
            found.append(warm.cached)
        assert found[-1] == cached, (tier, found)


@pytest.fixture(scope="module")
def ids(speech: str, smollm2_path: Path) -> Prompt:
    """Tokens of a text that no other test asks about."""
    return Tokenizer.from_file(str(smollm2_path / "tokenizer.json")).encode(speech[60_000:70_000]).ids


@pytest.fixture(scope="module")
def document(ids: Prompt) -> Prompt:
    """28 blocks."""
    return ids[: 28 * BLOCK]


@pytest.fixture(scope="module")
def asks(ids: Prompt, document: Prompt) -> Asks:
    """By name: a request over the document, and how many of its tokens lie in the document's blocks and are not needed.

    SnapKV's window of 16 is computed anew, for its queries.
    """
    tails = [ids[at : at + 10] for at in range(1000, 1040, 10)]
    snapkv = {"policy": "snapkv", "budget": 96, "window": 16, "heads": "ada"}
    return {
        "a second question": ({"prompt": document + tails[0]}, 28 * BLOCK),
        "a branch": ({"prompt": document[: 19 * BLOCK] + tails[1]}, 19 * BLOCK),
        "three choices": ({"prompt": document + tails[2], "n": 3}, 28 * BLOCK),
        "snapkv": ({"prompt": document + tails[3], "kv": snapkv}, 27 * BLOCK),
    }


@pytest.fixture(scope="module")
def tiers(service: Service, document: Prompt) -> Tiers:
    """Every tier holds the document and nothing else."""
    service.wait_idle(40)
    flushed = service.client.post("/v1/kv/flush").json()
    assert flushed["complete"], flushed
    tiers = Tiers(service, "tiers")
    assert tiers.ask({"prompt": [*document, 1]}).cached == 0
    tiers.until_in(document)
    return tiers


@pytest.fixture(scope="module")
def cold(tiers: Tiers, asks: Asks) -> dict[str, Answer]:
    """Every ask's answer where nothing can be loaded: each has a tenant of its own.

    Greedy: what is computed again in other pieces differs in the last bit of bf16, which sampled tokens would show.
    """
    answers = {name: tiers.ask(ask, salt=f"cold {name}") for name, (ask, _) in asks.items()}
    assert {answer.cached for answer in answers.values()} == {0}, "another tenant's blocks"
    assert [len(answer.texts) for answer in answers.values()] == [1, 1, 3, 1]
    return answers


@pytest.mark.parametrize("tier", TIERS)
def test_what_is_in_one_tier_alone_comes_back_exactly(
    tiers: Tiers, document: Prompt, asks: Asks, cold: dict[str, Answer], tier: str
) -> None:
    for name, (ask, cached) in asks.items():
        tiers.recalls(document, tier, ask, cold[name], cached)


def test_a_tenant_neither_hits_nor_evicts_what_is_another_s(
    tiers: Tiers, document: Prompt, asks: Asks, cold: dict[str, Answer]
) -> None:
    tiers.command("prefetch", document)
    stranger, (ask, _) = Tiers(tiers.service, "tiers "), asks["a second question"]
    assert stranger.command("evict", document)["evicted"] == {tiers.node(): dict.fromkeys(TIERS, 0)}
    assert stranger.ask(ask) == Answer(cold["a second question"].texts, 0)
    assert all("cpu" in names for names in tiers.tiers_of(document))


@pytest.mark.parametrize("length", [15, 16, 17, 32, 48])
def test_a_prompt_around_a_multiple_of_a_block_keeps_a_token_to_compute(
    tiers: Tiers, ids: Prompt, length: int
) -> None:
    prompt = ids[10 * length : 11 * length]
    ask = {"prompt": prompt, "max_tokens": 4}
    cold = tiers.ask(ask)
    assert cold.cached == 0
    if length < BLOCK:
        assert tiers.ask(ask) == cold
        return
    tiers.until_in(prompt)
    for tier in TIERS:
        tiers.recalls(prompt, tier, ask, cold, (length - 1) // BLOCK * BLOCK)
        tiers.until_known(prompt, [tier], others=True)


def flip_on_disk(folder: Path, slot_bytes: int, key: str) -> None:
    """Change one bit in the payload of that block, wherever it lies in the NVMe tier's file."""
    (path,) = folder.glob(f"*{SUFFIX}")
    geometry = Geometry.within(path.stat().st_size, slot_bytes)
    descriptor = os.open(path, os.O_RDWR)
    try:
        starts = [geometry.data + slot * slot_bytes for slot in range(geometry.slots)]
        # A block's header has its key behind 32 bytes of sizes and 32 of fingerprint. Slots that are free now may have
        # held the block before.
        found = [at for at in starts if os.pread(descriptor, 32, at + 64).hex() == key]
        assert found
        for place in (at + slot_bytes // 2 for at in found):
            (byte,) = os.pread(descriptor, 1, place)
            os.pwrite(descriptor, bytes([byte ^ 4]), place)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flip_in_redis(redis: RedisServer, key: str) -> None:
    """Change one bit in the middle of that block's value."""
    with redis.client() as client:
        name = f"kvtide:b1:{key}"
        place = client.strlen(name) // 2
        (byte,) = client.getrange(name, place, place)
        client.setrange(name, place, bytes([byte ^ 4]))


@pytest.mark.parametrize(("tier", "bad"), [("nvme", 10), ("redis", 0)])
def test_bytes_that_rot_in_a_tier_are_computed_counted_and_written_anew(
    tiers: Tiers,
    service_redis: RedisServer,
    document: Prompt,
    asks: Asks,
    cold: dict[str, Answer],
    tier: str,
    bad: int,
) -> None:
    ask, cached = asks["a second question"]
    tiers.leave_only(document, tier)
    key = tiers.command("unpin", document)["blocks"][bad]["key"]
    before = tiers.figures("failures")[tier]
    if tier == "nvme":
        flip_on_disk(tiers.service.log.parent, int(tiers.figures("slot_bytes")[tier]), key)
    else:
        flip_in_redis(service_redis, key)
    answer = tiers.ask(ask)
    assert answer.texts == cold["a second question"].texts
    assert answer.cached <= bad * BLOCK
    assert tiers.figures("failures")[tier] == before + 1
    # Computed again, it goes to every tier again, and its bytes there are right.
    tiers.until_in(document, (tier,))
    tiers.recalls(document, tier, ask, cold["a second question"], cached)
    assert tiers.figures("failures")[tier] == before + 1


def test_the_api_prefetches_pins_unpins_and_shows(tiers: Tiers, document: Prompt) -> None:
    blocks, node = len(document) // BLOCK, tiers.node()
    tiers.leave_only(document, "redis")
    loaded = tiers.command("prefetch", document, node=node)
    assert (loaded["node"], loaded["blocks_loaded"]) == (node, blocks)
    assert tiers.tiers_of(document) == [["cpu", "redis"]] * blocks
    counts = {"cpu": blocks, "nvme": 0, "redis": blocks}
    assert tiers.command("pin", document, ttl_s=60)["pinned"] == {node: counts}
    assert tiers.figures("pinned") == counts
    assert tiers.command("unpin", document)["unpinned"] == {node: counts}
    assert tiers.figures("pinned") == dict.fromkeys(TIERS, 0)
    tiers.until_known(document, ["cpu", "redis"])


def alive(tiers: Tiers, document: Prompt) -> bool:
    """Whether requests and commands are answered."""
    client = tiers.service.client
    asked = {"model": "demo", "prompt": document[:3], "max_tokens": 2}
    about = {"tokens": document, "cache_salt": tiers.salt}
    try:
        answers = [client.post("/v1/completions", json=asked), client.post("/v1/kv/unpin", json=about)]
    except httpx.HTTPError:
        return False
    if any(answer.status_code != 200 for answer in answers):
        return False
    told = answers[1].json()
    return bool(told["unpinned"]) and not told["unanswered"]


def all_come_back(
    tiers: Tiers, document: Prompt, asks: Asks, cold: dict[str, Answer], names: Sequence[str]
) -> None:
    """From each of these tiers."""
    for tier in names:
        for name in ("three choices", "snapkv"):
            ask, cached = asks[name]
            tiers.recalls(document, tier, ask, cold[name], cached)


def test_all_come_back_after_the_replicas_were_killed(
    tiers: Tiers, document: Prompt, asks: Asks, cold: dict[str, Answer]
) -> None:
    tiers.command("prefetch", document)
    service = tiers.service
    for pool in ("Prefill", "Decode"):
        service.kill(service.replica(pool))
    service.until(lambda: alive(tiers, document), 90, "new replicas")
    assert all("cpu" in names for names in tiers.tiers_of(document)), "the slab outlives the replicas"
    all_come_back(tiers, document, asks, cold, TIERS)


def test_what_lies_below_the_slab_comes_back_after_the_node_agent_was_killed(
    tiers: Tiers, document: Prompt, asks: Asks, cold: dict[str, Answer]
) -> None:
    service, blocks = tiers.service, len(document) // BLOCK
    tiers.command("prefetch", document)
    tiers.command("evict", document, tiers=["cpu"])  # written to both others before
    tiers.command("prefetch", document)
    assert tiers.tiers_of(document) == [list(TIERS)] * blocks
    service.kill(service.actor("NodeAgent"))
    service.until(lambda: alive(tiers, document), 60, "a new agent")
    service.until(lambda: tiers.tiers_of(document) == [list(LOWER)] * blocks, 30, "the tiers below")
    tiers.until_known(document, LOWER)
    all_come_back(tiers, document, asks, cold, LOWER)


def test_all_come_back_when_the_directory_was_killed_and_it_is_told_again(
    tiers: Tiers, document: Prompt, asks: Asks, cold: dict[str, Answer]
) -> None:
    service = tiers.service
    service.kill(service.actor("DirectoryActor"))
    all_come_back(tiers, document, asks, cold, TIERS)
    tiers.until_known(
        document, ["cpu", "redis"], others=True
    )  # a block that was computed again is everywhere


def test_a_flush_leaves_a_miss_in_every_tier(
    tiers: Tiers,
    service_redis: RedisServer,
    document: Prompt,
    asks: Asks,
    cold: dict[str, Answer],
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, (ask, _) = tiers.service.url, asks["a second question"]
    tiers.command("pin", document)
    assert main(["tiers", url]) == 0
    table = capsys.readouterr().out
    assert all(tier in table for tier in TIERS)
    assert main(["tiers", url, "flush"]) == 0
    assert "cleared" in capsys.readouterr().out
    assert main(["tiers", url, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(tier["blocks"], tier["pinned"]) for node in shown["nodes"] for tier in node["tiers"]] == [
        (0, 0)
    ] * 3
    assert not any(shown["directory"]["tiers"].values())
    with service_redis.client() as redis:
        assert redis.keys("*kvtide:b1:*") == []
    assert tiers.tiers_of(document) == [[]] * (len(document) // BLOCK)
    assert tiers.ask(ask) == Answer(cold["a second question"].texts, 0)
    tiers.until_in(document)
