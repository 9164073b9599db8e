"""Prefills a text under a recipe, in this process and without Ray, and notes what every kv head kept."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from deployments.api.card import ModelCard
from deployments.config import AppArgs, resolve
from deployments.inspection.inspected import CacheRow, Inspected, known, readable
from deployments.inspection.page import page
from deployments.offline import choose_recipe, read_prompt
from deployments.served_model import model_card
from engine.errors import KvtideError
from engine.model import Model, ModelSpec, load_model
from engine.prefill import PrefillDone, PrefillEngine, PrefillJob, run_to_end
from engine.request import GenerationRequest, SamplingParams
from engine.weights import ensure_weights
from policies.recipe import Recipe

_TWICE = "{} is given twice, by itself and in --kv"


class NoPicture(KvtideError):
    """PNGs were not written, for want of matplotlib; pages were."""


@dataclass(frozen=True)
class Inspection:
    """What is asked for. `bases`: recipes to compare, {"policy": name} or {"recipe": name}, none for the default one.

    `fields` go over each of them. Files are called `out` + .html and .png, with the base's name between where there
    are several; `source` is what the pages say of where the text came from.
    """

    text: str
    source: str
    out: str
    bases: tuple[Mapping[str, object], ...] = ()
    fields: Mapping[str, object] | None = None
    chat: bool = False

    def files(self) -> list[tuple[dict[str, object], str]]:
        """Per recipe its fields, as a request's `kv` has them, and its files' name without an ending."""
        given = dict(self.fields or {})
        for base in self.bases:
            if twice := sorted(base.keys() & given.keys()):
                raise ValueError(_TWICE.format(twice[0]))
        if len(self.bases) < 2:
            return [({**given, **dict(*self.bases)}, self.out)]
        named = [
            ({**given, **base}, f"{self.out}-{re.sub(r'[^A-Za-z0-9._-]+', '-', str(*base.values()))}")
            for base in self.bases
        ]
        names = [name for _, name in named]
        if len(set(names)) < len(names):
            raise ValueError("the same recipe is given twice")
        return named


def make_inspection(
    file: str,
    *,
    policies: Sequence[str] = (),
    recipes: Sequence[str] = (),
    budget: int | float | str | None = None,
    kv: Mapping[str, object] | None = None,
    chat: bool = False,
    out: str | None = None,
) -> Inspection:
    """Read the text; "-" is standard input. Raises ValueError for what cannot be read, or would be written over."""
    bases = [{"policy": name} for name in policies] + [{"recipe": name} for name in recipes]
    fields = dict(kv or {})
    if budget is not None:
        if "budget" in fields:
            raise ValueError(_TWICE.format("budget"))
        fields["budget"] = budget
    if file == "-":
        return Inspection(sys.stdin.read(), "standard input", out or "stdin.kept", tuple(bases), fields, chat)
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read as text: {error}") from None
    wanted = Inspection(text, path.name, out or f"{path.stem}.kept", tuple(bases), fields, chat)
    for name in (f"{stem}{ending}" for _, stem in wanted.files() for ending in (".html", ".png")):
        if Path(name).exists() and Path(name).samefile(path):
            raise ValueError(f"{name} would be written over the text itself; give another --out")
    return wanted


def inspect(options: AppArgs, wanted: Inspection) -> Iterator[Path]:
    """Write a page and a picture per recipe; yields each file's path when it is there.

    Raises ValueError naming the recipe field that is wrong, `KvtideError` for a text that the model cannot take, and
    `NoPicture` at the end where only pages could be written.
    """
    files = wanted.files()
    torch.set_num_threads(options.threads or resolve(options).cores)
    card = model_card(options)
    prompt = read_prompt(card, wanted.text, wanted.chat)
    recipes = [choose_recipe(card, given, prompt) for given, _ in files]
    model = load_model(ensure_weights(options.model), options.dtype, options.block_tokens)
    model.spec = replace(model.spec, context_length=card.context_length)
    drawing = importlib.util.find_spec("matplotlib") is not None
    for recipe, (_, out) in zip(recipes, files, strict=True):
        done = prefill(model, prompt.tokens, recipe, options.chunk_tokens)
        seen = inspected(done, model.spec, card, wanted.source)
        yield write_whole(Path(f"{out}.html"), page(seen).encode())
        if drawing:
            from deployments.inspection.picture import picture

            yield write_whole(Path(f"{out}.png"), picture(seen))
    if not drawing:
        raise NoPicture(
            "PNG pictures need matplotlib: pip install 'kvtide[plots]'; the HTML pages are written"
        )


def prefill(model: Model, prompt: Sequence[int], recipe: Recipe, chunk_tokens: int = 1024) -> PrefillDone:
    """One prompt to its end, with its report. Raises `KvtideError`."""
    engine = PrefillEngine(model, chunk_tokens=chunk_tokens)
    sampling = SamplingParams(temperature=0.0, max_tokens=1)
    request = GenerationRequest("inspect", tuple(prompt), sampling, recipe, report=True)
    engine.add(PrefillJob(request, engine.open_workspace(request)))
    (done,) = run_to_end(engine)
    return done


def inspected(done: PrefillDone, spec: ModelSpec, card: ModelCard, source: str) -> Inspected:
    """The numbers of a finished prompt."""
    request, report = done.job.request, done.report
    tokens = len(request.prompt)
    masses = report.kept_mass or ()
    place = {cache: i for i, cache in enumerate(report.layers)}
    caches = [
        CacheRow(
            index,
            layer.window,
            report.budgets[place[index]] if index in place else None,
            tuple(survivors.count(head) for head in range(survivors.kv_heads)),
            known(masses[place[index]]) if masses and index in place else None,
        )
        for index, (layer, survivors) in enumerate(zip(spec.layers, done.survivors, strict=True))
    ]
    kept = np.zeros((sum(len(caches[index].counts) for index in report.layers), tokens), bool)
    row = 0
    for survivors in (done.survivors[index] for index in report.layers):
        for head in range(survivors.kv_heads):
            if survivors.positions is None:
                kept[row, survivors.first :] = True
            else:
                kept[row, survivors.positions[head].long().cpu().numpy()] = True
            row += 1
    return Inspected(
        model=card.names[0],
        recipe_id=request.recipe.recipe_id,
        source=source,
        texts=readable([card.token_bytes(token) for token in request.prompt]),
        kept=kept,
        caches=tuple(caches),
        kept_bytes=done.layout.payload_bytes,
        full_bytes=spec.kv_bytes_per_token * tokens,
        entropy=report.entropy,
    )


def write_whole(path: Path, data: bytes) -> Path:
    """A file that appears whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path
