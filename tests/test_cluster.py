"""The whole service for real: Serve, HAProxy, separate processes, NIXL, SmolLM2.

It starts once (`conftest.py: service`) for all tests/test_cluster*.py, in the order of their names: the last two kill.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from cluster_stand import LICENCE, MAX_QUEUED, MAX_SEQUENCES, Service

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("everything_is_freed")]


def test_the_printed_curl_works_when_pasted(service: Service) -> None:
    command = next(line for line in service.announced.splitlines() if line.strip().startswith("curl"))
    answer = json.loads(
        subprocess.run(command, shell=True, capture_output=True, check=True, timeout=60).stdout
    )
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_the_version_is_the_project_s_and_says_which_model(service: Service) -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    answer = service.client.get("/version").json()
    assert answer["version"] == project["version"]
    assert re.fullmatch(r"fp_[0-9a-f]{16}", answer["fingerprint"])


def test_a_chat_over_a_long_text_streams_with_usage_and_ships_little_more_than_its_survivors(
    service: Service, client: openai.OpenAI, speech: str
) -> None:
    shipped = service.gauges().get("shipped_bytes", 0)
    messages = [{"role": "user", "content": f"{speech[:25_500]}\n\nWho speaks? Answer in one sentence."}]
    chunks = list(
        client.chat.completions.create(
            model="demo", messages=messages, max_tokens=24, temperature=0, stream=True,
            stream_options={"include_usage": True}, extra_body={"kv": {"policy": "snapkv", "budget": 512}},
        )
    )  # fmt: skip
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    usage = chunks[-1].usage
    assert text and usage.completion_tokens <= 24
    assert usage.prompt_tokens > 5000 and usage.kv["kept_tokens"] == 512
    payload = 512 * 30 * 3 * 64 * 2 * 2  # tokens, layers, kv heads, head size, K and V, bfloat16
    assert usage.kv["payload_bytes"] == payload < usage.kv["shipped_bytes"] <= 1.03 * payload
    whole = (
        shipped + usage.kv["shipped_bytes"]
    )  # or more, where an earlier test's bytes had not been reported yet
    service.until(lambda: service.gauges()["shipped_bytes"] >= whole, 5, "shipped bytes in the gauges")


def test_a_second_request_over_the_same_document_reuses_its_prefix_and_says_the_same(
    client: openai.OpenAI,
) -> None:
    prompt = "Version one. " + LICENCE[:3000]
    ask = {"model": "demo", "prompt": prompt, "max_tokens": 12, "temperature": 0}
    cold = client.completions.create(**ask)

    def warm() -> openai.types.Completion | None:
        answer = client.completions.create(**ask)
        return answer if answer.usage.prompt_tokens_details.cached_tokens else None

    again = None
    for _ in range(20):  # blocks are written behind the answer, and announced within a heartbeat
        again = again or warm()
    assert (
        again is not None and again.usage.prompt_tokens_details.cached_tokens > 0.9 * cold.usage.prompt_tokens
    )
    assert again.choices[0].text == cold.choices[0].text
    salted = client.completions.create(**ask, extra_body={"cache_salt": "another tenant"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_snapkv_finds_the_passkey_that_the_full_cache_finds(client: openai.OpenAI) -> None:
    filler = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
    prompt = (
        f"{filler * 20}The pass key is 71432. Remember it. 71432 is the pass key. {filler * 25}"
        "\nWhat is the pass key? The pass key is"
    )
    for recipe in ({"policy": "full"}, {"policy": "snapkv", "budget": 256, "kernel": 13}):
        answer = client.completions.create(
            model="demo", prompt=prompt, max_tokens=8, temperature=0, extra_body={"kv": recipe}
        )
        assert "71432" in answer.choices[0].text, recipe


def test_n_choices_with_a_seed_are_the_same_alone_and_in_a_crowd(
    service: Service, client: openai.OpenAI
) -> None:
    ask = {
        "model": "demo", "prompt": "My favourite animal is", "max_tokens": 12, "temperature": 1.0, "seed": 11, "n": 3,
    }  # fmt: skip
    alone = [choice.text for choice in client.completions.create(**ask).choices]
    with ThreadPoolExecutor(5) as crowd:
        others = [
            crowd.submit(client.completions.create, model="demo", prompt=f"{i} and then", max_tokens=16, n=1 + i % 2)
            for i in range(4)
        ]  # fmt: skip
        together = [choice.text for choice in crowd.submit(client.completions.create, **ask).result().choices]
        assert all(other.result().choices for other in others)
    assert together == alone and len(set(alone)) == 3


def test_overload_is_refused_with_a_time_to_come_back(service: Service) -> None:
    body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 40, "temperature": 0}
    count = 2 * (MAX_SEQUENCES + MAX_QUEUED)  # twice what runs and waits
    limits = httpx.Limits(max_connections=count)
    with httpx.Client(base_url=service.url, timeout=120, limits=limits) as client:

        def ask(_: int) -> httpx.Response:
            return client.post("/v1/completions", json=body)

        with ThreadPoolExecutor(count) as crowd:
            answers = list(crowd.map(ask, range(count)))
    refused = [answer for answer in answers if answer.status_code in (429, 503)]
    assert refused and all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    served = [answer.json()["choices"][0]["text"] for answer in answers if answer not in refused]
    assert len(served) >= 8 and len(set(served)) == 1


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(model="demo", prompt=[1] * 8193, max_tokens=1)
    assert "8193" in str(refusal.value) and "8192" in str(refusal.value)


def test_metrics_tell_what_operators_watch(service: Service) -> None:
    text = service.client.get("/metrics").text
    for name in (
        "time_to_first_token_seconds_bucket", "inter_token_seconds_bucket", "queue", "running", "pages_used",
        "pages_total", "kept_tokens", "shipped_bytes", "tickets_open", "pages_owed",
    ):  # fmt: skip
        assert f"kvtide_{name}" in text, name
    service.until(lambda: service.gauges()["shipped_bytes"] > 0, 5, "shipped bytes in the gauges")


def test_logs_carry_request_ids_and_no_prompts(service: Service) -> None:
    secret = "xyzzy plugh"
    headers = {"x-request-id": "look-for-me-42"}
    body = {"model": "demo", "prompt": f"The word is {secret}", "max_tokens": 2}
    answer = service.client.post("/v1/completions", json=body, headers=headers)
    assert answer.headers["x-request-id"] == "look-for-me-42"
    service.until(lambda: "look-for-me-42" in service.logs(), 10, "request id in the log")
    assert secret not in service.logs()


def test_a_client_that_leaves_frees_everything(service: Service) -> None:
    lines: list[str] = []

    def leave_early() -> None:
        body = {
            "model": "demo",
            "prompt": LICENCE[:2000],
            "max_tokens": 900,
            "stream": True,
            "temperature": 0,
        }
        with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                if len(lines) > 6:
                    return

    leave_early()
    left = time.monotonic()
    service.wait_idle(20)
    # It ends within a second; gauges are a second old at most, and the machine may be busy.
    assert time.monotonic() - left < 6


def test_a_client_that_leaves_during_prefill_frees_everything(service: Service, speech: str) -> None:
    before, prefilled = service.outcomes(), service.gauges()["prefilled_tokens"]
    body = {"model": "demo", "prompt": speech[:28_000], "max_tokens": 5, "cache_salt": "never seen"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{service.url}/v1/completions", json=body, timeout=1.5)
    left = time.monotonic()
    service.wait_idle(20)
    assert time.monotonic() - left < 6
    assert service.outcomes()["disconnected"] == before.get("disconnected", 0) + 1
    # Some 6,000 tokens; the gauge was a second old at the start and may have owed the prompt of the test before.
    assert service.gauges()["prefilled_tokens"] < prefilled + 3000, "it was computed to its end for nobody"


def test_a_client_that_does_not_read_is_cut_off_and_holds_nobody_up(
    service: Service, client: openai.OpenAI
) -> None:
    before = service.outcomes().get("slow_reader", 0)
    # Echoed prompts with their logprobs: some nine megabytes, more than the sockets and HAProxy on the way hold.
    body = json.dumps(
        {
            "model": "demo",
            "prompt": [LICENCE[:3000]] * 3,
            "max_tokens": 16,
            "n": 7,
            "stream": True,
            "echo": True,
            "logprobs": 20,
        }
    )
    head = (
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        # Small segments: HAProxy's socket to us would otherwise hold megabytes as well.
        deaf.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        deaf.connect(("127.0.0.1", service.port))
        deaf.sendall(("\r\n".join((*head, "", "")) + body).encode())
        service.until(lambda: service.gauges().get("active_requests") == 3, 10, "requests of the deaf client")
        answer = client.completions.create(
            model="demo", prompt="The capital of France is", max_tokens=3, temperature=0
        )
        assert "Paris" in answer.choices[0].text
        service.until(lambda: service.outcomes().get("slow_reader", 0) > before, 30, "cut-off")
        service.wait_idle(10)
