"""The whole service for real: Serve, HAProxy, separate processes, NIXL, SmolLM2. One start for all tests.

The order matters where a test kills something: those stand last.
"""

from __future__ import annotations

import json
import lzma
import re
import socket
import subprocess
import threading
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from cluster_stand import Service, sse

pytestmark = pytest.mark.timeout(240)
LICENCE = (Path(__file__).parents[1] / "LICENSE").read_text()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Service]:
    log = tmp_path_factory.mktemp("service") / "serve.log"
    service = Service(
        log, "max_sequences=8", "max_queued=24", "pool_gib=0.5", "cpu_tier_gib=0.5", "ticket_ttl_s=8",
        "slow_reader_timeout_s=3", "max_context=8192", "deadline_s=90", "threads=1",
    )  # fmt: skip
    try:
        service.announced = service.wait_announced()
        yield service
    finally:
        service.stop()


@pytest.fixture(scope="module")
def client(service: Service) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def speech() -> str:
    """State of the Union addresses, four to five characters a token."""
    with lzma.open(Path(__file__).parents[1] / "benchmarks/data/state_of_the_union.txt.xz", "rt") as file:
        return file.read(100_000)


@pytest.fixture(autouse=True)
def everything_is_freed(request: pytest.FixtureRequest, service: Service) -> Iterator[None]:
    yield
    service.wait_idle(40)


def stream_lines(service: Service, lines: list[str], **body: object) -> None:
    """POST a streamed completion and append its lines as they come."""
    full = {"model": "demo", "stream": True, "temperature": 0, **body}
    with httpx.stream("POST", f"{service.url}/v1/completions", json=full, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            lines.append(line)


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
    count = 64  # twice what runs and waits
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
    # Echoed prompts with their logprobs: some megabytes, more than the sockets and HAProxy on the way hold.
    body = json.dumps(
        {
            "model": "demo",
            "prompt": [LICENCE] * 3,
            "max_tokens": 16,
            "n": 7,
            "stream": True,
            "echo": True,
            "logprobs": 5,
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


def test_a_prefill_replica_killed_during_a_prefill_does_not_lose_the_request(
    service: Service, speech: str
) -> None:
    def lost() -> int:
        return len(re.findall(r"prefill of \S+ was lost, attempt 0", service.logs()))

    lines: list[str] = []
    before = lost()
    ask = {"prompt": speech[:16_000], "max_tokens": 8, "cache_salt": "killed prefill"}
    thread = threading.Thread(target=stream_lines, args=(service, lines), kwargs=ask)
    thread.start()
    service.until(lambda: service.gauges().get("prefill_tokens_owed", 0) > 0, 20, "running prefill")
    service.kill(service.replica("Prefill"))
    thread.join(120)
    events = [json.loads(event) for event in sse(lines) if event != "[DONE]"]
    assert sse(lines)[-1] == "[DONE]"
    assert any(event["choices"][0]["text"] for event in events)
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert lost() > before, "it had been answered before the kill"


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


def test_a_pool_without_a_live_replica_refuses_beyond_what_it_could_take(service: Service) -> None:
    count = 3 * (8 + 24)
    body = {"model": "demo", "prompt": "Hello", "max_tokens": 1}
    service.kill(service.replica("Decode"))
    with httpx.Client(
        base_url=service.url, timeout=120, limits=httpx.Limits(max_connections=count)
    ) as client:

        def ask(_: int) -> tuple[int, float, str]:
            begun = time.monotonic()
            answer = client.post("/v1/completions", json=body)
            return answer.status_code, time.monotonic() - begun, answer.headers.get("retry-after", "")

        with ThreadPoolExecutor(count) as crowd:
            answers = list(crowd.map(ask, range(count)))
    refused = [(seconds, retry) for status, seconds, retry in answers if status in (429, 503)]
    assert len(refused) >= count - 2 * (8 + 24), answers
    assert all(seconds < 8 and int(retry) >= 1 for seconds, retry in refused), refused
    assert any(status == 200 for status, _, _ in answers), "those that were queued are served in the end"
