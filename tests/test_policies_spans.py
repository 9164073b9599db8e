"""Structural tokens: lines of code that define something, by the text of the tokens; prose has none."""

from __future__ import annotations

import re
from itertools import accumulate
from pathlib import Path
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.spans import PromptMap, structural_ranges

SHARED_PROSE = Path(__file__).parent.parent / "README.md"


def tokens_of(text: str) -> list[str]:
    """Cut like a code tokenizer: a line's end with the next indentation, words with the space before them."""
    pieces = re.findall(r"\n[ \t]*| ?\w+|[^\w\s]|\s", text)
    assert "".join(pieces) == text
    return pieces


def structural_text(text: str) -> list[str]:
    pieces = tokens_of(text)
    return ["".join(pieces[start:stop]) for start, stop in structural_ranges(pieces)]


PYTHON = '''"""A module."""
import os.path as path, sys  # two
from collections import (
    OrderedDict,
    deque,
)

@dataclass(frozen=True)
class Cache(Base):
    size: int = 3

    async def get(
        self,
        key: str,
    ) -> int:
        if key in self.size:
            return self.size[key]
        print("def not_me():", key)

def put(key): return key
'''


STRUCTURAL_LINES = """\
import os.path as path, sys  # two
from collections import (
    OrderedDict,
    deque,
)
@dataclass(frozen=True)
class Cache(Base):
    async def get(
        self,
        key: str,
    ) -> int:
def put(key): return key
""".splitlines()


def test_python_definitions_with_their_indentation_and_whole_signatures() -> None:
    found = "\n".join(structural_text(PYTHON)).splitlines()
    assert [line for line in found if line] == STRUCTURAL_LINES


@pytest.mark.parametrize(
    "line",
    [
        "class Node:",
        "class Node {",
        "export default class Node extends React.Component {",
        "def area(self) -> float:",
        "  def empty?(list)",
        "fn main() {",
        "pub(crate) async fn read<T: Read>(from: T) -> io::Result<()> {",
        "impl<T> Display for Node<T> {",
        "pub enum Kind {",
        "use std::collections::{HashMap, HashSet};",
        "#[derive(Debug)]",
        "func (s *Server) Start(ctx context.Context) error {",
        "type Server struct {",
        'import "fmt"',
        "package main;",
        "import java.util.List;",
        "import static org.junit.Assert.*;",
        "@Override",
        "@app.route('/v1')",
        "public static void main(String[] args) {",
        "protected abstract int size();",
        "interface Shape {",
        "#include <vector>",
        "#define LIMIT 3",
        "template <typename T>",
        "static inline int clamp(int x, int low, int high) {",
        "std::vector<int> sorted(std::vector<int> v) const {",
        "namespace kvtide {",
        "using namespace std;",
        "function add(a, b) {",
        "const add = async (a, b) => {",
        "import React, { useState } from 'react';",
        "export type Point = { x: number };",
        "struct Point {",
    ],
)
def test_lines_of_many_languages_count(line: str) -> None:
    assert structural_text(f"x = 1\n{line}\n    y = 2\n") == [f"\n{line}" if line[0] == " " else line]


@pytest.mark.parametrize(
    "line",
    [
        "class was dismissed early; from the window we saw it",
        "from the beginning, import duties rose (see table 3)",
        "import of goods fell by 3 %.",
        "public opinion (which had been divided) turned.",
        "The interface between them is a function of time (or so they say).",
        "enum is a keyword, struct too.",
        "type a name, then press return",
        "use this at your own risk;",
        "@alice wrote: see you (maybe) tomorrow",
        "    return value(x)",
        "if (ready(now)) {",
        "} else if (done(now)) {",
        "for (int i = 0; i < n; i++) {",
        "while (next(it)) {",
        "x = compute(a, b)",
        "define(this)",
        "- a list item: def and class",
        "# Heading with import and class",
        "func",
    ],
)
def test_prose_and_plain_statements_do_not(line: str) -> None:
    assert structural_text(f"x = 1\n{line}\ny = 2\n") == []


def test_prose_has_none() -> None:
    text = re.sub(r"```.*?```", "", SHARED_PROSE.read_text(), flags=re.DOTALL)
    assert len(text) > 1000 and structural_text(text) == []


def test_a_bracket_that_never_closes_does_not_take_the_file_along() -> None:
    text = "def broken(\n" + "word = 1\n" * 500
    pieces = tokens_of(text)
    taken = sum(stop - start for start, stop in structural_ranges(pieces))
    assert 0 < taken < len(pieces) / 5


@pytest.mark.parametrize(
    "line",
    [
        "fn" + " " * 390 + "x",
        ("public" + " " * 50) * 7 + "x",
        "public" + " " * 190 + "a(" * 95 + "x",
        "import a" + " " * 380 + "!",
        "using" + " " * 390 + "x",
        "const a = (" + " " * 380 + "x",
        "class a(" + ": " * 190 + "x",
        "a" + " b" * 100 + "(" + ")" * 150 + "x",
    ],
)
def test_no_line_takes_long_whatever_it_is_made_of(line: str) -> None:
    pieces = [line + "\n"] * 200
    start = process_time()
    structural_ranges(pieces)
    assert process_time() - start < 0.4  # 2 ms a line; a hundredth of that is normal


@settings(deadline=None)
@given(
    st.lists(
        st.text(max_size=12) | st.sampled_from(["def f(", "\n", "\n    ", "class", ")", " ", "import a"])
    )
)
def test_ranges_are_ascending_apart_and_inside_the_prompt_for_any_tokens(pieces: list[str]) -> None:
    ranges = structural_ranges(pieces)
    ends = [end for one in ranges for end in one]
    assert ends == sorted(set(ends)) and all(0 <= end <= len(pieces) for end in ends)


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=60, max_size=80), st.booleans())
def test_every_character_of_the_lines_is_covered_however_the_text_is_cut(
    lengths: list[int], empty: bool
) -> None:
    pieces: list[str] = []
    at = 0
    for length in lengths:
        pieces += [PYTHON[at : at + length]] + [""] * empty
        at += length
    pieces.append(PYTHON[at:])
    starts = list(accumulate(map(len, pieces), initial=0))
    covered = {at for first, stop in structural_ranges(pieces) for at in range(starts[first], starts[stop])}
    for line in STRUCTURAL_LINES:
        begin = PYTHON.index(line)
        assert covered.issuperset(range(begin, begin + len(line)))
    if at >= len(PYTHON):  # tokens of at most 9 characters: the middle of this line touches no other
        begin = PYTHON.index("return self.size[key]")
        assert covered.isdisjoint(range(begin + 9, begin + 11))


def test_a_prompts_parts_must_lie_inside_it() -> None:
    assert PromptMap(9, {"question": (3, 9)}, tail=2, pieces=["x"] * 9).tokens == 9
    with pytest.raises(AssertionError):
        PromptMap(9, {"question": (3, 10)})
    with pytest.raises(AssertionError):
        PromptMap(9, pieces=["x"])
