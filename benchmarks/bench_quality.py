"""What every eviction method costs in quality, on real weights: against the full cache in the same run.

    python -m benchmarks.bench_quality [--quick] [--minutes 60] [--sets A,B] [--methods A,B] [--cells FILE]

Ends with one table, one plot (quality.png and quality.svg) and one JSON line (result.py). Cells are appended to --cells
after every sample: an interrupted or timed out run prints what there is, and the same command goes on from there.

Regime: SmolLM2-135M-Instruct (the demo model) in bfloat16, raw prompts, greedy; prompts are computed once and every
recipe selects from the same full KV (quality_document.py), survivors go through snapshots into pages and are decoded by
the engine's own step (quality_lanes.py). Bytes are those of K and V really kept; positions and the rest come on top
(`snapshot` in the cells). Fixed seeds.

Text: 2,048 tokens of WikiText-2 or of speeches, then the 32 that follow: KL of the next-token distribution to the full
cache's, along the real text, and how many of the full cache's greedy tokens are greedy here too. The first token is not
counted: it comes out of prefill, from exact attention.
Answers: passkeys at 10 depths, RULER's needles, variable tracking and frequent words, GSM8K. "visible": the prompt with
its question is compressed (its answer's first token is exact, like in service). "withheld": the context is compressed,
then the question runs through decode steps. Sets that the full cache gets less than half right are named and left out.
Second question: "anew" selects from the full blocks for the second question, as kvtide does; "stale" goes on with what
was kept for the first one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import mean

import torch
from transformers import AutoTokenizer

from benchmarks.quality_lanes import Lanes
from benchmarks.quality_methods import BUDGETS, FULL, METHODS, PRESETS, methods
from benchmarks.quality_report import plot, print_by_set, print_ranking, print_sets, print_table
from benchmarks.quality_run import ANEW, VISIBLE, Cell, CellFile, Runner
from benchmarks.quality_sets import SampleSet, all_sets
from benchmarks.result import Bound, print_result
from engine.model import load_model
from engine.weights import ensure_weights

CAN = 0.5
"""Mark that the full cache must reach on a set."""

TRIED = 3
"""Samples of a set by which that is decided."""

QUICK_SETS = ("passkey 2K", "wikitext", "second question 2K", "ruler niah_noise 512")
QUICK_METHODS = ("snapkv", "snapkv kernel 5", "h2o", "streaming_llm", "random", "qa")
RETAINED = 0.9
"""Of the full cache's passkeys, what the default SnapKV must keep at an eighth, and second questions at a quarter."""


class Judged:
    """Which sets the full cache can do, found out as they come up."""

    def __init__(self, runner: Runner, cells: CellFile) -> None:
        self._runner = runner
        self._cells = cells
        self.marks: dict[str, list[float]] = {}

    def can(self, each: SampleSet) -> bool:
        """Tries the full cache on the first samples; sets without answers need no skill.

        A set that is longer than the model's context is not tried.
        """
        context = self._runner.model.spec.context_length
        if any(sample.tokens + sample.new_tokens > context for sample in each.samples()):
            return False
        first = list(islice(each.samples(), TRIED))
        if not first[0].answers:
            return True
        for index, sample in enumerate(first):
            if not self._cells.has(f"{each.name} (full)", index):
                found = self._runner.run(f"{each.name} (full)", index, sample, [])
                self._cells.add(found)
        own = [cell for cell in self._cells.cells if cell.set == f"{each.name} (full)"]
        asked = [cell.mark for cell in own if cell.mode in (VISIBLE, ANEW) and cell.mark is not None]
        self.marks[each.name] = asked
        return mean(asked) >= CAN


def run_all(
    sets: Sequence[SampleSet], runner: Runner, cells: CellFile, options: argparse.Namespace
) -> tuple[dict[str, list[float]], list[str]]:
    """Round after round, one sample of every set, until all are done or the time is; → (full marks, sets left out)."""
    until = time.monotonic() + options.minutes * 60
    judged, left_out = Judged(runner, cells), list[str]()
    chosen = methods(options.methods, options.budgets)
    took: dict[str, float] = {}
    try:
        ready = []
        for each in sets:
            if time.monotonic() >= until:
                print(f"no time for {each.name}: not even tried")
            elif judged.can(each):
                ready.append((each.name, each.samples()))
            else:
                left_out.append(each.name)
        for index in range(options.samples):
            for name, samples in ready:
                sample = next(samples, None)
                if sample is None or cells.has(name, index):
                    continue
                began = time.monotonic()
                if began + took.get(name, 0.0) > until:
                    continue
                cells.add(runner.run(name, index, sample, chosen))
                took[name] = time.monotonic() - began
                print(f"{name} {index}: {took[name]:.1f} s, {sample.tokens} tokens", flush=True)
    except KeyboardInterrupt:
        print("interrupted: what follows is what there is")
    return judged.marks, left_out


def report(
    cells: Sequence[Cell], marks: dict[str, list[float]], left_out: Sequence[str], options: argparse.Namespace
) -> dict[str, float]:
    """Tables and plot; → figures."""
    print_sets(marks, left_out)
    measured = [cell for cell in cells if not cell.set.endswith(" (full)")]
    sets = sorted({cell.set for cell in measured})
    counts = ", ".join(f"{name} {1 + max(c.sample for c in measured if c.set == name)}" for name in sets)
    figures = print_table(measured, f"samples: {counts}")
    print_ranking(measured)
    print_by_set(measured, [FULL, *QUICK_METHODS])
    paths = plot(measured, options.plots, f"SmolLM2-135M, bf16. Samples: {counts}") if measured else []
    print("".join(f"\nplot: {path}" for path in paths))
    for budget, sets_named, key in (
        (0.125, "passkey", "passkey_retained_snapkv_0.125"),
        (0.25, "second", "second_retained_snapkv_0.25"),
    ):
        retained = _retained(measured, sets_named, budget)
        if retained is not None:
            figures[key] = round(retained, 3)
    return figures


def _retained(cells: Sequence[Cell], kind: str, budget: float) -> float | None:
    """Share of the full cache's right answers that the default SnapKV gives, questions in sight."""
    own = [c for c in cells if c.set.startswith(kind) and c.mode in (VISIBLE, ANEW) and c.mark is not None]
    right = {(c.set, c.sample) for c in own if c.method == FULL and c.mark == 1.0}
    found = [c.mark for c in own if (c.method, c.budget) == ("snapkv", budget) and (c.set, c.sample) in right]
    return mean(mark for mark in found if mark is not None) if found else None


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=60.0, help="no sample is begun that would end later")
    parser.add_argument("--samples", type=int, default=10, help="of every set, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--quick", action="store_true", help="few methods, two budgets, two samples of four sets"
    )
    parser.add_argument("--sets", type=_words, help="names, comma-separated; default: all")
    parser.add_argument("--methods", type=_words, default=(), help="names, comma-separated; default: all")
    parser.add_argument("--cells", type=Path, help="default: build/quality-cells.jsonl")
    parser.add_argument("--plots", type=Path, help="folder; default: docs, for a quick run build")
    parser.add_argument("--memory-gb", type=float, default=3.0, help="of decode pages")
    options = parser.parse_args()
    unknown = set(options.methods) - {*METHODS, *PRESETS}
    if unknown:
        parser.error(
            f"unknown methods {', '.join(sorted(unknown))}; there are {', '.join([*METHODS, *PRESETS])}"
        )
    options.budgets = (0.25, 0.125) if options.quick else BUDGETS
    if options.quick:
        options.samples = min(options.samples, 2)
        options.sets = options.sets or QUICK_SETS
        options.methods = options.methods or QUICK_METHODS
    name = "quality-cells-quick.jsonl" if options.quick else "quality-cells.jsonl"
    options.cells = options.cells or Path("build") / name
    options.plots = options.plots or Path("build" if options.quick else "docs")
    return options


def main() -> None:
    """Prints progress, the tables, then one JSON line."""
    options = _options()
    began = time.monotonic()
    torch.set_num_threads(options.threads)
    path = ensure_weights(options.model)
    tokenizer, model = AutoTokenizer.from_pretrained(path), load_model(path)
    sets = all_sets(tokenizer, options.seed)
    unknown = set(options.sets or ()) - set(sets)
    if unknown:
        raise SystemExit(f"unknown sets {', '.join(sorted(unknown))}; there are {', '.join(sets)}")
    wanted = [sets[name] for name in options.sets or sets]
    identity = f"{model.spec.fingerprint.digest.hex()} seed {options.seed} methods {options.methods} {options.budgets}"
    cells = CellFile(options.cells, identity)
    runner = Runner(model, tokenizer, Lanes(model, int(options.memory_gb * 2**30), 192))
    marks, left_out = run_all(wanted, runner, cells, options)
    figures = report(cells.cells, marks, left_out, options)
    figures["run_s"] = round(time.monotonic() - began)
    targets: dict[str, Bound] = {
        name: {"at_least": RETAINED} for name in figures if name.split("_")[1] == "retained"
    }
    print_result(
        "quality",
        f"{options.model}, {model.spec.dtype}, raw prompts, greedy, seed {options.seed}, "
        f"{'quick' if options.quick else 'whole'} run".replace("torch.", ""),
        "full cache, same run, same prompts",
        figures,
        targets,
    )


if __name__ == "__main__":
    main()
