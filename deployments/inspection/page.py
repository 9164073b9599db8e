"""The page of one inspected prompt: one HTML file that needs nothing else, in light and dark, and works without script.

With script, a token says which heads kept it, and a head which tokens it kept.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from html import escape
from pathlib import Path
from string import Template

import numpy as np

from deployments.inspection import palette
from deployments.inspection.inspected import LEVELS, CacheRow, Inspected, level

_PROFILE_BINS = 400
# Of the C0 and C1 control characters only tab and end of line mean something in HTML; the others are shown as pictures.
_CONTROLS = {
    **{code: chr(0x2400 + code) for code in range(32) if code not in (9, 10)},
    **dict.fromkeys(range(127, 160), "\ufffd"),
}


def page(seen: Inspected) -> str:
    """The whole file, to be written as UTF-8."""
    script = _file("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    scored = f"all {seen.heads} kv heads of the {len(seen.scored)} scored layers"
    return Template(_file("page.html")).substitute(
        script=script,
        script_hash=f"sha256-{digest}",
        style=_file("page.css"),
        colours=_colours(),
        title=_safe(f"{seen.recipe_id} on {seen.source}"),
        recipe=_safe(seen.recipe_id),
        facts="\n".join(
            f"<div><dt>{_safe(k)}</dt><dd>{_safe(v)}</dd></div>" for k, v in seen.facts() if k != "Recipe"
        ),
        shading=f"The stronger its shade, the more of {scored} kept a token."
        if seen.heads
        else "Every layer of this model is windowed: no recipe chooses among its tokens.",
        swatches="\n".join(_swatches(seen)),
        profile=_profile(seen),
        tokens=_tokens(seen),
        caches_note=_caches_note(seen),
        heads="".join(
            f'<th scope="col">head {head}</th>' for head in range(max(len(row.counts) for row in seen.caches))
        ),
        rows="\n".join(_rows(seen)),
        data=_data(seen),
    )


@cache
def _file(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _safe(text: str) -> str:
    """Text that may stand between tags and in attributes."""
    return escape(text.translate(_CONTROLS))


def _colours() -> str:
    def block(dark: bool) -> str:
        steps = "".join(
            f"--b{i}:{back};--t{i}:{text};" for i, (back, text) in enumerate(palette.shades(dark))
        )
        frame = "".join(f"--{name}:{colour};" for name, colour in palette.frame(dark).items())
        return f":root{{{frame}{steps}}}"

    shades = "\n".join(f".l{i}{{background:var(--b{i});color:var(--t{i})}}" for i in range(LEVELS + 1))
    return f"{block(False)}\n@media (prefers-color-scheme: dark) {{{block(True)}}}\n{shades}"


def _swatches(seen: Inspected) -> list[str]:
    held = [0] * (LEVELS + 1)
    for votes in seen.votes.tolist():
        held[level(votes, seen.heads)] += 1
    return [f'<i class="l{i}" title="{count:,} tokens"></i>' for i, count in enumerate(held)]


def _profile(seen: Inspected) -> str:
    """Kept share along the prompt, as steps."""
    shares = seen.profile(_PROFILE_BINS)
    if not shares:
        return ""
    steps = "".join(f"V{100 - share * 100:.1f}h1" for share in shares)
    said = "Share of heads that kept, from the first token to the last"
    return (
        f'<svg viewBox="0 0 {len(shares)} 100" preserveAspectRatio="none" role="img" aria-label="{said}">'
        f'<title>{said}</title><path fill="currentColor" fill-opacity=".75" d="M0 100{steps}V100z"/></svg>'
    )


def _tokens(seen: Inspected) -> str:
    parts = []
    for index, (text, votes) in enumerate(zip(seen.texts, seen.votes.tolist(), strict=True)):
        blank = " n" if "\n" in text and not text.strip() else ""
        said = f"token {index:,}: kept by {votes} of {seen.heads} heads"
        if seen.heads:
            said += f" ({votes / seen.heads:.0%})"
        parts.append(f'<span class="l{level(votes, seen.heads)}{blank}" title="{said}">{_safe(text)}</span>')
    return "".join(parts)


def _caches_note(seen: Inspected) -> str:
    note = f"Shade: of the {seen.most_kept:,} tokens that the fullest head holds."
    if seen.heads:
        note += (
            " Press a cell to see what that head alone kept. Attention mass: of the prompt's last queries."
        )
    if len(seen.scored) < len(seen.caches):
        note += " Windowed layers (hatched) hold what their window still sees, whatever the recipe."
    return note


def _rows(seen: Inspected) -> list[str]:
    widest = max(len(row.counts) for row in seen.caches)
    rows = []
    for row in seen.caches:
        absent = "<td></td>" * (widest - len(row.counts))
        cells = "".join(_cell(seen, row, head, count) for head, count in enumerate(row.counts))
        style = "" if row.window is None else ' class="windowed"'
        rows.append(f'<tr{style}><th scope="row">{row.index}</th>{cells}{absent}<td>{_mass(row)}</td></tr>')
    return rows


def _cell(seen: Inspected, row: CacheRow, head: int, count: int) -> str:
    if row.window is not None:
        return f'<td><span class="plain">{count:,}</span></td>'
    said = f"layer {row.index}, kv head {head}: {count:,} of {seen.tokens:,} tokens, budget {row.budget:,}"
    shade = level(count, seen.most_kept)
    return f'<td><button type="button" class="l{shade}" aria-pressed="false" title="{said}">{count:,}</button></td>'


def _mass(row: CacheRow) -> str:
    if row.window is not None:
        return f'<span class="mass">window {row.window:,}, exact</span>'
    if row.kept_mass is None:
        return '<span class="mass">not measured</span>'
    width = min(100.0, max(0.0, row.kept_mass * 100))
    return f'<span class="mass"><b><i style="width:{width:.1f}%"></i></b>{row.kept_mass:.2%}</span>'


def _data(seen: Inspected) -> str:
    """JSON for the script. bits: heads x tokens, rows padded to bytes, most significant bit first."""
    bits = base64.b64encode(np.packbits(seen.kept, axis=1).tobytes()).decode()
    return json.dumps({"tokens": seen.tokens, "heads": seen.heads, "levels": LEVELS, "bits": bits})
