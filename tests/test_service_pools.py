"""What stands between the services and Ray: retries over dead replicas, reports, the model card."""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from service_stand import ask

from deployments.config import AppArgs
from deployments.replicas import DecodePool, PrefillPool
from deployments.served_model import folder_fingerprint, model_card, version
from deployments.service import app
from deployments.telemetry import report_for_ever, require_running
from engine.errors import GenerationFailed, Overloaded, ReplicaLost
from engine.request import GenerationRequest

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def full() -> BackPressureError:
    return BackPressureError(num_queued_requests=9, max_queued_requests=9)


class Handle:
    """A deployment handle whose calls do what `script` says, one entry per call: events, or an exception."""

    def __init__(self, *script: list[Any]) -> None:
        self.script = list(script)
        self.asked: list[GenerationRequest] = []
        self.stages: list[bool] = []
        self.cancelled = 0

    def options(self, **options: bool) -> Handle:
        assert options in ({"stream": True}, {"_by_reference": True})
        return self

    @property
    def generate(self) -> Handle:
        return self

    prefill = generate

    def remote(self, request: GenerationRequest, *, stage: bool = False) -> Response:
        self.asked.append(request)
        self.stages.append(stage)
        return Response(self, self.script.pop(0))


class Response:
    def __init__(self, handle: Handle, items: list[Any]) -> None:
        self.handle = handle
        self.items = items

    async def __aiter__(self):
        for item in self.items:
            yield await self._value(item)

    def __await__(self):
        return self._value(self.items[0]).__await__()

    async def _value(self, item: Any) -> Any:
        if isinstance(item, Exception):
            raise item
        if callable(item):
            return await item()
        return item

    def cancel(self) -> None:
        self.handle.cancelled += 1


async def collect(handle: Handle, attempts: int = 3) -> list[Any]:
    pool = DecodePool(handle, attempts, lambda: None)
    return [batch async for batch in pool.generate(ask())]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = asyncio.sleep
    monkeypatch.setattr("deployments.replicas.asyncio.sleep", lambda s: sleep(0))


@pytest.mark.parametrize("loss", [RayActorError(), ReplicaLost("closing")], ids=["died", "said so"])
async def test_a_decode_replica_lost_before_its_first_event_is_replaced_unseen(loss):
    handle = Handle([loss], [loss], ["one", "two"])
    assert await collect(handle) == ["one", "two"]
    assert [request.attempt for request in handle.asked] == [0, 1000, 2000]


@pytest.mark.parametrize("loss", [RayActorError(), ReplicaLost("closing")], ids=["died", "said so"])
async def test_a_decode_replica_lost_in_mid_stream_or_too_often_is_an_error(loss):
    handle = Handle(["one", loss])
    with pytest.raises(ReplicaLost):
        await collect(handle)
    assert len(handle.asked) == 1
    with pytest.raises(ReplicaLost):
        await collect(Handle([loss], [loss]), attempts=2)


async def test_a_full_queue_is_overload_and_other_errors_pass_unchanged():
    with pytest.raises(Overloaded) as refused:
        await collect(Handle([full()]))
    assert refused.value.retry_after_s >= 1
    with pytest.raises(Overloaded):
        await PrefillPool(Handle([full()])).prefill(ask(), stage=False)
    handle = Handle([GenerationFailed("no")])
    with pytest.raises(GenerationFailed):
        await collect(handle)
    assert len(handle.asked) == 1


async def test_a_prefill_replica_that_died_is_lost_and_a_cancelled_call_is_cancelled_there():
    with pytest.raises(ReplicaLost):
        await PrefillPool(Handle([RayActorError()])).prefill(ask(), stage=False)
    handle = Handle([asyncio.Event().wait])
    call = asyncio.create_task(PrefillPool(handle).prefill(ask(), stage=True))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert call.cancelled() and handle.cancelled == 1 and handle.stages == [True]


def test_serve_queues_no_more_for_a_dead_pool_than_the_living_one_takes():
    gateway = app(AppArgs(max_sequences=8, max_queued=24, decode_replicas=2, prefill_replicas=3))
    decode = gateway._bound_deployment.init_args[1]._bound_deployment
    prefill = decode.init_args[1]._bound_deployment
    assert (decode.name, decode.max_queued_requests) == ("Decode", 2 * (8 + 24))
    assert (prefill.name, prefill.max_queued_requests) == ("Prefill", 3 * 24)


async def test_reports_that_fail_show_in_health(monkeypatch):
    reports: list[Any] = []

    class Directory:
        async def report(self, *report):
            reports.append(report)

    monkeypatch.setattr("deployments.telemetry.DirectoryClient", lambda application: Directory())
    monkeypatch.setattr("deployments.telemetry.HEARTBEAT_S", 0.0)
    fail = False

    def gauges() -> dict[str, float]:
        if fail:
            raise ZeroDivisionError
        return {"queue": 0.0}

    telling = asyncio.create_task(report_for_ever("app", "Decode:1", gauges))
    while len(reports) < 3:
        await asyncio.sleep(0)
    require_running(telling)
    fail = True
    await asyncio.gather(telling, return_exceptions=True)
    with pytest.raises(RuntimeError, match="telemetry task died: ZeroDivisionError"):
        require_running(telling)


def test_the_model_card_says_version_and_fingerprint(smollm2_path):
    card = model_card(AppArgs(max_context=4096))
    assert card.version == version() == PROJECT["version"]
    assert card.fingerprint == folder_fingerprint(smollm2_path)
    assert card.names == ("demo",) and card.context_length == card.max_prompt_tokens == 4096


def test_a_fingerprint_is_of_contents_not_of_times_and_places(tmp_path):
    def folder(name: str, config: str = "{}", weights: bytes = b"w" * 200_000):
        path = tmp_path / name
        path.mkdir()
        (path / "config.json").write_text(config)
        (path / "model.safetensors").write_bytes(weights)
        return folder_fingerprint(path)

    first = folder("a")
    assert first.startswith("fp_") and first == folder("b")
    others = [
        folder("c", config="{ }"),
        folder("d", weights=b"w" * 200_001),
        folder("e", weights=b"w" * 199_999 + b"v"),
    ]
    assert len({first, *others}) == 4
