"""Where the question, the system prompt and the template's tail are, under chat templates of many kinds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from api_stub import TEMPLATE, make_card, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import AutoTokenizer

from deployments.api.card import ModelCard
from deployments.api.prompts import Prompt, chat_prompt, completion_prompt
from deployments.api.schemas import ChatRequest, Message

LLAMA3 = (
    "{{ '<s>' }}{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{{ '<|start|>system<|end|>\n\nCutting Knowledge Date: December 2023\n\n' + system + '<|eot|>' }}"
    "{% for m in messages %}{{ '<|start|>' + m.role + '<|end|>\n\n' + m.content | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)
QWEN = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful user.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
GEMMA3 = (  # the system message opens the first turn of the user
    "{{ '<s>' }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set loop_messages = messages[1:] %}{% else %}{% set first = '' %}{% set loop_messages = messages %}{% endif %}"
    "{% for m in loop_messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ first if loop.first else '' }}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (  # the system message stands before the last turn of the user
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}"
    "{% else %}{% set system = '' %}{% endif %}<s>{% for m in messages %}{% if m.role == 'user' %}[INST] "
    "{% if loop.last and system %}{{ system + '\n\n' }}{% endif %}{{ m.content }}[/INST]"
    "{% else %} {{ m.content | trim }}</s>{% endif %}{% endfor %}"
)
SHOUT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | upper }}<|im_end|>\n{% endfor %}"
TEMPLATES = {"chatml": TEMPLATE, "llama3": LLAMA3, "qwen": QWEN, "gemma3": GEMMA3, "mistral": MISTRAL}
TAILS = {
    "chatml": "<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<|eot|><|start|>assistant<|end|>\n\n",
    "qwen": "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "gemma3": "<end_of_turn>\n<start_of_turn>model\n",
    "mistral": "[/INST]",
}
CARDS: dict[str, ModelCard] = {}


def card_of(template: str) -> ModelCard:
    if template not in CARDS:
        tokenizer = make_tokenizer()
        tokenizer.chat_template = template
        CARDS[template] = make_card(tokenizer=tokenizer)
    return CARDS[template]


def prompt_of(template: str, *messages: tuple[str, str], **fields: bool) -> Prompt:
    said = [Message(role=role, content=content) for role, content in messages]  # type: ignore[arg-type]
    return chat_prompt(card_of(template), ChatRequest(model="tiny", messages=said, **fields))


def text_of(template: str, prompt: Prompt, name: str) -> str:
    start, stop = prompt.map.spans[name]
    return card_of(template).decode(list(prompt.tokens[start:stop]))


def tail_of(template: str, prompt: Prompt) -> str:
    return card_of(template).decode(list(prompt.tokens[len(prompt.tokens) - prompt.map.tail :]))


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_question_the_system_prompt_and_the_tail_are_found(name: str) -> None:
    template = TEMPLATES[name]
    prompt = prompt_of(
        template,
        ("system", "Be brief."),
        ("user", "hi"),
        ("assistant", "yes?"),
        ("user", "What is in the box?"),
    )
    assert text_of(template, prompt, "question") == "What is in the box?"
    assert text_of(template, prompt, "system") == "Be brief."
    assert tail_of(template, prompt) == TAILS[name]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "word", ["user", "s", "system", "assistant", "Cutting", "\n", "INST", "<|im_end|>\n"]
)
def test_a_message_that_says_the_templates_own_words_is_not_mistaken(name: str, word: str) -> None:
    template = TEMPLATES[name]
    prompt = prompt_of(
        template, ("system", word), ("user", word), ("assistant", word), ("user", f"{word}{word}?")
    )
    assert text_of(template, prompt, "question") in (f"{word}{word}?", f"{word}{word}?".strip())
    assert tail_of(template, prompt) == TAILS[name]


WORDS = st.lists(
    st.sampled_from(["hello ", "user", "\n", " ", "é", "🙂", "<|im_end|>", "0", "[INST]", "</think>"]),
    min_size=1,
    max_size=6,
).map("".join)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(TEMPLATES)),
    system=WORDS,
    turns=st.lists(st.tuples(WORDS, WORDS), max_size=3),
    last=WORDS,
)
def test_whatever_is_said_spans_hold_it_and_the_tail_follows(name, system, turns, last) -> None:
    template = TEMPLATES[name]
    messages = [("system", system)]
    for question, answer in turns:
        messages += [("user", question), ("assistant", answer)]
    prompt = prompt_of(template, *messages, ("user", last))
    if last.strip():
        assert text_of(template, prompt, "question").strip() == last.strip()
        assert tail_of(template, prompt).endswith(TAILS[name])
        assert not tail_of(template, prompt).removesuffix(TAILS[name]).strip()
    if system.strip():
        assert text_of(template, prompt, "system").strip() == system.strip()


def test_a_stripping_template_leaves_stripped_spans() -> None:
    prompt = prompt_of(LLAMA3, ("system", "\n Be brief. "), ("user", "  Why?\n\n"))
    assert text_of(LLAMA3, prompt, "system") == "Be brief."
    assert text_of(LLAMA3, prompt, "question") == "Why?"
    assert tail_of(LLAMA3, prompt) == TAILS["llama3"]


def test_white_space_belongs_to_spans_where_the_tokenizer_trims_its_offsets() -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    card = make_card(tokenizer=tokenizer)
    for question in ("  hello \n\n", " ", "é🙂 x \n"):
        prompt = chat_prompt(
            card, ChatRequest(model="tiny", messages=[Message(role="user", content=question)])
        )
        start, stop = prompt.map.spans["question"]
        assert card.decode(list(prompt.tokens[start:stop])) == question
        assert card.decode(list(prompt.tokens[stop:])) == TAILS["chatml"]


def test_an_answer_without_its_reasoning_hides_nothing_behind_it() -> None:
    answer = "<think>hmm, user said hi</think>\n\nhello"
    prompt = prompt_of(QWEN, ("user", "hi"), ("assistant", answer), ("user", "again"))
    assert text_of(QWEN, prompt, "question") == "again" and "system" not in prompt.map.spans
    assert tail_of(QWEN, prompt) == TAILS["qwen"]


def test_a_template_that_changes_every_message_has_no_spans_and_no_tail() -> None:
    prompt = prompt_of(SHOUT, ("system", "be brief"), ("user", "why"))
    assert dict(prompt.map.spans) == {} and prompt.map.tail == 0
    assert "rewrites messages" in prompt.map.parts.missing


def test_developer_messages_are_system_and_those_in_front_are_one_span() -> None:
    prompt = prompt_of(
        TEMPLATE, ("developer", "one"), ("system", "two"), ("user", "hi"), ("system", "three"), ("user", "?")
    )
    assert re.fullmatch(r"one<\|im_end\|>\n<\|im_start\|>system\ntwo", text_of(TEMPLATE, prompt, "system"))
    ((start, stop),) = prompt.map.parts.more_system
    assert card_of(TEMPLATE).decode(list(prompt.tokens[start:stop])) == "three"


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ([("user", "hi"), ("assistant", "hello w")], {"continue_final_message": True}),
        ([("user", "hi"), ("assistant", "hello")], {}),
        ([("user", "hi"), ("system", "be brief")], {}),
    ],
    ids=["continued", "answered", "instructed"],
)
def test_a_chat_that_ends_otherwise_has_no_tail(messages, fields) -> None:
    prompt = prompt_of(TEMPLATE, *messages, **fields)
    assert prompt.map.tail == 0 and text_of(TEMPLATE, prompt, "question") == "hi"


def test_a_question_without_a_generation_prompt_has_the_turns_end_as_tail() -> None:
    prompt = prompt_of(TEMPLATE, ("user", "hi"), add_generation_prompt=False)
    assert tail_of(TEMPLATE, prompt) == "<|im_end|>\n"


def test_a_completion_has_no_parts_but_the_text_of_its_tokens() -> None:
    prompt = completion_prompt(make_card(), "é hello", "prompt")
    assert dict(prompt.map.spans) == {} and prompt.map.tail == 0
    assert prompt.map.pieces[:2] == ["\ufffd", "\ufffd"] and "".join(prompt.map.pieces[2:]) == " hello"


def test_nothing_is_looked_for_before_somebody_asks() -> None:
    renders = []
    card = make_card()
    rendered = card.render_chat
    object.__setattr__(card, "render_chat", lambda *a, **k: renders.append(1) or rendered(*a, **k))
    said = [Message(role="user", content="hi")]
    prompt = chat_prompt(card, ChatRequest(model="tiny", messages=said))
    assert len(renders) == 1 and not prompt.map.looked_at
    assert prompt.map.tail and prompt.map.looked_at and len(renders) == 2


def test_the_demo_models_own_template(smollm2_path: Path) -> None:
    card = make_card(tokenizer=AutoTokenizer.from_pretrained(smollm2_path))
    question = "How many user messages did the system see? 12345\n"
    said = [
        Message(role="user", content=question),
        Message(role="assistant", content="hm"),
        Message(role="user", content=question),
    ]
    prompt = chat_prompt(card, ChatRequest(model="tiny", messages=said))
    start, stop = prompt.map.spans["question"]
    assert card.decode(list(prompt.tokens[start:stop])) == question
    assert card.decode(list(prompt.tokens[stop:])) == "<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.map.tail == len(prompt.tokens) - stop == 6
    assert "system" not in prompt.map.spans, "the template's own system prompt is nobody's message"
    assert "".join(prompt.map.pieces) == card.decode(list(prompt.tokens))
