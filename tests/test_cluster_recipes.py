"""Recipes through the whole service, on real weights: sixteen at once, presets, reports, a user's own scorer."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from cluster_stand import MAX_SEQUENCES, SCORER, Service

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("everything_is_freed")]

LAYERS = 30  # of SmolLM2-135M
TOKENS = 12
"""Of each of the sixteen answers: two of the longest interval at which a rule below evicts, and two more."""
RECIPES: dict[str, dict[str, Any]] = {
    "full": {"policy": "full"},
    "snapkv, question observed": {"policy": "snapkv", "budget": 96, "window": "question", "protect": ["system"]},
    "pyramid": {"policy": "snapkv", "budget": 80, "window": 16, "layers": "pyramid", "beta": 10, "pool": "max"},
    "ada": {"policy": "snapkv", "budget": 0.25, "heads": "ada", "group": "max", "protect": ["code"]},
    "bands": {"policy": "snapkv", "budget": 64, "window": 16, "bands": {"0-9": 0.5, "20-29": 48}},
    "critical": {"policy": "snapkv", "budget": 90, "window": 16, "critical": True, "order": "pool_reduce"},
    "h2o": {"policy": "h2o", "budget": 0.3, "decode": {"rule": "h2o", "budget": 60, "every": 4}},
    "scissorhands": {
        "policy": "scissorhands", "budget": 80, "window": 64,
        "decode": {"rule": "scissorhands", "window": 64, "budget": 80, "every": 5},
    },
    "tova": {"policy": "tova", "budget": 80, "decode": "tova"},
    "expected attention": {"policy": "expected_attention", "budget": 70, "critical": True, "heads": "ada"},
    "keydiff in bytes": {"policy": "keydiff", "budget": "2MiB", "recent": 20},
    "knorm": {"policy": "knorm", "budget": 0.4, "protect": [[10, 40], "question"]},
    "endless": {"policy": "streaming_llm", "budget": 64, "decode": "streaming_llm", "positions": "slot"},
    "sliding while decoding": {"policy": "full", "decode": {"rule": "sliding_window", "budget": 100}},
    "random, then snapkv": {
        "policy": "random", "budget": 120, "seed": 5,
        "decode": {"rule": "snapkv", "budget": 100, "window": 16, "every": 5},
    },
    "a user's own": {"policy": SCORER, "budget": 72, "window": 16, "heads": "ada"},
}  # fmt: skip


def chat(text: str, kv: object, **more: Any) -> dict[str, Any]:
    """A greedy chat about `text`, its question in a message of its own."""
    messages = [
        {"role": "system", "content": "You answer briefly."},
        {"role": "user", "content": text},
        {"role": "assistant", "content": "I have read it."},
        {"role": "user", "content": "What does the speaker ask of Congress?"},
    ]
    return {"model": "demo", "messages": messages, "temperature": 0, "kv": kv, **more}


@contextmanager
def every_row_taken(service: Service) -> Iterator[None]:
    """While it is open, an endless answer with a choice per row of the decode pool leaves room for nobody."""
    endless = {"policy": "streaming_llm", "budget": 64, "decode": "streaming_llm", "positions": "slot"}
    body = {
        "model": "demo", "prompt": "Once", "kv": endless, "n": MAX_SEQUENCES, "seed": 1, "stream": True,
        "max_tokens": 100_000, "ignore_eos": True,
    }  # fmt: skip
    decoding, enough = threading.Event(), threading.Event()

    def read() -> None:
        with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=60) as answer:
            for number, _ in enumerate(answer.iter_lines()):
                if number > 8 * MAX_SEQUENCES:  # two lines a token, and the first tokens come from prefill
                    decoding.set()
                if enough.is_set():
                    return

    with ThreadPoolExecutor(1) as reader:
        reading = reader.submit(read)
        try:
            assert decoding.wait(60)
            yield
        finally:
            enough.set()
        reading.result()


def test_sixteen_recipes_at_once_give_what_each_gives_alone(service: Service, speech: str) -> None:
    spans: dict[str, list[float]] = {}

    def one(name: str, when: str, begun: Callable[[], object] = lambda: None) -> dict[str, Any]:
        """Tokens, their log-probabilities and what was kept, of a prompt that no cache knows; `begun` at its first."""
        at = 1300 * list(RECIPES).index(name)
        body = chat(
            speech[at : at + 600], RECIPES[name], cache_salt=f"{name} {when}", max_tokens=TOKENS, logprobs=True,
            ignore_eos=True, stream=True, stream_options={"include_usage": True},
        )  # fmt: skip
        tokens: list[tuple[str, float]] = []
        times = spans[name] = []
        with httpx.stream("POST", f"{service.url}/v1/chat/completions", json=body, timeout=120) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    told = [choice["logprobs"] for choice in event["choices"] if choice["logprobs"]]
                    for token in (token for logprobs in told for token in logprobs["content"]):
                        tokens.append((token["token"], token["logprob"]))
                        times.append(time.monotonic())
                        if len(tokens) == 1:
                            begun()
        assert event["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert 140 < event["usage"]["prompt_tokens"] < 240
        return {"tokens": tokens, **event["usage"]["kv"]}

    alone = {name: one(name, "alone") for name in RECIPES}
    # Each comes with its first token to a full decode pool; then there is room for all of them in the same step.
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(len(RECIPES)) as crowd:
        with every_row_taken(service):
            asked = {name: crowd.submit(one, name, "together", begun.release) for name in RECIPES}
            assert all(begun.acquire(timeout=60) for _ in RECIPES)
            assert not any(answer.done() for answer in asked.values())
        together = {name: answer.result() for name, answer in asked.items()}
    assert together == alone
    assert max(times[1] for times in spans.values()) < min(times[-1] for times in spans.values()), (
        "they were not decoded together"
    )
    assert all(len(answer["tokens"]) == TOKENS for answer in alone.values())
    assert len({answer["recipe"] for answer in alone.values()}) == len(RECIPES) == MAX_SEQUENCES
    assert sum(answer["kept_tokens"] < answer["prompt_tokens"] for answer in alone.values()) == 14
    gauges = service.wait_idle(20)
    assert gauges["pages_used"] == gauges["tickets_open"] == gauges["staged_bytes"] == 0


def test_a_preset_by_name_reports_what_selection_did(service: Service, speech: str) -> None:
    body = chat(speech[30_000:33_000], {"recipe": "qa", "report": True}, max_tokens=4)
    usage = service.client.post("/v1/chat/completions", json=body).json()["usage"]["kv"]
    assert usage["recipe"].startswith("snapkv:b0.15:") and usage["recipe"].endswith(":ada0.2")
    report = usage["report"]
    assert report["layers"] == list(range(LAYERS))
    assert len(report["kept_mass_per_layer"]) == LAYERS
    assert all(0 < mass <= 1 for mass in report["kept_mass_per_layer"]) and report["kept_mass"] > 0.5, report
    assert 0.5 < report["budget_entropy"] < 1, "heads share a layer's budget"
    share = 0.15 * usage["prompt_tokens"]
    assert all(abs(kept - share) <= 0.5 for kept in report["kept_tokens_per_layer"]), report
    metrics = service.client.get("/metrics").text
    for name in ("kept_attention_mass", "budget_entropy"):
        assert f'kvtide_{name}_count{{policy="snapkv"}}' in metrics


def test_the_recipes_of_the_server_are_listed_with_the_users_own_policy(service: Service) -> None:
    listed = service.client.get("/v1/kv/recipes").json()
    names = {recipe["name"] for recipe in listed["recipes"]}
    assert {"auto", "summarize", "qa", "code", "chat", "snapkv:paper"} <= names
    assert listed["default"] == {"recipe": "auto"}
    assert listed["policies"][SCORER]["needs"] == "last_queries"
    assert "window" in listed["policies"][SCORER]["options"]


@pytest.mark.parametrize(
    ("kv", "field", "valid"),
    [
        ({"policy": "h2o", "budget": 64, "decode": {"rule": "h2o", "every": 0}}, "kv.decode.every", "1"),
        (
            {"policy": "h2o", "budget": 64, "decode": {"rule": "h2o", "window": 5}},
            "kv.decode.window",
            "every",
        ),
        ({"recipe": "qa", "heads": "adda"}, "kv.heads", "uniform, ada"),
        ("q&a", "kv.recipe", "summarize"),
    ],
)
def test_what_is_wrong_in_a_recipe_is_refused_by_its_name(
    service: Service, kv: object, field: str, valid: str
) -> None:
    answer = service.client.post("/v1/chat/completions", json=chat("Hello.", kv))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert field in error["message"] and valid in error["message"]
