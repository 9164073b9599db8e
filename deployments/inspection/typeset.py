"""Setting tokens in lines of a fixed-width font: where each token and each letter stands. For the picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple
from unicodedata import combining, normalize

import numpy as np
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from numpy.typing import NDArray

ADVANCE_EM = 1233 / 2048
"""Width of every character of DejaVu Sans Mono, which matplotlib brings along."""

MISSING = "\u25a1"
"""For characters that the font lacks. The HTML page has them."""

_END_OF_LINE = "\u21b5"
_TAB = 4
_BASELINE = 0.68


class Cell(NamedTuple):
    """A stretch of one token on one line, in characters."""

    line: int
    column: int
    width: int
    token: int


@dataclass(frozen=True)
class Page:
    """A text in lines. cells: stretches of the tokens that are shown, in their order."""

    lines: list[str]
    cells: list[Cell]


def set_lines(texts: Sequence[str], columns: int, most_lines: int) -> Page:
    """Break token texts before they pass `columns` characters and at ends of line, which show as an arrow.

    Of more than `most_lines` lines both ends are shown, and a line between them that says how many are not.
    """
    lines: list[list[str]] = [[]]
    cells: list[Cell] = []
    for token, text in enumerate(texts):
        drawn = list(_characters(text))
        if lines[-1] and len(lines[-1]) + len(drawn) > columns >= len(drawn) and drawn[-1] != _END_OF_LINE:
            lines.append([])
        start = len(lines[-1])
        for char in drawn:
            lines[-1].append(char)
            if char == _END_OF_LINE or len(lines[-1]) == columns:
                cells.append(Cell(len(lines) - 1, start, len(lines[-1]) - start, token))
                lines.append([])
                start = 0
        if len(lines[-1]) > start:
            cells.append(Cell(len(lines) - 1, start, len(lines[-1]) - start, token))
    if len(lines) > 1 and not lines[-1]:
        lines.pop()
    return _both_ends(Page(["".join(line) for line in lines], cells), most_lines)


def _characters(text: str) -> Iterator[str]:
    """One drawable character per column."""
    for char in normalize("NFC", text.replace("\r\n", "\n")):
        if char == "\n":
            yield _END_OF_LINE
        elif char == "\t":
            yield from " " * _TAB
        elif not combining(char):
            yield char if char.isprintable() and ord(char) in _drawable() else MISSING


def _both_ends(page: Page, most: int) -> Page:
    total, half = len(page.lines), most // 2
    left_out = total - 2 * half
    if total <= most:
        return page
    gap = f"[{left_out:,} lines are left out here; the HTML page has them all]"
    cells = [cell for cell in page.cells if cell.line < half]
    cells += [
        cell._replace(line=cell.line - left_out + 1) for cell in page.cells if cell.line >= total - half
    ]
    return Page([*page.lines[:half], gap, *page.lines[-half:]], cells)


def glyph_paths(page: Page, inks: Sequence[str], line_em: float, other: str) -> tuple[list[Path], list[str]]:
    """Outlines of all letters in em, y downwards, one path per line and colour, with their colours.

    inks: colour of each token; other: of what is no token's.
    """
    found: dict[tuple[int, str], list[tuple[int, str]]] = defaultdict(list)
    owned = set()
    for cell in page.cells:
        owned.add(cell.line)
        for column in range(cell.column, cell.column + cell.width):
            found[cell.line, inks[cell.token]].append((column, page.lines[cell.line][column]))
    for line in set(range(len(page.lines))) - owned:
        found[line, other] += enumerate(page.lines[line])
    paths, colours = [], []
    for (line, ink), letters in found.items():
        outlines = [(column, *_outline(char)) for column, char in letters if char != " "]
        if not outlines:
            continue
        base = np.array([0.0, (line + _BASELINE) * line_em])
        vertices = np.concatenate(
            [corners + base + (column * ADVANCE_EM, 0) for column, corners, _ in outlines]
        )
        paths.append(Path(vertices, np.concatenate([codes for _, _, codes in outlines])))
        colours.append(ink)
    return paths, colours


def _font() -> FontProperties:
    return FontProperties(family="DejaVu Sans Mono")


@cache
def _drawable() -> frozenset[int]:
    return frozenset(get_font(findfont(_font())).get_charmap())


@cache
def _outline(char: str) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    """A letter's corners in em, y downwards, and what each of them is to matplotlib."""
    path = TextPath((0, 0), char, size=1, prop=_font(), usetex=False)
    codes = np.asarray(path.codes if path.codes is not None else [], np.uint8)
    return np.asarray(path.vertices, np.float64).reshape(-1, 2) * (1, -1), codes
