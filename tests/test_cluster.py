"""The whole service for real: Serve, HAProxy, separate processes, NIXL, SmolLM2. One start for all tests.

The order matters where a test kills something: those stand last.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from cluster_stand import Service, sse

pytestmark = pytest.mark.timeout(240)
LICENCE = (Path(__file__).parents[1] / "LICENSE").read_text()
SNAPKV = {"policy": "snapkv", "budget": 128}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Service]:
    log = tmp_path_factory.mktemp("service") / "serve.log"
    service = Service(
        log, "max_sequences=8", "max_queued=24", "pool_gib=0.5", "cpu_tier_gib=0.5", "ticket_ttl_s=8",
        "slow_reader_timeout_s=5", "max_context=4096", "deadline_s=90",
    )  # fmt: skip
    try:
        service.announced = service.wait_announced()
        yield service
    finally:
        service.stop()


@pytest.fixture(scope="module")
def client(service: Service) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(autouse=True)
def everything_is_freed(request: pytest.FixtureRequest, service: Service) -> Iterator[None]:
    yield
    service.wait_idle(40)


def stream_lines(service: Service, lines: list[str], **body: object) -> None:
    """POST a streamed completion and append its lines as they come."""
    full = {"model": "demo", "stream": True, "temperature": 0, **body}
    with httpx.stream("POST", f"{service.url}/v1/completions", json=full, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        lines.extend(())
        for line in answer.iter_lines():
            lines.append(line)


def test_the_printed_curl_works_when_pasted(service: Service) -> None:
    import subprocess

    command = next(line for line in service.announced.splitlines() if line.strip().startswith("curl"))
    answer = json.loads(
        subprocess.run(command, shell=True, capture_output=True, check=True, timeout=60).stdout
    )
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_a_chat_streams_and_ends_with_done_and_usage(client: openai.OpenAI) -> None:
    messages = [
        {"role": "user", "content": f"{LICENCE[:4000]}\n\nWhat is this text? Answer in one sentence."}
    ]
    chunks = list(
        client.chat.completions.create(
            model="demo", messages=messages, max_tokens=24, temperature=0, stream=True,
            stream_options={"include_usage": True}, extra_body={"kv": SNAPKV},
        )
    )  # fmt: skip
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    usage = chunks[-1].usage
    assert "License" in text or "licen" in text.lower()
    assert usage.completion_tokens <= 24 and usage.kv["kept_tokens"] == 128 < usage.prompt_tokens
    assert usage.kv["payload_bytes"] == 128 * 30 * 3 * 64 * 2 * 2
    assert usage.kv["payload_bytes"] < usage.kv["shipped_bytes"]


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
    body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 60, "temperature": 0}

    def ask(_: int) -> httpx.Response:
        return httpx.post(f"{service.url}/v1/completions", json=body, timeout=120)

    with ThreadPoolExecutor(48) as crowd:
        answers = list(crowd.map(ask, range(48)))
    refused = [answer for answer in answers if answer.status_code in (429, 503)]
    assert refused and all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert all(answer.status_code == 200 for answer in answers if answer not in refused)


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(model="demo", prompt=[1] * 4097, max_tokens=1)
    assert "4097" in str(refusal.value) and "4096" in str(refusal.value)


def test_metrics_tell_what_operators_watch(service: Service) -> None:
    text = service.client.get("/metrics").text
    for name in (
        "time_to_first_token_seconds_bucket", "inter_token_seconds_bucket", "queue", "running", "pages_used",
        "pages_total", "kept_tokens", "shipped_bytes", "tickets_open", "pages_owed",
    ):  # fmt: skip
        assert f"kvtide_{name}" in text, name
    assert service.gauges()["shipped_bytes"] > 0


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


def test_a_client_that_leaves_during_prefill_frees_everything(service: Service) -> None:
    body = {"model": "demo", "prompt": LICENCE[:11000], "max_tokens": 5, "cache_salt": "never seen"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{service.url}/v1/completions", json=body, timeout=1.0)
    left = time.monotonic()
    service.wait_idle(20)
    assert time.monotonic() - left < 6


def test_clients_that_do_not_read_hold_nobody_up(service: Service, client: openai.OpenAI) -> None:
    body = json.dumps(
        {"model": "demo", "prompt": "Count: 1 2 3", "max_tokens": 80, "stream": True, "temperature": 0}
    )
    lines = (
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    head = "\r\n".join((*lines, "", ""))
    deaf = []
    for _ in range(20):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        sock.connect(("127.0.0.1", service.port))
        sock.sendall((head + body).encode())
        deaf.append(sock)
    answer = client.completions.create(
        model="demo", prompt="The capital of France is", max_tokens=3, temperature=0
    )
    assert "Paris" in answer.choices[0].text
    service.wait_idle(60)
    for sock in deaf:
        sock.close()


def test_the_cache_survives_the_death_of_directory_and_prefill(
    service: Service, client: openai.OpenAI
) -> None:
    prompt = "Version two. " + LICENCE[:2500]
    ask = {"model": "demo", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    cold = client.completions.create(**ask)
    service.until(lambda: service.gauges().get("spills_running") == 0, 10, "finished spill")
    service.kill(service.actor("DirectoryActor"))
    assert (
        client.completions.create(**ask).choices[0].text == cold.choices[0].text
    )  # at worst everything is a miss
    service.kill(service.replica("Prefill"))

    def warm() -> openai.types.Completion | None:
        answer = client.completions.create(**ask)
        assert answer.choices[0].text == cold.choices[0].text
        return answer if answer.usage.prompt_tokens_details.cached_tokens else None

    service.until(warm, 60, "cached prefix after the restarts")


def test_a_prefill_replica_killed_during_a_prefill_does_not_lose_the_request(service: Service) -> None:
    lines: list[str] = []
    ask = {"prompt": LICENCE[:8000], "max_tokens": 8, "cache_salt": "killed prefill"}
    thread = threading.Thread(target=stream_lines, args=(service, lines), kwargs=ask)
    thread.start()
    service.until(lambda: service.gauges().get("prefill_tokens_owed", 0) > 0, 20, "running prefill")
    service.kill(service.replica("Prefill"))
    thread.join(120)
    events = sse(lines)
    assert events[-1] == "[DONE]"
    assert (
        sum(bool(json.loads(e)["choices"][0]["text"]) for e in events[:-1] if json.loads(e)["choices"]) >= 1
    )
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"


def test_a_decode_replica_killed_in_mid_stream_ends_the_stream_visibly(
    service: Service, client: openai.OpenAI
) -> None:
    lines: list[str] = []
    ask = {"prompt": LICENCE[:1500], "max_tokens": 600}
    thread = threading.Thread(target=stream_lines, args=(service, lines), kwargs=ask)
    thread.start()
    service.until(lambda: len(sse(lines)) > 5, 60, "tokens")
    service.kill(service.replica("Decode"))
    thread.join(60)
    assert json.loads(sse(lines)[-1])["error"]["code"] == "replica_lost"

    def answers() -> bool:
        try:
            return bool(client.completions.create(model="demo", prompt="Hello", max_tokens=2).choices)
        except openai.APIStatusError:
            return False

    service.until(answers, 90, "answer of the next decode replica")
