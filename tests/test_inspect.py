"""`kvtide inspect`: the numbers are the engine's, the page is safe and readable, the picture is one."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from service_stand import network, tokenizer
from tiny_models import one_thread, tiny, tokens_of

from deployments.api.card import ModelCard
from deployments.cli import main
from deployments.config import AppArgs
from deployments.inspection import palette
from deployments.inspection.inspected import LEVELS, PART, CacheRow, Inspected, level, readable
from deployments.inspection.page import page
from deployments.inspection.picture import picture
from deployments.inspection.run import NoPicture, inspect, inspected, make_inspection, prefill
from deployments.inspection.typeset import MISSING, set_lines
from engine.prefill import PrefillDone
from policies import make_recipe

__all__ = ["one_thread"]

ADA = make_recipe(policy="snapkv", budget=24, window=8, sinks=2, kernel=5, heads="ada")
CARD = ModelCard(("tiny",), tokenizer(), 1024, 1024)
ATTACK = """</pre><script>alert(1)</script><img src=x onerror=alert(2)> "'&amp; $x_1$ \x00\x1b\u202e\n"""


def prefilled(family: str, tokens: int = 60) -> tuple[PrefillDone, Inspected]:
    model = tiny(family).model
    done = prefill(model, tokens_of(tokens), ADA, chunk_tokens=32)
    return done, inspected(done, model.spec, CARD, "some tokens")


def made(texts: Sequence[str], kept: Sequence[Sequence[int]] = ((1,), (0,))) -> Inspected:
    """One layer of two heads; each row of `kept` is repeated for all tokens."""
    mask = np.array(kept, bool)
    mask = np.tile(mask, (1, len(texts))) if mask.shape[1] == 1 else mask
    row = CacheRow(0, None, len(texts), tuple(mask.sum(axis=1).tolist()), 0.5)
    return Inspected("m", "r", "s", tuple(texts), mask, (row,), 10, 20, 1.0)


class Reader(HTMLParser):
    """What a browser would find: tags with their attributes, and the text of the tokens."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tokens: list[str] = []
        self.titles: list[str] = []
        self.data = ""
        self._inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag in ("pre", "span") and (tag == "pre" or "pre" in self._inside):
            self._inside.append(tag)
        if tag == "span" and "pre" in self._inside:
            self.tokens.append("")
            self.titles.append(found["title"] or "")
        if found.get("id") == "data":
            self._inside.append("script")

    def handle_endtag(self, tag: str) -> None:
        if self._inside and self._inside[-1] == tag:
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        if self._inside[-1:] == ["span"]:
            self.tokens[-1] += data
        elif self._inside[-1:] == ["script"]:
            self.data += data


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_numbers_are_what_the_engine_kept(family):
    done, seen = prefilled(family)
    report = done.report
    assert [row.index for row in seen.scored] == list(report.layers)
    assert [row.budget for row in seen.scored] == list(report.budgets)
    assert [row.counts for row in seen.scored] == list(report.counts)
    assert [row.kept_mass for row in seen.scored] == pytest.approx(list(report.kept_mass))
    assert seen.kept_mass == pytest.approx(sum(report.kept_mass) / len(report.kept_mass))
    assert (seen.kept_bytes, seen.entropy) == (done.layout.payload_bytes, report.entropy)
    expected = [
        set(done.survivors[index].positions[head].tolist())
        for index in report.layers
        for head in range(done.survivors[index].kv_heads)
    ]
    assert [set(np.flatnonzero(row)) for row in seen.kept] == expected
    assert len({len(kept) for kept in expected}) > 1, "heads share their budget here"
    assert seen.votes.tolist() == [sum(i in kept for kept in expected) for i in range(60)]


def test_windowed_layers_are_marked_and_have_no_say():
    _, seen = prefilled("gemma3")
    spec = tiny("gemma3").model.spec
    assert [row.window for row in seen.caches] == [layer.window for layer in spec.layers]
    windowed = [row for row in seen.caches if row.window]
    assert windowed and all(set(row.counts) == {row.window - 1} for row in windowed)
    assert seen.heads == sum(len(row.counts) for row in seen.scored) < sum(len(r.counts) for r in seen.caches)
    text = page(seen)
    assert text.count('<tr class="windowed">') == text.count("window 20, exact") == len(windowed)


def test_a_model_of_windowed_layers_alone_is_drawn_too():
    row = CacheRow(0, 4, None, (3,), None)
    seen = Inspected("m", "r", "s", ("a", "b", "c", "d"), np.zeros((0, 4), bool), (row,), 3, 4, 1.0)
    assert "Every layer of this model is windowed" in page(seen)
    assert picture(seen).startswith(b"\x89PNG")


def test_the_page_says_for_every_token_how_many_heads_kept_it():
    _, seen = prefilled("llama")
    read = Reader(page(seen))
    assert len(read.tokens) == 60
    found = [
        re.fullmatch(r"token (\d+): kept by (\d+) of (\d+) heads \(\d+%\)", said) for said in read.titles
    ]
    votes = [int(votes) for votes in seen.votes]
    assert [tuple(map(int, said.groups())) for said in found] == [(i, n, 4) for i, n in enumerate(votes)]
    data = json.loads(read.data)
    bits = np.frombuffer(base64.b64decode(data["bits"]), np.uint8).reshape(data["heads"], -1)
    assert (np.unpackbits(bits, axis=1)[:, : data["tokens"]] == seen.kept).all()
    buttons = [attrs["title"] for tag, attrs in read.tags if tag == "button"]
    layers = [(row.index, head, n) for row in seen.caches for head, n in enumerate(row.counts)]
    assert buttons == [
        f"layer {layer}, kv head {head}: {n} of 60 tokens, budget 24" for layer, head, n in layers
    ]


def test_text_and_names_cannot_leave_their_places():
    row = CacheRow(0, None, 1, (1, 0), 0.5)
    texts = (*re.findall(r"\w+|\W", ATTACK), ATTACK)
    kept = np.array([[True] * len(texts), [False] * len(texts)])
    seen = Inspected(ATTACK, ATTACK, ATTACK, texts, kept, (row,), 1, 1, 1.0)
    plain = {tag for tag, _ in Reader(page(made(["a"]))).tags}
    read = Reader(page(seen))
    assert {tag for tag, _ in read.tags} == plain
    assert [tag for tag, _ in read.tags].count("script") == 2
    assert read.tokens == [text.replace("\x00", "\u2400").replace("\x1b", "\u241b") for text in texts]
    assert not any(name.startswith("on") for _, attrs in read.tags for name in attrs)


def test_the_page_needs_nothing_else_and_runs_only_its_own_script():
    text = page(made(["a"]))
    assert not re.search(r"https?:|//[a-z]|@import|url\(|\bsrc=|\bhref=", text.split("<body>")[0])
    read = Reader(text)
    assert not any({"src", "href", "action"} & attrs.keys() for _, attrs in read.tags)
    policy = next(attrs["content"] for _, attrs in read.tags if attrs.get("http-equiv"))
    assert policy.startswith("default-src 'none';") and "script-src 'sha256-" in policy
    script = text[text.rindex("<script>") + len("<script>") : text.rindex("</script>")]
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy


@pytest.mark.parametrize("dark", [False, True])
def test_all_text_can_be_read(dark):
    steps = palette.shades(dark)
    assert len(steps) == LEVELS + 1
    assert all(palette.contrast(back, text) >= 4.5 for back, text in steps)
    frame = palette.frame(dark)
    for back in (frame["page"], frame["panel"]):
        assert all(palette.contrast(back, frame[name]) >= 4.5 for name in ("ink", "quiet", "accent"))
    lightness = [palette.contrast(back, "#000000") for back, _ in steps]
    assert lightness == sorted(lightness, reverse=not dark), "more is always darker, or always brighter"


def test_contrast_is_that_of_wcag():
    assert palette.contrast("#ffffff", "#000000") == pytest.approx(21)
    assert palette.contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)


def test_only_none_and_all_have_the_outermost_shades():
    assert [level(n, 1000) for n in (0, 1, 500, 999, 1000)] == [0, 1, 5, LEVELS - 1, LEVELS]
    assert level(0, 0) == 0


def test_characters_of_several_tokens_stand_in_the_last_of_them():
    smile = "🙂".encode()
    assert readable([b"a", smile[:2], smile[2:], b"b"]) == ("a", PART, "🙂", "b")
    assert readable([b"a", smile[:2]]) == ("a", "\ufffd")
    assert "".join(readable([bytes([byte]) for byte in "naïve".encode()])).replace(PART, "") == "naïve"


def test_lines_hold_every_token_where_it_is_drawn():
    texts = ["def", " f():", "\n", "\treturn", " 日", "x" * 25, "\n\n", "end"]
    set_ = set_lines(texts, 10, 100)
    assert set_.lines == ["def f():↵", "    return", f" {MISSING}xxxxxxxx", "x" * 10, "xxxxxxx↵", "↵", "end"]
    drawn = [
        "".join(set_.lines[c.line][c.column :][: c.width] for c in set_.cells if c.token == i)
        for i in range(8)
    ]
    assert drawn == ["def", " f():", "↵", "    return", f" {MISSING}", "x" * 25, "↵↵", "end"]


def test_long_texts_show_both_ends_in_the_picture():
    set_ = set_lines([f"{i}\n" for i in range(50)], 10, 8)
    assert set_.lines[:4] == ["0↵", "1↵", "2↵", "3↵"] and set_.lines[5:] == ["46↵", "47↵", "48↵", "49↵"]
    assert "42 lines" in set_.lines[4]
    assert [(c.line, c.token) for c in set_.cells] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3),
        (5, 46),
        (6, 47),
        (7, 48),
        (8, 49),
    ]


@pytest.mark.parametrize(
    "texts", [("plain",), ATTACK, ("日本", "🙂", "e\u0301", "שלום", "\n")], ids=["one", "odd", "far"]
)
def test_the_picture_is_a_png_whatever_the_text(texts):
    image = Image.open(io.BytesIO(picture(made(list(texts)))))
    image.load()
    assert image.format == "PNG" and image.width > 1000 and image.height > 300
    colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}
    shade = palette.shades(dark=False)[LEVELS // 2][0]
    assert tuple(int(shade[i : i + 2], 16) for i in (1, 3, 5)) in colours


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    network().save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in the current folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "notes.txt"
    path.write_text("Which <b>words</b> stay? " * 4, encoding="utf-8")
    return path


SNAPKV = ["--policy", "snapkv", "--budget", "24", "--kv", '{"window": 8, "sinks": 2}']


def test_the_command_writes_a_page_and_a_picture(folder, text, capsys):
    assert main(["inspect", *SNAPKV, str(text), f"model={folder}", "threads=1"]) == 0
    assert capsys.readouterr().out.split() == ["notes.kept.html", "notes.kept.png"]
    read = Reader(Path("notes.kept.html").read_text(encoding="utf-8"))
    assert "".join(read.tokens) == text.read_text() and len(read.tokens) == 100
    kept = [int(re.search(r"by (\d+) of 4 heads", said)[1]) for said in read.titles]
    assert sum(kept) == 4 * 24 and set(kept[:2] + kept[-8:]) == {4}
    Image.open("notes.kept.png").verify()
    assert sorted(path.name for path in Path.cwd().iterdir()) == [
        "notes.kept.html",
        "notes.kept.png",
        "notes.txt",
    ]


def test_options_may_come_before_the_file_and_recipes_be_compared(folder, text, capsys):
    words = ["inspect", f"model={folder}", "--budget", "0.5", "--policy", "keydiff", "--recipe", "tova:paper"]
    assert main([*words, "threads=1", str(text), "--out", "out/cmp"]) == 0
    stems = ["out/cmp-keydiff", "out/cmp-tova-paper"]
    assert capsys.readouterr().out.split() == [stem + end for stem in stems for end in (".html", ".png")]
    assert "keydiff:b0.5" in Path("out/cmp-keydiff.html").read_text(encoding="utf-8")
    assert "tova:b0.5" in Path("out/cmp-tova-paper.html").read_text(encoding="utf-8")


def test_without_a_recipe_the_default_is_shown(folder, text, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 50))
    assert main(["inspect", "-", f"model={folder}", "threads=1", "policy=knorm", "budget=10"]) == 0
    assert capsys.readouterr().out.split() == ["stdin.kept.html", "stdin.kept.png"]
    assert "knorm:b10" in Path("stdin.kept.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policy", "snapkw"], "policy: "),
        (["--recipe", "nope"], "recipe: "),
        (["--policy", "snapkv", "--budget", "some"], "budget: "),
        (["--policy", "snapkv", "--kv", '{"decode": {"rule": "h2o", "every": 0}}'], "decode.every: "),
        (["--policy", "snapkv", "--kv", '{"policy": "h2o"}'], "policy is given twice"),
        (["--policy", "snapkv", "--policy", "snapkv"], "the same recipe is given twice"),
        (["--budget", "1", "--kv", '{"budget": 2}'], "budget is given twice"),
    ],
)  # fmt: skip
def test_a_wrong_recipe_is_refused_by_its_field(folder, text, words, said, capsys):
    assert main(["inspect", *words, str(text), f"model={folder}", "threads=1"]) == 2
    assert capsys.readouterr().err.startswith(f"kvtide: {said}")
    assert [path.name for path in Path.cwd().iterdir()] == ["notes.txt"]


def test_kv_that_is_no_object_ends_with_usage(text, capsys):
    with pytest.raises(SystemExit):
        main(["inspect", "--kv", "[1]", str(text)])
    assert "not a JSON object" in capsys.readouterr().err


def test_a_text_is_read_or_refused_and_never_written_over(folder, text, capsys):
    assert main(["inspect", "none.txt", f"model={folder}"]) == 2
    assert "none.txt cannot be read" in capsys.readouterr().err
    Path("raw").write_bytes(b"\xff\xfe\x00")
    assert main(["inspect", "raw", f"model={folder}"]) == 2
    assert "raw cannot be read" in capsys.readouterr().err
    Path("empty").touch()
    assert main(["inspect", "empty", f"model={folder}", "threads=1"]) == 1
    assert "empty" in capsys.readouterr().err
    Path("page.html").write_text("<p>a text")
    assert main(["inspect", "page.html", "--out", "page", f"model={folder}"]) == 2
    assert "would be written over" in capsys.readouterr().err
    assert Path("page.html").read_text() == "<p>a text"


def test_without_matplotlib_the_page_is_written_and_the_extra_named(folder, text, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["inspect", *SNAPKV, str(text), f"model={folder}", "threads=1"]) == 1
    said = capsys.readouterr()
    assert said.out.split() == ["notes.kept.html"] and "pip install 'kvtide[plots]'" in said.err
    assert not Path("notes.kept.png").exists()


def test_a_caller_sees_every_page_before_the_missing_pictures(folder, text, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    wanted = make_inspection(str(text), policies=["knorm", "keydiff"], budget=10)
    files = inspect(AppArgs(model=str(folder), threads=1), wanted)
    assert [next(files).name, next(files).name] == ["notes.kept-knorm.html", "notes.kept-keydiff.html"]
    with pytest.raises(NoPicture):
        next(files)
