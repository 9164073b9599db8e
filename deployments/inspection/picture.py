"""The picture of one inspected prompt: a PNG drawn by matplotlib (the extra `plots`), for slides and issues.

Nobody's global matplotlib state is read or changed: no pyplot, our own figure.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from deployments.inspection import palette
from deployments.inspection.inspected import LEVELS, CacheRow, Inspected, level
from deployments.inspection.typeset import ADVANCE_EM, Page, glyph_paths, set_lines

_DPI = 130
_COLUMNS = 121
_MOST_LINES = 420
_FONT_PT = 6.6
_LINE_EM = 1.62
_MARGIN_IN = 0.45
_HEADER_IN = 1.5
_MAP_IN = 5.6
_PROFILE_BINS = 600
# Cells narrower than this have no room for their number.
_NUMBER_IN = 0.3
_COLOURS = palette.frame(dark=False)
_INK, _QUIET, _RULE, _PANEL, _ACCENT = (
    _COLOURS[name] for name in ("ink", "quiet", "rule", "panel", "accent")
)
_BODY_PT, _SMALL_PT = 9.0, 7.5


def picture(seen: Inspected) -> bytes:
    """The PNG file. Long texts show their beginning and end; the strip above them is always the whole prompt."""
    page = set_lines(seen.texts, _COLUMNS, _MOST_LINES)
    line_in = _FONT_PT * _LINE_EM / 72
    text_in = _COLUMNS * _FONT_PT * ADVANCE_EM / 72
    lines_in = len(page.lines) * line_in
    map_in = max(1.5, 0.2 * len(seen.caches))
    width = 3 * _MARGIN_IN + text_in + _MAP_IN
    height = _HEADER_IN + max(lines_in + 1.1, map_in + 0.75) + _MARGIN_IN
    figure = Figure(figsize=(width, height), dpi=_DPI, facecolor=_COLOURS["page"])

    def place(left: float, top: float, wide: float, high: float) -> Axes:
        """Axes at inches from the left and from the top."""
        return figure.add_axes((left / width, 1 - (top + high) / height, wide / width, high / height))

    left, right = _MARGIN_IN, 2 * _MARGIN_IN + text_in
    _header(place(left, _MARGIN_IN, width - 2 * _MARGIN_IN, _HEADER_IN - _MARGIN_IN - 0.15), seen)
    _legend(place(left, _HEADER_IN, text_in, 0.24), seen)
    _profile(place(left, _HEADER_IN + 0.36, text_in, 0.5), seen)
    _text(place(left, _HEADER_IN + 1.0, text_in, lines_in), seen, page)
    _map(place(right + 0.3, _HEADER_IN + 0.36, _MAP_IN * 0.6, map_in), seen)
    _mass(place(right + 0.3 + _MAP_IN * 0.63, _HEADER_IN + 0.36, _MAP_IN * 0.31, map_in), seen)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor=_COLOURS["page"])
    return buffer.getvalue()


def _bare(axes: Axes, wide: float, high: float) -> None:
    """No frame; coordinates from the upper left corner."""
    axes.set_axis_off()
    axes.set(xlim=(0, wide), ylim=(high, 0))


def _write(axes: Axes, at: tuple[float, float], words: str, size: float, **style: Any) -> None:
    # User text may hold a $, which is no formula.
    axes.text(*at, words, fontsize=size, parse_math=False, **{"color": _INK, "va": "top", **style})


def _header(axes: Axes, seen: Inspected) -> None:
    _bare(axes, 4, 1)
    facts = dict(seen.facts())
    _write(axes, (0, 0), _cut(facts.pop("Recipe"), 110), 15, weight="bold")
    for index, (name, value) in enumerate(facts.items()):
        row, column = divmod(index, 4)
        at = 0.42 + row * 0.34
        _write(axes, (column, at), name, _SMALL_PT, color=_QUIET)
        _write(axes, (column, at + 0.13), _cut(value, 46), _BODY_PT)


def _cut(words: str, most: int) -> str:
    clean = "".join(char if char.isprintable() else " " for char in words)
    return clean if len(clean) <= most else clean[: most - 1] + "…"


def _legend(axes: Axes, seen: Inspected) -> None:
    _bare(axes, 100, 1)
    said = f"Tokens by how many of {seen.heads} heads kept them"
    if not seen.heads:
        said = "Every layer of this model is windowed: nothing is scored"
    _write(axes, (0, 0.5), said, _BODY_PT, weight="bold", va="center")
    for index, (back, text) in enumerate(palette.shades(dark=False)):
        left = 56 + index * 4
        axes.add_patch(
            Rectangle((left, 0.02), 4, 0.96, facecolor=back, edgecolor=_RULE, lw=0.5, clip_on=False)
        )
        words = {0: "none", LEVELS // 2: "half", LEVELS: "all"}.get(index, "")
        _write(axes, (left + 2, 0.5), words, 6.5, color=text, ha="center", va="center")


def _profile(axes: Axes, seen: Inspected) -> None:
    """Share of heads that kept, over the whole prompt."""
    axes.set_facecolor(_PANEL)
    axes.set(xlim=(0, seen.tokens), ylim=(0, 1), yticks=[], xticks=[])
    axes.spines[:].set_visible(False)
    shares = seen.profile(_PROFILE_BINS)
    if shares:
        edges = np.linspace(0, seen.tokens, len(shares) + 1)
        axes.stairs(shares, edges, fill=True, color=_ACCENT, alpha=0.75)


def _text(axes: Axes, seen: Inspected, page: Page) -> None:
    """Shaded rectangles, and the letters as outlines at exactly their places (a line of text would drift or ligate)."""
    _bare(axes, _COLUMNS * ADVANCE_EM, len(page.lines) * _LINE_EM)
    shades = palette.shades(dark=False)
    levels = [level(votes, seen.heads) for votes in seen.votes.tolist()]
    cells = [cell for cell in page.cells if levels[cell.token]]
    boxes = []
    for cell in cells:
        left, right = cell.column * ADVANCE_EM, (cell.column + cell.width) * ADVANCE_EM
        top, bottom = (cell.line + 0.04) * _LINE_EM, (cell.line + 0.96) * _LINE_EM
        boxes.append(((left, top), (right, top), (right, bottom), (left, bottom)))
    fills = [shades[levels[cell.token]][0] for cell in cells]
    # A hair of page colour between neighbours shows where tokens end.
    axes.add_collection(PolyCollection(boxes, facecolors=fills, edgecolors=_COLOURS["page"], linewidths=0.3))
    inks = [shades[shade][1] for shade in levels]
    paths, colours = glyph_paths(page, inks, _LINE_EM, other=_QUIET)
    axes.add_collection(PathCollection(paths, facecolors=colours, linewidths=0))


def _rows(axes: Axes, seen: Inspected, title: str) -> None:
    """A row per layer, the first one on top."""
    axes.set_title(title, fontsize=_BODY_PT, weight="bold", color=_INK, loc="left", pad=9)
    axes.set_ylim(len(seen.caches) - 0.5, -0.5)
    axes.tick_params(length=0, labelsize=_SMALL_PT, labelcolor=_QUIET)
    axes.spines[:].set_visible(False)


def _map(axes: Axes, seen: Inspected) -> None:
    _rows(axes, seen, "Tokens kept per layer and kv head")
    widest = max(len(row.counts) for row in seen.caches)
    numbered = _MAP_IN * 0.6 / widest >= _NUMBER_IN
    axes.set(xlim=(-0.5, widest - 0.5))
    axes.set_xticks(range(widest), [f"head {head}" if numbered else str(head) for head in range(widest)])
    axes.set_yticks(range(len(seen.caches)), [f"layer {row.index}" for row in seen.caches])
    shades = palette.shades(dark=False)
    for place, row in enumerate(seen.caches):
        for head, count in enumerate(row.counts):
            back, text = shades[level(count, seen.most_kept)] if row.window is None else (_PANEL, _QUIET)
            hatch = "////" if row.window is not None else None
            axes.add_patch(
                Rectangle(
                    (head - 0.49, place - 0.46),
                    0.98,
                    0.92,
                    facecolor=back,
                    edgecolor=_RULE,
                    lw=0.5,
                    hatch=hatch,
                )
            )
            if numbered:
                _write(axes, (head, place), f"{count:,}", _SMALL_PT, color=text, ha="center", va="center")


def _mass(axes: Axes, seen: Inspected) -> None:
    _rows(axes, seen, "Attention mass kept")
    axes.set(xlim=(0, 1), yticks=[], xticks=[])
    for place, row in enumerate(seen.caches):
        if row.window is None and row.kept_mass is not None:
            axes.add_patch(Rectangle((0, place - 0.32), 0.62, 0.64, facecolor=_PANEL))
            axes.add_patch(Rectangle((0, place - 0.32), 0.62 * row.kept_mass, 0.64, facecolor=_ACCENT))
        at = 0 if row.window is not None or row.kept_mass is None else 0.66
        _write(axes, (at, place), _mass_words(row), _SMALL_PT, va="center")


def _mass_words(row: CacheRow) -> str:
    if row.window is not None:
        return f"window {row.window:,}, exact"
    return "not measured" if row.kept_mass is None else f"{row.kept_mass:.2%}"
