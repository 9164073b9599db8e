"""Health, readiness, versions, models, metrics, request ids, keys and the access log."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from api_stub import MODEL, StubBackend, application, chat, client, complete, fail, make_card, post
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from pydantic import ValidationError

from deployments.api.backend import Readiness
from deployments.api.metrics import ApiMetrics, RequestMeter
from deployments.api.settings import ApiSettings
from engine.errors import Overloaded
from engine.request import PromptEvent, TokenEvent


async def metrics_of(app) -> str:  # type: ignore[no-untyped-def]
    async with client(app) as http:
        response = await http.get("/metrics")
    assert response.status_code == 200
    return response.text


async def test_health_is_about_this_process_and_ready_about_the_backend() -> None:
    backend = StubBackend(readiness=Readiness(False, {"prefill": "0 of 1"}))
    async with client(application(backend)) as http:
        assert (await http.get("/health")).status_code == 200
        response = await http.get("/ready")
        assert response.status_code == 503
        assert response.json() == {"ready": False, "detail": {"prefill": "0 of 1"}}
        assert "retry-after" in response.headers
        backend.readiness = Readiness(True, {})
        assert (await http.get("/ready")).status_code == 200


async def test_a_backend_that_raises_or_hangs_is_not_ready() -> None:
    class Hanging(StubBackend):
        async def ready(self) -> Readiness:
            await asyncio.Event().wait()
            return self.readiness

    for backend in (StubBackend(trouble=RuntimeError("secret")), Hanging()):
        async with client(application(backend, probe_timeout_s=0.02)) as http:
            response = await http.get("/ready")
        assert response.status_code == 503
        assert "secret" not in response.text


async def test_version_and_models_describe_the_card() -> None:
    async with client(application(StubBackend())) as http:
        assert (await http.get("/version")).json() == {"version": "1.2.3", "fingerprint": "fp_tiny"}
        listed = (await http.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["tiny", "org/tiny"]
        assert (await http.get("/v1/models/org/tiny")).json()["max_model_len"] == 64
        missing = await http.get("/v1/models/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_every_served_name_is_accepted_and_answers_carry_the_first() -> None:
    assert (await chat(application(StubBackend()), model="org/tiny")).json()["model"] == "tiny"


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405)]
)
async def test_errors_of_the_http_layer_have_openais_shape(method: str, path: str, status: int) -> None:
    async with client(application(StubBackend())) as http:
        response = await http.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_a_request_id_is_taken_from_the_client_and_returned() -> None:
    app = application(StubBackend())
    body = {"model": MODEL, "prompt": "x"}
    given = await post(app, "/v1/completions", body, **{"x-request-id": "abc-1/2"})
    assert given.headers["x-request-id"] == "abc-1/2"
    drawn = [(await post(app, "/v1/completions", body)).headers["x-request-id"] for _ in range(2)]
    assert len(set(drawn)) == 2


async def test_two_requests_with_one_id_stay_apart_in_the_engine() -> None:
    backend = StubBackend()
    app = application(backend)
    for _ in range(2):
        await post(app, "/v1/completions", {"model": MODEL, "prompt": "x"}, **{"x-request-id": "same"})
    assert len({request.request_id for request in backend.requests}) == 2


@pytest.mark.parametrize("bad", ["a b", "x" * 129, 'a"b'])
async def test_a_request_id_that_could_hurt_a_log_is_refused(bad: str) -> None:
    body = {"model": MODEL, "prompt": "x"}
    response = await post(application(StubBackend()), "/v1/completions", body, **{"x-request-id": bad})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "x-request-id"
    assert response.headers["x-request-id"] != bad


async def test_the_key_guards_v1_and_nothing_else() -> None:
    app = application(StubBackend(), api_key="secret")
    async with client(app) as http:
        refusal = await http.get("/v1/models")
        assert refusal.status_code == 401
        assert refusal.json()["error"]["code"] == "invalid_api_key"
        assert refusal.headers["www-authenticate"] == "Bearer"
        assert "x-request-id" in refusal.headers
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/metrics")).status_code == 200
        for bad in ("Bearer wrong", "secret", "Bearer secret ", "Basic secret"):
            allowed = await http.get("/v1/models", headers={"authorization": bad})
            assert allowed.status_code == (
                200 if bad.strip() == "Bearer secret" and bad == bad.strip() else 401
            )
        good = await http.get("/v1/models", headers={"authorization": "Bearer secret"})
        assert good.status_code == 200


def test_the_key_does_not_show_in_the_settings_text() -> None:
    assert "hunter2" not in repr(ApiSettings(api_key="hunter2"))  # type: ignore[arg-type]


def test_settings_refuse_unknown_names_and_values_out_of_bounds() -> None:
    with pytest.raises(ValidationError):
        ApiSettings(max_bodybytes=5)  # type: ignore[call-arg]
    with pytest.raises(ValidationError):
        ApiSettings(slow_reader_timeout_s=0)


@pytest.mark.parametrize(
    "changes", [{"names": ()}, {"names": ("",)}, {"context_length": 1}, {"max_prompt_tokens": 0}]
)
def test_a_card_that_describes_no_model_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        make_card(**changes)


async def test_metrics_count_tokens_bytes_and_outcomes() -> None:
    backend = StubBackend()
    app = application(backend)
    await complete(app, prompt=[5, 6, 7], n=2)
    await complete(app, prompt="")
    backend.script = fail(Overloaded("full"))
    await complete(app)
    text = await metrics_of(app)
    for line in (
        "kvtide_request_prompt_tokens_total 3.0",
        "kvtide_request_generated_tokens_total 4.0",
        "kvtide_request_cached_tokens_total 2.0",
        "kvtide_request_kept_tokens_total 3.0",
        "kvtide_request_shipped_bytes_total 128.0",
        'kvtide_requests_total{endpoint="completions",outcome="ok"} 1.0',
        'kvtide_requests_total{endpoint="completions",outcome="invalid"} 1.0',
        'kvtide_requests_total{endpoint="completions",outcome="overloaded"} 1.0',
        "kvtide_time_to_first_token_seconds_count 1.0",
        "kvtide_inter_token_seconds_count 2.0",
        'kvtide_request_seconds_count{endpoint="completions"} 3.0',
        "kvtide_requests_in_flight 0.0",
    ):
        assert line in text


async def test_a_mid_stream_failure_counts_as_failed() -> None:
    app = application(StubBackend(fail(RuntimeError("x"), [TokenEvent(0, 0, 5, "a")])))
    await chat(app, stream=True)
    assert 'kvtide_requests_total{endpoint="chat",outcome="failed"} 1.0' in await metrics_of(app)


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = application(StubBackend())
    arriving = [
        {"type": "http.request", "body": b'{"model": "ti', "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent = []

    async def receive() -> dict[str, object]:
        return arriving.pop(0)

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    await app(scope, receive, send)
    assert sent == [], "nobody is there to read an answer"
    text = await metrics_of(app)
    assert 'kvtide_requests_total{endpoint="completions",outcome="disconnected"} 1.0' in text
    assert 'outcome="failed"' not in text and not [r for r in caplog.records if r.levelno >= logging.ERROR]


async def test_gauges_of_replicas_are_rendered_per_source_and_vanish_with_it() -> None:
    backend = StubBackend(gauges={"decode-0": {"running": 2, "pages_used": 10}, "decode-1": {"running": 0}})
    app = application(backend)
    text = await metrics_of(app)
    assert 'kvtide_running{source="decode-0"} 2.0' in text
    assert 'kvtide_running{source="decode-1"} 0.0' in text
    assert "# HELP kvtide_pages_used Pages of the decode pool that hold KV." in text
    backend.gauges = {"decode-1": {"running": 1}}
    text = await metrics_of(app)
    assert "decode-0" not in text
    backend.trouble = RuntimeError("down")
    text = await metrics_of(app)
    assert "decode-1" not in text, "old gauges would lie"
    assert "kvtide_stats_failures_total 1.0" in text


async def test_what_replicas_report_never_shares_a_name_with_what_we_count() -> None:
    metrics = ApiMetrics()
    metrics.replicas.report = {
        "Decode:a": dict.fromkeys(("kept_tokens", "shipped_bytes", "generated_tokens"), 1.0)
    }
    strict = generate_latest(
        metrics.registry
    ).decode()  # OpenMetrics: a counter's name goes without its _total
    names = [family.name for family in text_string_to_metric_families(strict)]
    assert len(set(names)) == len(names) and "kvtide_kept_tokens" in names


async def test_applications_do_not_share_metrics() -> None:
    first, second = application(StubBackend()), application(StubBackend())
    await chat(first)
    assert 'outcome="ok"' not in await metrics_of(second)


def test_tokens_that_arrive_together_share_their_gap() -> None:
    now = 0.0
    metrics = ApiMetrics(clock=lambda: now)
    meter = RequestMeter(metrics, "chat", "r")
    now = 2.0
    meter.observe(0, [PromptEvent(5, 0, 5, 0, 0, "full"), TokenEvent(0, 0, 5, "a")])
    now = 5.0
    meter.observe(0, [TokenEvent(0, i, 5, "a") for i in (1, 2, 3)])
    value = metrics.registry.get_sample_value
    assert value("kvtide_time_to_first_token_seconds_sum") == 2.0
    assert value("kvtide_inter_token_seconds_sum") == 3.0
    assert value("kvtide_inter_token_seconds_count") == 3.0


async def test_the_log_has_counts_and_ids_but_no_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="kvtide.api")
    app = application(StubBackend())
    body = {"model": MODEL, "prompt": "my secret question", "user": "secret user"}
    await post(app, "/v1/completions", body, **{"x-request-id": "abc"})
    (record,) = [json.loads(r.getMessage()) for r in caplog.records if r.name == "kvtide.api.access"]
    assert record["request_id"] == "abc"
    assert record["answer_id"].startswith("cmpl-")
    assert (record["outcome"], record["completion_tokens"]) == ("ok", 2)
    assert record["first_token_s"] <= record["total_s"]
    assert "secret" not in caplog.text


@pytest.mark.parametrize("bad", ["", "x" * 257, 5])
async def test_a_wrong_cache_salt_is_refused_by_name(bad: object) -> None:
    for ask in (chat, complete):
        answer = await ask(application(StubBackend()), cache_salt=bad)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "cache_salt"
