"""Cells to a table, a plot and figures. Sets that the model cannot do with its full cache are left out of it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from benchmarks.quality_methods import BUDGETS, FULL
from benchmarks.quality_run import ANEW, PLAIN, STALE, VISIBLE, WITHHELD, Cell

Line = tuple[str, float | None]
"""A method and its budget."""


class Column(NamedTuple):
    """What a column of the table averages: cells of a mode, per set first."""

    key: str
    title: str
    mode: str
    value: Callable[[Cell], float | None]


def _mark(cell: Cell) -> float | None:
    return cell.mark


COLUMNS = (
    Column("kl", "KL text", PLAIN, lambda cell: cell.kl),
    Column("agree", "greedy =", PLAIN, lambda cell: cell.agree),
    Column("visible", "visible", VISIBLE, _mark),
    Column("withheld", "withheld", WITHHELD, _mark),
    Column("anew", "2nd anew", ANEW, _mark),
    Column("stale", "2nd stale", STALE, _mark),
    Column("kl_math_visible", "KL math v", VISIBLE, lambda cell: cell.kl),
    Column("kl_math_withheld", "KL math w", WITHHELD, lambda cell: cell.kl),
)


def lines_of(cells: Iterable[Cell]) -> list[Line]:
    """In the order of first appearance, but all budgets of a method together."""
    seen = list(dict.fromkeys((cell.method, cell.budget) for cell in cells))
    order = list(dict.fromkeys(method for method, _ in seen))
    return sorted(seen, key=lambda line: (order.index(line[0]), -(line[1] or 0)))


def average(cells: Iterable[Cell], column: Column) -> float | None:
    """Mean over sets of the mean over samples; None where nothing was measured."""
    per_set: dict[str, list[float]] = {}
    for cell in cells:
        value = column.value(cell)
        if cell.mode == column.mode and value is not None:
            per_set.setdefault(cell.set, []).append(value)
    return mean(mean(values) for values in per_set.values()) if per_set else None


def kept(cells: Sequence[Cell]) -> float:
    """Payload bytes over the full cache's."""
    return mean(cell.payload / cell.full_payload for cell in cells)


def turned_wrong(cells: Sequence[Cell], own: Sequence[Cell]) -> dict[str, tuple[int, int]]:
    """By mode: samples wholly right with the full cache that are not any more, of how many right ones."""
    right = {(cell.set, cell.sample, cell.mode) for cell in cells if cell.method == FULL and cell.mark == 1.0}
    found: dict[str, tuple[int, int]] = {}
    for cell in own:
        if (cell.set, cell.sample, cell.mode) in right:
            lost, of = found.get(cell.mode, (0, 0))
            found[cell.mode] = (lost + (cell.mark != 1.0), of + 1)
    return found


def print_sets(marks: dict[str, list[float]], left_out: Sequence[str]) -> None:
    """What the model can do with its full cache."""
    print(f"\n{'full cache, question visible':<32}{'samples':>8}{'mark':>7}")
    for name, values in marks.items():
        note = "   left out: under half" if name in left_out else ""
        print(f"{name:<32}{len(values):>8}{mean(values):>7.2f}{note}")


def print_table(cells: Sequence[Cell], title: str) -> dict[str, float]:
    """One row per method and budget; → the same numbers as figures."""
    figures: dict[str, float] = {}
    head = "".join(f"{column.title:>11}" for column in COLUMNS)
    print(f"\n{title}\n{'method':<24}{'budget':>8}{'kept':>7}{head}   turned wrong (visible, withheld)")
    for line in lines_of(cells):
        method, budget = line
        own = [cell for cell in cells if (cell.method, cell.budget) == line]
        row = f"{method:<24}{'own' if budget is None else f'1/{round(1 / budget)}':>8}{kept(own):>7.3f}"
        key = method.replace(" ", "_") + ("" if budget is None else f"_{budget}")
        figures[f"kept_{key}"] = round(kept(own), 4)
        for column in COLUMNS:
            value = average(own, column)
            row += f"{'-':>11}" if value is None else f"{value:>11.3f}"
            if value is not None:
                figures[f"{column.key}_{key}"] = round(value, 4)
        wrong = turned_wrong(cells, own)
        row += "   " + ", ".join("{}/{}".format(*wrong.get(mode, (0, 0))) for mode in (VISIBLE, WITHHELD))
        print(row)
    return figures


def print_ranking(cells: Sequence[Cell], best: int = 6) -> None:
    """Per budget and column, the best methods in order; ties in the order of the table."""
    print("\nbest first:")
    lines = [line for line in lines_of(cells) if line[1] is not None]
    for budget in sorted({budget for _, budget in lines if budget}, reverse=True):
        for column in COLUMNS:
            sign = 1 if column.key.startswith("kl") else -1
            found = []
            for line in (line for line in lines if line[1] == budget):
                own = [cell for cell in cells if (cell.method, cell.budget) == line]
                value = average(own, column)
                if value is not None:
                    found.append((sign * value, line[0]))
            names = ", ".join(f"{name} {abs(value):.3f}" for value, name in sorted(found, key=_first)[:best])
            if names:
                print(f"  {f'1/{round(1 / budget)}':<6}{column.title:<12}{names}")


def _first(pair: tuple[float, str]) -> float:
    return pair[0]


def print_by_set(cells: Sequence[Cell], methods: Sequence[str]) -> None:
    """Marks of single sets for some methods: where a mean would hide what happens."""
    marked = [cell for cell in cells if cell.mark is not None and cell.method in methods]
    columns = sorted({(cell.set, cell.mode) for cell in marked})
    print("\nby set:")
    for at, (name, mode) in enumerate(columns):
        print(f"  ({at + 1}) {name}, {mode}")
    print(f"{'method':<24}{'budget':>8}" + "".join(f"{f'({at + 1})':>7}" for at in range(len(columns))))
    for method, budget in lines_of(marked):
        row = f"{method:<24}{'own' if budget is None else f'1/{round(1 / budget)}':>8}"
        for name, mode in columns:
            own = [
                cell.mark
                for cell in marked
                if (cell.method, cell.budget, cell.set, cell.mode) == (method, budget, name, mode)
                and cell.mark is not None
            ]
            row += f"{mean(own):>7.2f}" if own else f"{'-':>7}"
        print(row)


def plot(cells: Sequence[Cell], folder: Path, subtitle: str) -> list[Path]:
    """Quality against bytes, as quality.png and quality.svg in `folder`; none where matplotlib is missing."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no plot: pip install 'kvtide[plots]' (matplotlib)")
        return []
    mpl.use("Agg")
    # The same file for the same numbers: no random ids, no date.
    mpl.rcParams["svg.hashsalt"] = "kvtide"
    from matplotlib import pyplot

    panels = (
        ("kl", "KL to the full cache, text (nats)"),
        ("visible", "answers found, question visible"),
        ("withheld", "answers found, question withheld"),
        ("anew", "second question (line: selected anew, dots: stale set)"),
    )
    columns = {column.key: column for column in COLUMNS}
    figure, axes = pyplot.subplots(2, 2, figsize=(13, 9.5), sharex=True)
    names = dict.fromkeys(name for name, _ in lines_of(cells) if name != FULL)
    styles = {
        name: (mpl.colormaps["tab20"](at % 20), "osv^D*Xp<>h"[at % 11]) for at, name in enumerate(names)
    }
    for panel, (key, title) in zip(axes.flat, panels, strict=True):
        for name, (colour, marker) in styles.items():
            look = {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1}
            if own := _points(cells, name, columns[key]):
                panel.plot(*zip(*own, strict=True), label=name, **look)
            if key == "anew" and (stale := _points(cells, name, columns["stale"])):
                panel.plot(*zip(*stale, strict=True), linestyle=":", **look)
        panel.set_title(title, fontsize=10)
        panel.set_xscale("log", base=2)
        if key == "kl":
            panel.set_yscale("log")
        panel.grid(alpha=0.3)
    for panel in axes[1]:
        panel.set_xlabel("bytes of K and V kept, share of the full cache")
        panel.set_xticks(BUDGETS, [f"1/{round(1 / budget)}" for budget in BUDGETS])
    handles, labels = axes.flat[1].get_legend_handles_labels()
    if not handles:
        handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="center right", fontsize=8)
    figure.suptitle(textwrap.fill(subtitle, 120), fontsize=10)
    figure.tight_layout(rect=(0, 0, 0.84, 0.97))
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "quality.png", folder / "quality.svg"]
    figure.savefig(paths[0], dpi=110)
    figure.savefig(paths[1], metadata={"Date": None})
    pyplot.close(figure)
    return paths


def _points(cells: Sequence[Cell], method: str, column: Column) -> list[tuple[float, float]]:
    """(share of bytes, value), ascending."""
    found = []
    for line in lines_of(cells):
        if line[0] != method:
            continue
        own = [cell for cell in cells if (cell.method, cell.budget) == line]
        value = average(own, column)
        if value is not None:
            found.append((kept(own), value))
    return sorted(found)
