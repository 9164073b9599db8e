"""Lossy codecs at rest as users meet them: options, a request's `kv.at_rest`, what the answer and the figures say."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest
from api_stub import StubBackend, application, chat, client, complete, say_hello
from pydantic import ValidationError

from deployments.api.backend import TierReport
from deployments.api.tiers import _report_body
from deployments.config import AppArgs, resolve
from deployments.tiers_view import table
from engine.request import Event, GenerationRequest, PromptEvent
from kv_tiers.at_rest import AtRest

KEPT = ("exact", "int8")


async def half_lossy(request: GenerationRequest) -> AsyncGenerator[list[Event], None]:
    """One of the two cached tokens came from a lossy block, where that is allowed."""
    async for batch in say_hello(request):
        yield [
            replace(event, lossy_tokens=int(request.at_rest > 0)) if isinstance(event, PromptEvent) else event
            for event in batch
        ]


@pytest.mark.parametrize("send", [chat, complete])
async def test_a_request_that_allows_lossy_blocks_is_told_how_many_tokens_came_of_them(send) -> None:
    backend = StubBackend(half_lossy)
    app = application(backend, at_rest=KEPT)
    body = (await send(app, kv={"at_rest": "int8", "policy": "full"})).json()
    assert backend.requests[0].at_rest is AtRest.INT8 and backend.requests[0].recipe.policy == "full"
    assert body["usage"]["kv"]["lossy_tokens"] == 1
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    for kv in (None, {"at_rest": "exact"}, {"at_rest": None}, "auto"):
        plain = (await send(app, **({} if kv is None else {"kv": kv}))).json()
        assert backend.requests[-1].at_rest is AtRest.EXACT and "lossy_tokens" not in plain["usage"]["kv"]


@pytest.mark.parametrize("value", ["int4", "INT8", "", 8, True, ["int8"], {"codec": "int8"}])
async def test_what_no_tier_keeps_is_refused_by_name(value) -> None:
    backend = StubBackend()
    response = await chat(application(backend, at_rest=KEPT), kv={"at_rest": value})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "kv.at_rest")
    assert "valid: exact, int8" in error["message"] and not backend.requests


@pytest.mark.parametrize(
    ("given", "hint"),
    [("atrest", ", did you mean at_rest?"), ("reports", ", did you mean report?"), ("zzz", "")],
)
async def test_an_unknown_field_is_told_from_all_that_there_are(given: str, hint: str) -> None:
    error = (await chat(application(StubBackend(), at_rest=KEPT), kv={given: "int8"})).json()["error"]
    assert error["param"] == f"kv.{given}"
    assert error["message"].startswith(f"kv.{given}: unknown field{hint}; valid: recipe, policy, ")
    assert error["message"].endswith(", report, at_rest.")


async def test_a_server_without_lossy_tiers_takes_exact_only_and_the_catalogue_says_so() -> None:
    response = await chat(application(StubBackend()), kv={"at_rest": "int8"})
    assert "valid: exact." in response.json()["error"]["message"]
    for kept, valid in ((("exact",), "exact"), (KEPT, "exact, int8")):
        async with client(application(StubBackend(), at_rest=kept)) as http:
            fields = (await http.get("/v1/kv/recipes")).json()["fields"]
        assert fields["at_rest"] == {"default": "exact", "valid": valid}


def test_options_say_which_codecs_there_are() -> None:
    args = AppArgs(nvme_tier_gib=1, nvme_tier_codec="int4", redis_url="redis://h", redis_tier_codec="fp8")
    assert args.api_settings().at_rest == ("exact", "fp8", "int4")
    assert [plan.codec for plan in resolve(args).tiers] == ["exact", "int4", "fp8"]
    assert AppArgs().api_settings().at_rest == ("exact",)
    off = AppArgs(nvme_tier_codec="int8", redis_tier_codec="int8")
    assert off.api_settings().at_rest == ("exact",), "of tiers that there are"
    warnings = " ".join(resolve(off).tier_warnings)
    assert "nvme_tier_codec has no effect" in warnings and "redis_tier_codec has no effect" in warnings
    with pytest.raises(ValidationError, match="'exact', 'fp8', 'int8' or 'int4'"):
        AppArgs(nvme_tier_codec="int2")


def test_figures_name_the_codec() -> None:
    figures = {"blocks": 3.0, "capacity": 9.0, "slot_bytes": 4096.0}
    tiers = {"cpu": {**figures, "codec": 0.0}, "nvme": {**figures, "codec": 2.0}}
    body = _report_body(TierReport({"a": tiers}, None, 1, ()))
    shown = {tier["tier"]: tier["codec"] for tier in body["nodes"][0]["tiers"]}
    assert shown == {"cpu": "exact", "nvme": "int8"}
    lines = table(body).splitlines()
    assert "nvme int8" in lines[2] and "exact" not in table(body)
