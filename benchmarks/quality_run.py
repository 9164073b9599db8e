"""Runs samples: every method's survivors of one document, decoded side by side; results as cells, written at once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from benchmarks.quality_document import Document, Packed, Text
from benchmarks.quality_lanes import Lanes, log_probabilities
from benchmarks.quality_methods import FULL_METHOD, Method
from benchmarks.quality_sets import Sample
from engine.model import Model

PLAIN, VISIBLE, WITHHELD, ANEW, STALE = "plain", "visible", "withheld", "anew", "stale"


@dataclass(frozen=True)
class Cell:
    """One sample under one method. `payload`: bytes of K and V kept, `snapshot` those with positions and everything.

    `mark` is there for sets with answers; for text: `kl` (nats, mean over the tokens after the first; full cache to
    this one), `nll` of the real text, `agree`: share of the full cache's greedy tokens that are greedy here too, and
    `prefix`: how many of them come before the first that is not.
    """

    set: str
    sample: int
    mode: str
    method: str
    budget: float | None
    recipe: str
    prompt_tokens: int
    payload: int
    snapshot: int
    full_payload: int
    mark: float | None = None
    answer: str | None = None
    kl: float | None = None
    nll: float | None = None
    agree: float | None = None
    prefix: int | None = None


class CellFile:
    """Cells as JSON lines; what an earlier run left there counts, if it was the same benchmark."""

    def __init__(self, path: Path, identity: str) -> None:
        self.path = path
        self.cells: list[Cell] = []
        if path.exists():
            lines = path.read_text().splitlines()
            if not lines or json.loads(lines[0]) != {"identity": identity}:
                raise SystemExit(
                    f"{path} holds the cells of another run: move it away, or give another --cells"
                )
            self.cells = [Cell(**json.loads(line)) for line in lines[1:]]
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"identity": identity}) + "\n")

    def add(self, cells: Sequence[Cell]) -> None:
        with self.path.open("a") as file:
            file.writelines(json.dumps(asdict(cell)) + "\n" for cell in cells)
        self.cells += cells

    def has(self, set_name: str, sample: int) -> bool:
        return any(cell.set == set_name and cell.sample == sample for cell in self.cells)


class _Prompt(NamedTuple):
    """What is compressed, and what is fed to the compressed cache before anything is judged."""

    text: Text
    after: list[int]


class _Reference(NamedTuple):
    """Of the full cache: log-probabilities [T, vocab] after each token of the real text but the last, greedy ids."""

    logs: Tensor
    greedy: list[int]


class Runner:
    """Runs single samples. Not thread-safe."""

    def __init__(self, model: Model, tokenizer: PreTrainedTokenizerBase, lanes: Lanes) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.lanes = lanes

    def run(self, name: str, index: int, sample: Sample, methods: Sequence[Method]) -> list[Cell]:
        """All modes of one sample, under the full cache and all of `methods`."""
        document = Document(self.model, sample.tokens)
        cells = []
        for mode, prompt in self._modes(document, sample):
            start = document.logits[prompt.text.tokens]
            full = prompt.text.pack(FULL_METHOD.recipe(prompt.text.tokens))
            reference = None if sample.answers else self._reference(full, prompt, sample, start)
            for group in self._groups(prompt, sample, [FULL_METHOD, *methods]):
                packed = [pack for _, pack in group]
                if reference is None:
                    found = self._marks(packed, prompt, sample, start)
                else:
                    found = self._distances(packed, prompt, sample, reference)
                for (method, pack), values in zip(group, found, strict=True):
                    facts = (name, index, mode, method.name, method.budget, pack.recipe.recipe_id)
                    layout = pack.layout
                    sizes = (layout.payload_bytes, layout.nbytes, full.layout.payload_bytes)
                    cells.append(Cell(*facts, prompt.text.tokens, *sizes, **values))  # type: ignore[arg-type]
        return cells

    def _modes(self, document: Document, sample: Sample) -> Iterator[tuple[str, _Prompt]]:
        context = document.read(sample.context)
        if sample.first:
            asked, rest = sample.first[: sample.asked], sample.first[sample.asked :] + sample.question
            yield STALE, _Prompt(document.read(asked), rest)
            yield ANEW, _Prompt(document.read(rest), [])
        elif sample.question:
            yield WITHHELD, _Prompt(context, sample.question)
            yield VISIBLE, _Prompt(document.read(sample.question), [])
        else:
            yield PLAIN, _Prompt(context, [])

    def _groups(
        self, prompt: _Prompt, sample: Sample, methods: Sequence[Method]
    ) -> Iterator[list[tuple[Method, Packed]]]:
        """As many methods at once as the pool has room for."""
        copies = 1 if sample.answers else 2
        more = len(prompt.after) + max(sample.new_tokens, len(sample.following))
        pool, group, pages = self.lanes.pool, list[tuple[Method, Packed]](), 0
        for method in methods:
            packed = prompt.text.pack(method.recipe(prompt.text.tokens))
            # Copies share what they do not write; a page per head and copy is more than they ever have alone.
            needed = self.lanes.room(packed, more) * copies
            full_up = pages + needed > pool.use.total or (len(group) + 1) * copies > pool.rows
            if group and full_up:
                yield group
                group, pages = [], 0
            group.append((method, packed))
            pages += needed
        yield group

    def _marks(
        self, packed: Sequence[Packed], prompt: _Prompt, sample: Sample, start: Tensor
    ) -> list[dict[str, object]]:
        with self.lanes.opened(packed) as lanes:
            logits = self.lanes.feed(lanes, prompt.after) if prompt.after else start.expand(len(lanes), -1)
            texts = [self._shown(ids) for ids in self.lanes.greedy(lanes, logits, sample.new_tokens)]
        return [{"mark": sample.mark(text), "answer": text} for text in texts]

    def _shown(self, ids: list[int]) -> str:
        """Text up to the first end token."""
        ends = [at for at, token in enumerate(ids) if token in self.model.spec.end_tokens]
        return self.tokenizer.decode(ids[: ends[0]] if ends else ids)

    def _reference(self, full: Packed, prompt: _Prompt, sample: Sample, start: Tensor) -> _Reference:
        real, logs = sample.following, []
        with self.lanes.opened([full]) as one:
            if prompt.after:
                start = self.lanes.feed(one, prompt.after)[0]
            greedy = [int(start.argmax())]
            with self.lanes.copied(one, 2) as lanes:
                for token in real[:-1]:
                    logits = self.lanes.step(lanes, [token, greedy[-1]])
                    logs.append(log_probabilities(logits[0]))
                    greedy.append(int(logits[1].argmax()))
        return _Reference(torch.stack(logs), greedy)

    def _distances(
        self, packed: Sequence[Packed], prompt: _Prompt, sample: Sample, reference: _Reference
    ) -> list[dict[str, object]]:
        """Every method twice: along the real text, and along what the full cache would write."""
        real, greedy = sample.following, reference.greedy
        divergence, surprise, same = [], [], []
        with self.lanes.opened(packed) as ones:
            if prompt.after:
                self.lanes.feed(ones, prompt.after)
            with self.lanes.copied(ones, 2) as lanes:
                for at in range(len(real) - 1):
                    logits = self.lanes.step(lanes, [real[at], greedy[at]] * len(packed))
                    logs, known = log_probabilities(logits[::2]), reference.logs[at]
                    divergence.append((known.exp() * (known - logs)).sum(-1))
                    surprise.append(-logs[:, real[at + 1]])
                    same.append(logits[1::2].argmax(-1) == greedy[at + 1])
        agree = torch.stack(same).float()
        return [
            {"kl": kl, "nll": nll, "agree": share, "prefix": int(prefix)}
            for kl, nll, share, prefix in zip(
                torch.stack(divergence).mean(0).tolist(),
                torch.stack(surprise).mean(0).tolist(),
                agree.mean(0).tolist(),
                agree.cumprod(0).sum(0).tolist(),
                strict=True,
            )
        ]
