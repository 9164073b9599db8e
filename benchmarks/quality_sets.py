"""The sets of samples that quality is measured on, from `data/`: passkeys, RULER, GSM8K, Wikipedia text and speeches.

A sample is token ids in parts, so that the same sample can be compressed with its question in sight or before it comes.
"""

from __future__ import annotations

import gzip
import json
import lzma
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

_DATA = Path(__file__).parent / "data"
_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
_SHOTS = 8

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Sample:
    """context, then `first` (an earlier question with its answer, if any), then question; what comes next is judged.

    `answers` are to be found in at most `new_tokens` greedy tokens: all of them for the whole mark (`rule` "contains"),
    or the text begins with the first ("starts"), or its last number is the first ("number"). `following` are ids of the
    text that really goes on there, for sets without answers; `asked` is how much of `first` is its question.
    """

    context: list[int]
    question: list[int] = field(default_factory=list)
    answers: tuple[str, ...] = ()
    rule: str = "starts"
    new_tokens: int = 8
    following: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    asked: int = 0

    @property
    def tokens(self) -> int:
        return len(self.context) + len(self.first) + len(self.question)

    def mark(self, text: str) -> float:
        """0 … 1."""
        if self.rule == "starts":
            return float(text.strip().startswith(self.answers[0]))
        if self.rule == "number":
            numbers = re.findall(r"-?\d[\d,]*", text.split("\n\n")[0])
            return float(bool(numbers) and numbers[-1].replace(",", "") == self.answers[0])
        return sum(answer in text for answer in self.answers) / len(self.answers)


@dataclass(frozen=True)
class SampleSet:
    """`samples` are made when they are asked for, always the same."""

    name: str
    samples: Callable[[], Iterator[Sample]]


def all_sets(tokenizer: PreTrainedTokenizerBase, seed: int) -> dict[str, SampleSet]:
    """By name, the most telling first."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False, verbose=False)

    made: list[SampleSet] = [
        SampleSet("passkey 2K", lambda: _passkeys(encode, 2048, seed)),
        SampleSet("wikitext", lambda: _going_on(encode, _wikitext(), 2048, seed)),
        SampleSet("speeches", lambda: _going_on(encode, _speeches(), 2048, seed + 1)),
        SampleSet("second question 2K", lambda: _second_questions(encode, 2048, seed)),
        SampleSet("passkey 4K", lambda: _passkeys(encode, 4096, seed + 4)),
        SampleSet("gsm8k text", lambda: _gsm8k(encode, seed, as_text=True)),
        SampleSet("gsm8k", lambda: _gsm8k(encode, seed, as_text=False)),
    ]
    for kind, lengths, new_tokens in (
        ("niah_noise", (512, 2048, 4096), 12),
        ("niah_uuid", (512, 2048, 4096), 40),
        ("vt", (2048, 4096), 40),
        ("fwe", (2048, 4096), 24),
    ):
        for length in lengths:
            file = f"ruler_{kind}_{length}_6"
            made.append(SampleSet(f"ruler {kind} {length}", _ruler(encode, file, new_tokens)))
    made.append(SampleSet("ruler multikey3 4096", _ruler(encode, "ruler_4096_niah_multikey3_25", 40)))
    return {each.name: each for each in made}


def _rows(name: str) -> list[Mapping[str, object]]:
    with gzip.open(_DATA / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _wikitext() -> str:
    with gzip.open(_DATA / "wikitext2_test.txt.gz", "rt", encoding="utf-8") as file:
        return file.read()


def _speeches() -> str:
    with lzma.open(_DATA / "state_of_the_union.txt.xz", "rt", encoding="utf-8") as file:
        return file.read()


def _going_on(encode: Encode, text: str, tokens: int, seed: int, following: int = 32) -> Iterator[Sample]:
    """Eight slices of a text and the `following` tokens that come after each."""
    ids, dice = encode(text), random.Random(seed)
    slices = len(ids) // (tokens + following)
    for place in sorted(dice.sample(range(slices), 8)):
        start = place * (tokens + following)
        yield Sample(ids[start : start + tokens], following=ids[start + tokens :][:following])


def _hidden(encode: Encode, tokens: int, lines: Mapping[float, str]) -> list[int]:
    """About `tokens` tokens of filler with a line at each depth."""
    head = "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it.\n"
    fixed = len(encode(head)) + sum(len(encode(line)) for line in lines.values())
    repeats = (tokens - fixed) // len(encode(_FILLER))
    text, done = head, 0
    for depth, line in sorted(lines.items()):
        here = int(depth * repeats)
        text += _FILLER * (here - done) + "\n" + line + "\n"
        done = here
    return encode(text + _FILLER * (repeats - done))


def _passkeys(encode: Encode, tokens: int, seed: int, depths: int = 10) -> Iterator[Sample]:
    """Five digits at ten depths; "raw", as in BASELINES.md section 7. The question is within the `tokens`."""
    dice = random.Random(seed)
    question = encode("\nWhat is the pass key? The pass key is")
    for depth in range(depths):
        key = str(dice.randrange(10000, 100000))
        line = f"The pass key is {key}. Remember it. {key} is the pass key."
        context = _hidden(encode, tokens - len(question), {(depth + 0.5) / depths: line})
        yield Sample(context, question, (key,))


def _second_questions(encode: Encode, tokens: int, seed: int, count: int = 6) -> Iterator[Sample]:
    """Two numbers in one document: asked for the pass key first, then for the magic number, which is judged.

    (Two pass keys of two doors are beyond the demo model: 1 of 3 with its full cache.)
    """
    dice = random.Random(seed + 2)
    for _ in range(count):
        numbers = {name: str(dice.randrange(10000, 100000)) for name in ("pass key", "magic number")}
        depths = dice.sample(range(5, 95), 2)
        lines = {
            depth / 100: f"The {name} is {number}. Remember it. {number} is the {name}."
            for depth, (name, number) in zip(depths, numbers.items(), strict=True)
        }
        ask = "\nWhat is the {0}? The {0} is"
        asked = encode(ask.format("pass key"))
        yield Sample(
            _hidden(encode, tokens - 60, lines),
            encode(ask.format("magic number")),
            (numbers["magic number"],),
            first=[*asked, *encode(f" {numbers['pass key']}.")],
            asked=len(asked),
        )


def _ruler(encode: Encode, file: str, new_tokens: int) -> Callable[[], Iterator[Sample]]:
    """RULER's samples; the question is the last line, with the answer's prefix."""

    def samples() -> Iterator[Sample]:
        for row in _rows(file)[:6]:
            text = str(row["input"])
            at = text.rstrip().rindex("\n")
            question = text[at:] + str(row.get("answer_prefix") or "").rstrip()
            answers = tuple(row["outputs"])  # type: ignore[arg-type]
            yield Sample(encode(text[:at]), encode(question), answers, "contains", new_tokens)

    return samples


def _gsm8k(encode: Encode, seed: int, *, as_text: bool) -> Iterator[Sample]:
    """Eight solved problems, then one more: its answer, or (`as_text`) the first 32 tokens of its solution."""
    rows = _rows("gsm8k_test_100")
    dice = random.Random(seed + 3)
    picked = dice.sample(rows, _SHOTS + 6)

    def solution(row: Mapping[str, object]) -> str:
        return re.sub(r"<<.*?>>", "", str(row["answer"])).replace("#### ", "The answer is ")

    context = "".join(f"Question: {row['question']}\nAnswer: {solution(row)}\n\n" for row in picked[:_SHOTS])
    for row in picked[_SHOTS:]:
        question = encode(f"Question: {row['question']}\nAnswer:")
        if as_text:
            yield Sample(encode(context), question, following=encode(" " + solution(row))[:32])
        else:
            number = str(row["answer"]).split("#### ")[1].replace(",", "")
            yield Sample(encode(context), question, (number,), "number", 140)
