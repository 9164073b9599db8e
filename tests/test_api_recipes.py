"""Recipes at the edge: what `kv` may say, what becomes of it on a prompt, and what the answer tells about it."""

from __future__ import annotations

import pytest
from api_stub import MODEL, StubBackend, application, chat, client, complete, events_of, make_card

from deployments.api.card import ModelCard
from deployments.api.recipes import RecipeBook, make_book
from engine.request import GenerationRequest
from policies.recipe import FIELDS, Recipe, make_recipe
from policies.recipe_options import OPTIONS

ROOMY = {"context_length": 200_000, "max_prompt_tokens": 200_000}
TAIL = 13  # tokens of "<|im_end|>\n<|im_start|>assistant\n"
QUESTION = "What was in the box that came on Monday, and who sent it?"
CHAT = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "x" * 200},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": QUESTION},
]

TOVA = {"policy": "tova", "budget": 512, "recent": 0, "sinks": 0, "decode": "tova"}
SMALL = {"policy": "snapkv", "budget": 40, "window": 8}
H2O = {"recipe": "h2o:kvpress", "budget": 0.25}


def card_with(
    recipe: str = "auto", recipes: dict[str, dict[str, object]] | None = None, **fields: object
) -> ModelCard:
    return make_card(recipes=make_book(recipe, fields, recipes or {}), **ROOMY)


async def asked(card: ModelCard, **fields: object) -> GenerationRequest:
    """The engine's request of a chat, or of a completion where there is a prompt."""
    backend = StubBackend()
    send = complete if "prompt" in fields else chat
    given = fields if "prompt" in fields else {"messages": CHAT, **fields}
    response = await send(application(backend, card), **given)
    assert response.status_code == 200, response.text
    return backend.requests[0]


async def refusal(card: ModelCard, **fields: object) -> tuple[str, str]:
    send = complete if "prompt" in fields else chat
    response = await send(application(StubBackend(), card), **fields)
    assert response.status_code == 400, response.text
    return response.json()["error"]["param"], response.json()["error"]["message"]


def text(card: ModelCard, request: GenerationRequest, ranges: tuple[tuple[int, int], ...]) -> list[str]:
    return [card.decode(list(request.prompt[start:stop])) for start, stop in ranges]


@pytest.mark.parametrize(
    ("default", "kv", "expected"),
    [
        ({}, None, {"policy": "full"}),
        ({}, {"policy": "snapkv", "budget": 512, "kernel": 13}, {"policy": "snapkv", "budget": 512}),
        ({}, {"policy": "snapkv"}, {"policy": "snapkv", "budget": 1024}),
        ({}, {"budget": 100}, {"policy": "snapkv", "budget": 100}),
        ({}, {"kernel": 5}, {"policy": "full"}),
        ({}, {"decode": {"rule": "tova", "budget": 50}}, {"decode": {"rule": "tova", "budget": 50}}),
        ({}, {"policy": "h2o", "budget": "3kB"}, {"policy": "h2o", "budget": "3000B"}),
        ({}, "tova:paper", TOVA),
        ({}, {"recipe": "tova:paper", "budget": 90, "decode": None}, {**TOVA, "budget": 90}),
        (SMALL, None, SMALL),
        (SMALL, {"budget": 50}, {**SMALL, "budget": 50}),
        (SMALL, {"policy": "full"}, {"policy": "full"}),
        (SMALL, "knorm:kvpress", {"policy": "knorm", "budget": 0.5, "sinks": 0}),
        ({"policy": "knorm", "heads": "ada", "alpha": 0.5}, {"heads": "uniform"}, {"policy": "knorm"}),
        (H2O, {"recent": 9}, {"policy": "h2o", "budget": 0.25, "recent": 9, "sinks": 0}),
        (
            {"heads": "ada", "alpha": 0.5},
            {"heads": "uniform", "budget": 70},
            {"policy": "snapkv", "budget": 70},
        ),
        ({"decode": {"rule": "tova", "budget": 60}}, {"policy": "knorm"}, {"policy": "knorm"}),
    ],
)
async def test_a_request_names_a_policy_or_a_recipe_or_changes_the_servers(default, kv, expected) -> None:
    found = await asked(card_with(**default), prompt="a" * 300, kv=kv)
    assert found.recipe == make_recipe(**expected)


@pytest.mark.parametrize(
    ("tokens", "recipe"),
    [(8192, "full"), (8193, "snapkv:b0.5:w32:k13:avg:s4"), (32769, "snapkv:b4096:w32:k13:avg:s4:ada0.2")],
)
async def test_auto_goes_by_the_prompts_length(tokens: int, recipe: str) -> None:
    found = await asked(card_with(), prompt=[5] * tokens)
    assert found.recipe.recipe_id == recipe
    assert (await asked(card_with(policy="full"), prompt=[5] * tokens)).recipe == Recipe()


async def test_a_server_changes_presets_and_adds_recipes() -> None:
    card = card_with(recipes={"qa": {"budget": 0.1}, "mine": {"policy": "knorm", "budget": 77}})
    assert (await asked(card, prompt="a" * 300, kv="qa")).recipe.budget == 0.1
    assert (await asked(card, prompt="a" * 300, kv="qa")).recipe.heads == "ada"
    assert (await asked(card, prompt="a" * 300, kv="mine")).recipe == make_recipe(policy="knorm", budget=77)
    assert RecipeBook().named["qa"].fields["budget"] == 0.15, "other servers' presets stay"


async def test_the_window_of_a_chat_is_on_the_question_and_the_templates_tail_is_kept() -> None:
    card = card_with()
    found = await asked(card, kv={"policy": "snapkv", "budget": 0.2, "window": 8})
    assert (found.recipe.window, found.recipe.tail) == (8, TAIL)
    observed = found.prompt[-TAIL - 8 : -TAIL]
    assert card.decode(list(observed)) == QUESTION[-8:]
    assert (await asked(card, kv={"policy": "knorm", "budget": 0.2})).recipe.tail == 0, (
        "no queries, no window"
    )
    assert (await asked(card, kv={"policy": "snapkv", "budget": 0.2, "tail": 3})).recipe.tail == 3


async def test_a_chat_that_leaves_the_template_no_room_is_told_the_numbers() -> None:
    field, message = await refusal(card_with(), messages=CHAT, kv={"policy": "snapkv", "budget": 40})
    assert field == "kv.budget" and "window 32 + tail 13 + sinks 4" in message
    assert "chat template" in message and "at least 49" in message


async def test_the_window_can_name_the_question_or_give_its_tokens() -> None:
    card = card_with()
    found = await asked(card, kv={"policy": "snapkv", "budget": 0.5, "window": "question"})
    start = len(found.prompt) - found.recipe.tail - found.recipe.window
    assert card.decode(list(found.prompt[start : start + found.recipe.window])) == QUESTION
    found = await asked(card, prompt="a" * 300, kv={"policy": "snapkv", "budget": 0.5, "window": [100, 120]})
    assert (found.recipe.window, found.recipe.tail) == (20, 180)
    field, message = await refusal(card, messages=CHAT, kv={"policy": "snapkv", "window": "answer"})
    assert field == "kv.window" and "system, question" in message


async def test_protect_names_spans_and_token_ranges() -> None:
    card = card_with()
    kv = {"policy": "knorm", "budget": 0.5, "protect": ["system", [40, 50]]}
    found = await asked(card, kv=kv)
    assert text(card, found, found.recipe.spans)[0] == "Answer in one word."
    assert (40, 50) in found.recipe.spans and found.recipe.protect == ("system", (40, 50))
    later = [*CHAT, {"role": "developer", "content": "In French."}, {"role": "user", "content": "?"}]
    found = await asked(card, messages=later, kv=kv)
    assert text(card, found, found.recipe.spans) == ["Answer in one word.", "x" * 10, "In French."]


async def test_the_servers_own_protection_asks_nothing_of_a_prompt_that_has_no_such_part() -> None:
    for default in ({"recipe": "chat"}, {"budget": 0.5, "protect": ["system"]}):
        card = card_with(**default)
        found = await asked(card)
        assert text(card, found, found.recipe.spans) == ["Answer in one word."]
        assert (await asked(card, prompt="a" * 300)).recipe.spans == ()
    field, _ = await refusal(card_with(), prompt="a" * 300, kv={"recipe": "chat", "protect": ["system"]})
    assert field == "kv.protect"


@pytest.mark.parametrize(
    "server",
    [{"window": "question", "budget": 0.9}, {"policy": "snapkv", "window": "question", "budget": 0.9}],
)
async def test_the_servers_own_window_asks_nothing_of_a_prompt_that_has_no_such_part(server) -> None:
    card = card_with(**server)
    plain = await asked(card, prompt="a" * 300)
    assert (plain.recipe.window, plain.recipe.tail) == (32, 0)
    placed = await asked(card)
    stop = len(placed.prompt) - placed.recipe.tail
    assert text(card, placed, ((stop - placed.recipe.window, stop),)) == [QUESTION]
    long = await asked(card, messages=[{"role": "user", "content": "abcdefghij" * 200}])
    assert long.recipe.window == 1024
    for kv in ({"window": "question"}, {"policy": "snapkv", "window": "question"}):
        field, message = await refusal(card, prompt="a" * 300, kv=kv)
        assert field == "kv.window" and "no span 'question'" in message


async def test_code_is_found_in_completions_by_its_lines() -> None:
    card = card_with()
    source = "Some prose about a box.\ndef area(side):\n    square = side * side\n    return square\n" * 3
    found = await asked(card, prompt=source, kv={"policy": "knorm", "budget": 0.5, "protect": ["code"]})
    assert text(card, found, found.recipe.structure) == ["def area(side):"] * 3
    assert (await asked(card, prompt="prose " * 40, kv="code")).recipe.structure == ()


async def test_a_recipe_that_asks_nothing_of_the_prompts_parts_costs_no_second_rendering() -> None:
    card, renders = card_with(), []
    rendered = card.render_chat
    object.__setattr__(card, "render_chat", lambda *a, **k: renders.append(1) or rendered(*a, **k))
    for kv in (None, {"policy": "knorm"}, "streaming_llm:paper"):
        await asked(card, kv=kv)
    assert len(renders) == 3
    await asked(card, kv={"policy": "snapkv", "budget": 0.5})
    assert len(renders) == 5


async def test_slot_positions_let_an_answer_outgrow_the_context_up_to_a_bound() -> None:
    kv = {"decode": {"rule": "streaming_llm", "budget": 32}, "positions": "slot"}
    card = make_card()  # 64 tokens of context
    assert (await asked(card, prompt="hello", kv=kv, max_tokens=20_000)).sampling.max_tokens == 20_000
    assert (await asked(card, prompt="hello", kv=kv)).sampling.max_tokens == 16
    field, message = await refusal(card, prompt="hello", kv=kv, max_tokens=1_000_001)
    assert field == "max_tokens" and "from 1 to 1000000" in message
    kv["positions"] = "absolute"
    assert (await refusal(card, prompt="hello", kv=kv, max_tokens=20_000))[0] == "max_tokens"
    kv["positions"] = "slot"
    assert (await refusal(card, prompt=[5] * 61, kv=kv))[0] == "prompt", "the prompt itself must fit"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_report_is_given_where_it_is_asked_for(stream: bool) -> None:
    app = application(StubBackend(), card_with())
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}

    async def usage(kv: object, **fields: object) -> dict[str, object]:
        response = await complete(app, kv=kv, **fields, **options)
        whole = events_of(response)[-2] if stream else response.json()
        return whole["usage"]["kv"]

    report = {
        "kept_mass": 0.7,
        "kept_mass_per_layer": [0.5, 0.9],
        "budget_entropy": 0.75,
        "kept_tokens_per_layer": [3.5, 2.5],
        "layers": [0, 2],
    }
    assert (await usage({"policy": "knorm", "report": True}))["report"] == report
    assert (await usage({"report": True}, prompt=["hello", "world"]))["report"] == report
    assert "report" not in await usage({"policy": "knorm"})
    assert "report" not in await usage({"report": False})


async def test_an_answer_warns_of_a_recipe_that_cannot_go_well() -> None:
    app = application(StubBackend(), card_with())
    answer = (await complete(app, kv={"policy": "sliding_window"})).json()
    (warning,) = answer["usage"]["kv"]["warnings"]
    assert "without sinks" in warning
    assert "warnings" not in (await complete(app)).json()["usage"]["kv"]


async def test_metrics_are_per_policy() -> None:
    app = application(StubBackend(), card_with())
    await complete(app, prompt=[5] * 10, kv={"policy": "knorm", "report": True})
    await complete(app, prompt=[5] * 11, kv={"policy": "knorm"})
    await complete(app, prompt=[5] * 20)
    async with client(app) as http:
        lines = (await http.get("/metrics")).text.splitlines()
    for line in (
        'kvtide_policy_prompts_total{policy="knorm"} 2.0',
        'kvtide_policy_prompts_total{policy="full"} 1.0',
        'kvtide_policy_evicted_tokens_total{policy="knorm"} 15.0',
        'kvtide_policy_evicted_tokens_total{policy="full"} 17.0',
        'kvtide_kept_attention_mass_count{policy="knorm"} 1.0',
        'kvtide_kept_attention_mass_sum{policy="knorm"} 0.7',
        'kvtide_budget_entropy_count{policy="knorm"} 2.0',
        'kvtide_budget_entropy_sum{policy="knorm"} 1.5',
        'kvtide_budget_entropy_sum{policy="full"} 0.75',
    ):
        assert line in lines, line


async def test_the_catalogue_lists_recipes_policies_rules_and_fields() -> None:
    card = card_with("qa", {"mine": {"policy": "knorm", "budget": 77}, "qa": {"budget": 0.1}}, window=16)
    async with client(application(StubBackend(), card)) as http:
        found = (await http.get("/v1/kv/recipes")).json()
        model = (await http.get(f"/v1/models/{MODEL}")).json()
    assert found["default"] == {"recipe": "qa", "window": 16}
    assert model["default_recipe"] == "snapkv:b0.1:w16:k13:avg:s4:ada0.2"
    recipes = {each["name"]: each for each in found["recipes"]}
    assert recipes["mine"]["recipe_id"] == "knorm:b77:s4" and recipes["mine"]["fields"] == {
        "policy": "knorm",
        "budget": 77,
    }
    assert recipes["qa"]["fields"]["budget"] == 0.1 and "option recipes" in recipes["qa"]["source"]
    assert recipes["auto"]["recipe_id"] is None and "8192" in recipes["auto"]["about"]
    assert all(each["about"] and each["source"] for each in found["recipes"])
    assert list(found["policies"]) == list(OPTIONS)
    assert (
        found["policies"]["tova"]["needs"] == "last_queries"
        and found["policies"]["h2o"]["needs"] == "all_queries"
    )
    assert (
        "kernel" in found["policies"]["snapkv"]["options"]
        and found["policies"]["scissorhands"]["defaults"]["window"] == 400
    )
    assert found["decode_rules"]["h2o"]["defaults"]["every"] == 1
    assert all(each["about"] for kind in ("policies", "decode_rules") for each in found[kind].values())
    fields = found["fields"]
    assert set(FIELDS) <= set(fields) and {"recipe", "report", "decode.every"} <= set(fields)
    assert fields["kernel"] == {"default": 13, "valid": "an odd integer from 1 to 255"}
    assert "question" in fields["window"]["valid"] and fields["decode.threshold"]["valid"].startswith(
        "uniform, now"
    )


async def test_every_recipe_of_the_catalogue_can_be_asked_for_with_its_own_fields() -> None:
    app = application(StubBackend(), card_with())
    async with client(app) as http:
        found = (await http.get("/v1/kv/recipes")).json()
    backend = StubBackend()
    app = application(backend, card_with())
    for each in found["recipes"]:
        for kv in (each["name"], {"recipe": each["name"]}, each["fields"] or {"recipe": "auto"}):
            response = await complete(app, prompt=[5] * 3000, kv=_without_names(kv))
            assert response.status_code == 200, (kv, response.text)
        ids = {request.recipe.recipe_id for request in backend.requests[-3:]}
        assert ids == {each["recipe_id"] or "full"}


def _without_names(kv: object) -> object:
    """A completion has no system prompt to protect."""
    return {k: v for k, v in kv.items() if k != "protect"} if isinstance(kv, dict) else kv


async def test_the_catalogue_is_behind_the_key() -> None:
    app = application(StubBackend(), api_key="s3cret")
    async with client(app) as http:
        assert (await http.get("/v1/kv/recipes")).status_code == 401
    async with client(app, authorization="Bearer s3cret") as http:
        assert (await http.get("/v1/kv/recipes")).status_code == 200
