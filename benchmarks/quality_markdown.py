"""Cells of `bench_quality` as the tables of docs/policies.md, put between its marks.

    python -m benchmarks.quality_markdown [--cells build/quality-cells.jsonl] [--document docs/policies.md]

Works on the cells of a run that was cut short too: every table says how many samples it is of. The plot beside it comes
from `bench_quality` itself (`--minutes 0` draws it anew from the cells that there are).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean

from benchmarks.quality_methods import BUDGETS, FULL
from benchmarks.quality_report import COLUMNS, average, kept, lines_of, turned_wrong
from benchmarks.quality_run import ANEW, STALE, VISIBLE, WITHHELD, Cell

BEGIN = "<!-- begin: python -m benchmarks.quality_markdown -->"
END = "<!-- end -->"

_TRIED = " (full)"
_BY_SET = ("snapkv", "snapkv kernel 5", "h2o", "expected_attention", "streaming_llm", "random")
_ASKED = {
    VISIBLE: "visible",
    WITHHELD: "withheld",
    ANEW: "second question, selected anew",
    STALE: "second question, stale set",
}


def read_cells(path: Path) -> list[Cell]:
    """Cells of a cell file, whatever run it is of. The last line may be cut off."""
    lines = path.read_text().splitlines(keepends=True)
    return [Cell(**json.loads(line)) for line in lines[1:] if line.endswith("\n")]


def quality_section(cells: Sequence[Cell]) -> str:
    """What stands between the marks: what the full cache can do, all methods, some methods set by set."""
    measured = [cell for cell in cells if not cell.set.endswith(_TRIED)]
    shares = ", ".join(_share(budget) for budget in BUDGETS)
    parts = [
        "What the model can do with its full cache; sets below one half are left out of everything that follows:",
        _sets_table(cells, measured),
        f"All methods. Where four numbers stand in a field, they are for budgets of {shares} of the prompt:",
        _methods_table(measured),
        "Set by set, because means hide what happens (same four budgets):",
        _by_set_table(measured),
    ]
    return "\n\n".join(parts)


def put_between_marks(document: str, section: str) -> str:
    """`document` with `section` in place of what stood between its marks. ValueError where it has none."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document lacks the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{section}\n\n{END}{after}"


def _sets_table(cells: Sequence[Cell], measured: Sequence[Cell]) -> str:
    rows = []
    for name in dict.fromkeys(cell.set.removesuffix(_TRIED) for cell in cells):
        own = [cell for cell in measured if cell.set == name and cell.method == FULL]
        tried = own or [cell for cell in cells if cell.set == name + _TRIED]
        if not tried:
            continue
        samples = len({cell.sample for cell in tried})
        tokens = round(mean(cell.prompt_tokens for cell in tried))
        seen, unseen = (
            _mean_mark(cell for cell in tried if cell.mode in modes)
            for modes in ((VISIBLE, ANEW), (WITHHELD, STALE))
        )
        note = "" if own else "tried only"
        if not own and seen != "–" and float(seen) < 0.5:
            note = "left out"
        rows.append([name, str(samples), str(tokens), seen, unseen, note])
    head = ["set", "samples", "tokens", "question visible (second: anew)", "withheld (stale)", ""]
    return _table(head, rows)


def _methods_table(cells: Sequence[Cell]) -> str:
    titles = [column.title for column in COLUMNS]
    rows = []
    for method in dict.fromkeys(name for name, _ in lines_of(cells)):
        row = [f"`{method}`"]
        groups = [
            [cell for cell in cells if (cell.method, cell.budget) == line]
            for line in lines_of(cells)
            if line[0] == method
        ]
        row.append(_joined([f"{kept(own):.2f}" for own in groups]))
        for column in COLUMNS:
            digits = 3 if column.key.startswith("kl") else 2
            values = [average(own, column) for own in groups]
            row.append(_joined(["–" if value is None else f"{value:.{digits}f}" for value in values]))
        wrong = [turned_wrong(cells, own).get(VISIBLE, (0, 0)) for own in groups]
        row.append(_joined([str(lost) for lost, _ in wrong]) + f" of {max(of for _, of in wrong)}")
        rows.append(row)
    return _table(["method", "bytes kept", *titles, "turned wrong, visible"], rows)


def _by_set_table(cells: Sequence[Cell]) -> str:
    rows = []
    marked = [cell for cell in cells if cell.mark is not None]
    for name, mode in sorted({(cell.set, cell.mode) for cell in marked}):
        own = [cell for cell in marked if (cell.set, cell.mode) == (name, mode)]
        row = [f"{name}, {_ASKED[mode]}", _mean_mark(cell for cell in own if cell.method == FULL)]
        for method in _BY_SET:
            lines = [line for line in lines_of(own) if line[0] == method]
            marks = [_mean_mark(cell for cell in own if (cell.method, cell.budget) == line) for line in lines]
            row.append(_joined(marks))
        rows.append(row)
    return _table(["set", "full", *(f"`{name}`" for name in _BY_SET)], rows)


def _mean_mark(cells: Iterable[Cell]) -> str:
    marks = [cell.mark for cell in cells if cell.mark is not None]
    return f"{mean(marks):.2f}" if marks else "–"


def _joined(values: Sequence[str]) -> str:
    return " / ".join(values) if set(values) - {"–"} else "–"


def _share(budget: float) -> str:
    return f"1/{round(1 / budget)}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", type=Path, default=Path("build/quality-cells.jsonl"))
    parser.add_argument("--document", type=Path, default=Path("docs/policies.md"))
    options = parser.parse_args()
    section = quality_section(read_cells(options.cells))
    options.document.write_text(put_between_marks(options.document.read_text(), section))
    print(f"{options.document}: tables of {options.cells}")


if __name__ == "__main__":
    main()
