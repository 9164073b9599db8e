"""The benchmarks measure what the engine does: one reading gives the survivors of a prefill per recipe, and so on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import VOCABULARY, one_thread, packed, prefill_all, request, tiny, tokens_of

from benchmarks.policies_cost import column_sum_share
from benchmarks.policies_stream import JUDGED, run_stream
from benchmarks.quality_document import Document
from benchmarks.quality_lanes import Lanes
from benchmarks.quality_methods import METHODS, PRESETS, Method, methods
from benchmarks.quality_report import COLUMNS, average, kept, lines_of, print_table, turned_wrong
from benchmarks.quality_run import ANEW, PLAIN, STALE, VISIBLE, WITHHELD, Cell, CellFile, Runner
from benchmarks.quality_sets import Sample

__all__ = ["one_thread"]

WHOLE = Method("whole", {"policy": "snapkv", "window": 8}, 1.0)


class Letters:
    """A tokenizer in which token i reads "<i>"."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f"<{i}>" for i in ids)


def new_runner() -> Runner:
    model = tiny().model
    return Runner(model, Letters(), Lanes(model, 64 << 20, 192))  # type: ignore[arg-type]


@pytest.mark.parametrize("method", methods(budgets=(0.25,)), ids=lambda method: method.name)
def test_one_reading_gives_every_method_the_snapshot_that_prefill_ships(method: Method):
    model, ids = tiny().model, tokens_of(300)
    recipe = method.recipe(len(ids))
    text = Document(model, 320).read(ids)
    text.pack(Method("other", METHODS["h2o"], 0.5).recipe(len(ids)))  # must not show in what follows
    found = text.pack(recipe)
    # The engine's pieces end where a document's do only if a chunk of it may be as long.
    truth = prefill_all(model, [request("cold", ids, recipe)], chunk=1024)["cold"]
    assert torch.equal(found.buffer, packed(truth))


def test_going_on_from_an_earlier_point_is_reading_another_text():
    model, ids, question, other = tiny().model, tokens_of(200), tokens_of(20, 1), tokens_of(30, 2)
    document = Document(model, 256)
    context = document.read(ids)
    recipe = Method("h2o", METHODS["h2o"], 0.25).recipe(len(ids) + len(question))
    before = document.read(question).pack(recipe).buffer
    document.back_to(context)
    document.read(other)
    document.back_to(context)
    assert torch.equal(document.read(question).pack(recipe).buffer, before)


def test_a_budget_that_keeps_all_is_the_full_cache_in_every_mode():
    text = Sample(list(tokens_of(120)), following=list(tokens_of(12, 3)))
    asked = replace(text, question=list(tokens_of(9, 4)))
    cells = [
        *new_runner().run("plain", 0, text, [WHOLE]),
        *new_runner().run("asked", 0, asked, [WHOLE, *methods(("random",), (0.1,))]),
    ]
    by_mode = {(cell.mode, cell.method): cell for cell in cells}
    for mode in (PLAIN, VISIBLE, WITHHELD):
        whole = by_mode[mode, "whole"]
        assert (whole.kl, whole.agree, whole.prefix) == (0.0, 1.0, 11)
        assert whole.payload == whole.full_payload < whole.snapshot
    assert by_mode[VISIBLE, "random"].kl > 0.0 < by_mode[WITHHELD, "random"].kl  # type: ignore[operator]


def test_answers_are_marked_as_the_full_cache_gives_them_when_all_is_kept():
    first = [*tokens_of(9, 5), *tokens_of(4, 6)]
    sample = Sample(list(tokens_of(120)), list(tokens_of(9, 7)), ("<",), "starts", 5, first=first, asked=9)
    cells = new_runner().run("second", 0, sample, [WHOLE])
    answers = {(cell.mode, cell.method): cell.answer for cell in cells}
    assert (
        answers[ANEW, "whole"] == answers[ANEW, "full"] == answers[STALE, "whole"] == answers[STALE, "full"]
    )
    assert all(cell.mark == 1.0 for cell in cells)


def test_marks():
    assert Sample([], answers=("12345",)).mark(" 12345. Remember") == 1.0
    assert Sample([], answers=("12345",)).mark(" 1234") == 0.0
    assert Sample([], answers=("ab", "cd"), rule="contains").mark("xabx") == 0.5
    assert (
        Sample([], answers=("1200",), rule="number").mark("3 + 4. The answer is 1,200\n\nQuestion: 5") == 1.0
    )


def test_cells_outlive_an_interrupted_run_and_not_another_benchmark(tmp_path: Path):
    cell = Cell("set", 0, VISIBLE, "snapkv", 0.25, "id", 100, 25, 30, 100, mark=1.0)
    CellFile(tmp_path / "cells.jsonl", "a").add([cell])
    again = CellFile(tmp_path / "cells.jsonl", "a")
    assert again.cells == [cell] and again.has("set", 0) and not again.has("set", 1)
    with pytest.raises(SystemExit, match="another run"):
        CellFile(tmp_path / "cells.jsonl", "b")


def test_the_table_averages_sets_and_counts_what_turned_wrong(capsys: pytest.CaptureFixture[str]):
    def cell(name: str, sample: int, method: str, mark: float) -> Cell:
        budget, payload = (None, 100) if method == "full" else (0.25, 25)
        return Cell(name, sample, VISIBLE, method, budget, "id", 100, payload, 130, 100, mark=mark)

    cells = [cell("a", 0, "full", 1.0), cell("a", 1, "full", 1.0), cell("b", 0, "full", 0.0)]
    cells += [cell("a", 0, "snapkv", 1.0), cell("a", 1, "snapkv", 0.5), cell("b", 0, "snapkv", 1.0)]
    own = [each for each in cells if each.method == "snapkv"]
    visible = next(column for column in COLUMNS if column.key == "visible")
    assert lines_of(cells) == [("full", None), ("snapkv", 0.25)]
    assert average(own, visible) == (0.75 + 1.0) / 2 and kept(own) == 0.25
    assert turned_wrong(cells, own) == {VISIBLE: (1, 2)}
    assert print_table(cells, "")["visible_snapkv_0.25"] == 0.875
    assert "1/2, 0/0" in capsys.readouterr().out


def test_a_stream_beyond_the_context_keeps_its_pages_and_is_near_its_recomputed_windows():
    model = tiny().model
    budget = 2 * JUDGED
    ids = list(tokens_of(model.spec.context_length + 2 * budget))
    stream = run_stream(model, Lanes(model, 8 << 20, 1), ids, budget, 4, windows=4)
    assert len(stream.nll) == len(ids) - budget > model.spec.context_length
    assert stream.page_growth == 0 and len(stream.pairs) == 4
    # Random text: near the uniform distribution's surprise, both, and to each other.
    assert 0.9 < stream.nll_ratio < 1.1


def test_the_second_pass_share_is_that_of_the_formula():
    """ALGORITHMS.md 2.5's arithmetic, by hand for the tiny Llama: 2 layers, 4 heads of 16, hidden 48."""
    weights = 2 * (48 * 64 + 2 * 48 * 32 + 64 * 48 + 3 * 48 * 64)
    n = 512
    half = 2 * n**2 * 64
    expected = half / (2 * n * weights + 2 * 48 * VOCABULARY + 2 * half)
    assert column_sum_share(tiny().model, n) == pytest.approx(expected)


def test_every_preset_and_budget_is_a_line_of_its_own():
    found = [(method.name, method.budget) for method in methods()]
    assert len(set(found)) == len(found) == 4 * len(METHODS) + len(PRESETS)
