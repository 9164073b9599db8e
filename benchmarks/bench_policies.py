"""What eviction costs: selection against prefill, decode rules against plain decode, an endless stream.

    python -m benchmarks.bench_policies [--quick] [--sizes 4096,8192] [--stream 20000] [--threads 1]

Ends with one JSON line (result.py). About 2 minutes with --quick.

Regime: SmolLM2-135M (the demo model) in its own dtype, one thread, real text. Prefill: our engine and a bare
transformers forward (bare_forward.py, a process of its own) in turn. Selection: every method from the same prompt's
keys, values and recorded queries, 1024 tokens kept; observers, which work while the prompt is computed, are timed apart
and counted in; shares are of our own prefill in this run. H2O's second pass is also set against its share of the FLOPs.
Decode: rows of as many slots that only grow, and rows whose rule sees every step's attention, in turn in one process.
Stream: StreamingLLM with positions by slot, teacher-forced; beside it windows computed anew (policies_stream.py).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from transformers import AutoTokenizer

from benchmarks.bare_forward import BareForward, Forward
from benchmarks.corpus import Corpus
from benchmarks.policies_cost import (
    SELECTION_BUDGET,
    Prefill,
    Selecting,
    Steps,
    column_sum_share,
    decode_recipes,
    measure_selection,
    measure_steps,
    prefill,
)
from benchmarks.policies_stream import JUDGED, Stream, run_stream
from benchmarks.quality_document import Document, Text
from benchmarks.quality_lanes import Lanes
from benchmarks.result import Bound, print_result
from engine.model import Model, load_model
from engine.weights import ensure_weights
from policies.recipe import make_recipe

Figures = dict[str, float]

FULL = make_recipe(policy="full")
TARGETS: Mapping[str, Bound] = {
    "prefill_ratio": {"at_most": 1.1},  # ours over transformers'
    "prefill_cpu_ratio": {"at_most": 1.1},  # where others use the cores, a lucky wall time proves nothing
    "select_share_snapkv": {"at_most": 0.03},  # of our prefill
    "h2o_over_arithmetic": {"at_most": 1.3},  # share of time over share of FLOPs
    "h2o_prefill_over_arithmetic": {"at_most": 1.3},
    "decode_ratio": {"at_most": 1.15},  # a step with attention observed over one without
    "decode_cpu_ratio": {"at_most": 1.15},
}


class Prefills(NamedTuple):
    """Alternating runs over one prompt: transformers', ours with nothing evicted, and ours with H2O's second pass."""

    bare: list[Forward]
    full: list[Prefill]
    h2o: list[Prefill]


def measure_prefill(model: Model, bare: BareForward, ids: Sequence[int], rounds: int) -> Prefills:
    found = Prefills([], [], [])
    h2o = make_recipe(policy="h2o", budget=min(SELECTION_BUDGET, len(ids) // 4))
    for _ in range(rounds):
        found.bare.append(bare.run(ids))
        found.full.append(prefill(model, ids, FULL))
        found.h2o.append(prefill(model, ids, h2o))
    return found


def _wall(runs: Sequence[Forward | Prefill]) -> float:
    return statistics.median(run.wall_s for run in runs)


def _cpu(runs: Sequence[Forward | Prefill]) -> float:
    return statistics.median(run.cpu_s for run in runs)


def print_selection(size: int, runs: Prefills, found: Mapping[str, Selecting], share: float) -> Figures:
    ours, theirs, cpu_ratio = _wall(runs.full), _wall(runs.bare), _cpu(runs.full) / _cpu(runs.bare)
    print(
        f"\nprefill of {size}: ours {ours:.2f} s, transformers {theirs:.2f} s, ratio {ours / theirs:.3f}, "
        f"of processor time {cpu_ratio:.3f}"
    )
    print(f"{'selection':<20}{'select ms':>11}{'observe ms':>12}{'of prefill':>12}{'of bare':>9}")
    figures = {
        f"prefill_s_{size}": round(ours, 3),
        f"bare_s_{size}": round(theirs, 3),
        f"prefill_ratio_{size}": round(ours / theirs, 3),
        f"prefill_cpu_ratio_{size}": round(cpu_ratio, 3),
    }
    for name, each in found.items():
        row = f"{name:<20}{each.select_s * 1e3:>11.1f}{each.observer_s * 1e3:>12.1f}"
        print(f"{row}{each.all_s / ours:>12.2%}{each.all_s / theirs:>9.2%}")
        figures[f"select_share_{name.replace(' ', '_')}_{size}"] = round(each.all_s / ours, 5)
    pass_share = found["h2o"].observer_s / ours
    inside = _cpu(runs.h2o) / _cpu(runs.full) - 1
    print(
        f"h2o's second pass: {share:.2%} of the FLOPs; by itself {pass_share:.2%} of prefill, "
        f"x{pass_share / share:.2f}; a prefill with it takes {inside:.2%} more processor time, x{inside / share:.2f}"
    )
    figures[f"h2o_flop_share_{size}"] = round(share, 4)
    figures[f"h2o_over_arithmetic_{size}"] = round(pass_share / share, 3)
    figures[f"h2o_prefill_over_arithmetic_{size}"] = round(inside / share, 3)
    return figures


def print_steps(batch: int, slots: int, found: Mapping[str, Steps]) -> Figures:
    print(f"\n{f'decode, {batch} x {slots}':<20}{'step ms':>11}{'of grow':>10}{'cpu':>8}")
    figures: Figures = {}
    for name, steps in found.items():
        print(f"{name:<20}{steps.step_s * 1e3:>11.2f}{steps.ratio:>10.3f}{steps.cpu_ratio:>8.3f}")
        key = name.replace(", ", "_").replace(" ", "_")
        figures[f"step_ms_{key}_n{batch}"] = round(steps.step_s * 1e3, 3)
        if name != "grow":
            figures[f"decode_ratio_{key}_n{batch}"] = round(steps.ratio, 3)
            figures[f"decode_cpu_ratio_{key}_n{batch}"] = round(steps.cpu_ratio, 3)
    return figures


def print_stream(stream: Stream) -> Figures:
    streamed, recomputed = (sum(side) for side in zip(*stream.pairs, strict=True))
    tokens, count = len(stream.nll), len(stream.pairs) * JUDGED
    step, window = stream.step_s / tokens, stream.window_s / len(stream.pairs)
    print(
        f"\nstream of {tokens} tokens in {stream.budget} slots ({stream.sinks} sinks): {1 / step:.1f} tokens/s, "
        f"mean {sum(stream.nll) / tokens:.3f} nats; pages {max(stream.pages)}, grown by {stream.page_growth}\n"
        f"{len(stream.pairs)} windows computed anew ({window:.2f} s each, {window / step:.0f} steps): "
        f"{recomputed / count:.4f} nats a token, the stream {streamed / count:.4f}, ratio {stream.nll_ratio:.4f}"
    )
    return {
        "stream_tokens": tokens,
        "stream_tokens_per_s": round(1 / step, 2),
        "stream_nll": round(streamed / count, 4),
        "stream_nll_recomputed": round(recomputed / count, 4),
        "stream_nll_ratio": round(stream.nll_ratio, 4),
        "stream_nll_distance": round(abs(stream.nll_ratio - 1), 4),
        "stream_pages": max(stream.pages),
        "stream_page_growth": stream.page_growth,
        "stream_window_over_step": round(window / step, 1),
    }


def targets_of(figures: Figures) -> dict[str, Bound]:
    """The targets that this run can judge; decode is judged by H2O's rule, evicting one token every step."""
    found = {}
    for name in figures:
        for prefix, bound in TARGETS.items():
            rest = name.removeprefix(prefix)
            if name.startswith(prefix) and (rest[1:].isdigit() or rest.startswith("_h2o_n")):
                found[name] = bound
    if "stream_nll_distance" in figures:
        found |= {"stream_nll_distance": {"at_most": 0.05}, "stream_page_growth": {"at_most": 0.0}}
    return found


def measure_costs(model: Model, bare: BareForward, corpus: Corpus, options: argparse.Namespace) -> Figures:
    """Prefill and selection at each size; prints as it goes."""
    figures: Figures = {}
    for size in options.sizes:
        ids = corpus.take(size)
        runs = measure_prefill(model, bare, ids, options.rounds)
        text: Text = Document(model, size).read(ids)
        found = measure_selection(text, max(3, options.rounds))
        figures |= print_selection(size, runs, found, column_sum_share(model, size))
    return figures


def measure_decode(model: Model, corpus: Corpus, options: argparse.Namespace) -> Figures:
    """Decode steps of all kinds of rows."""
    figures: Figures = {}
    text = Document(model, 2 * options.slots).read(corpus.take(2 * options.slots))
    packed = {name: text.pack(recipe) for name, recipe in decode_recipes(options.slots).items()}
    for batch in options.batches:
        rows = len(packed) * batch
        each = (options.slots + 512) * model.spec.kv_bytes_per_token
        lanes = Lanes(model, 2 * rows * each, rows)
        found = measure_steps(lanes, packed, batch, 20 if options.quick else 80)
        figures |= print_steps(batch, options.slots, found)
    return figures


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="2048 tokens, short turns, a stream of 1500")
    parser.add_argument("--sizes", type=_numbers, help="prompt tokens, comma-separated; default 4096,8192")
    parser.add_argument("--rounds", type=int, help="default 3, with --quick 2")
    parser.add_argument("--batches", type=_numbers, default=[1, 8], help="rows decoded at once")
    parser.add_argument("--slots", type=int, help="of a decoded row; default 2048, with --quick 512")
    parser.add_argument("--stream", type=int, help="tokens; 0 for none; default 20000")
    parser.add_argument("--stream-budget", type=int, help="slots; default 1024, with --quick 512")
    parser.add_argument("--windows", type=int, help="computed anew; default 60, with --quick 8")
    parser.add_argument("--only", choices=("selection", "decode", "stream"), help="one part alone")
    given = parser.parse_args()
    quick = given.quick
    given.sizes = given.sizes or ([2048] if quick else [4096, 8192])
    given.rounds = given.rounds or (2 if quick else 3)
    given.slots = given.slots or (512 if quick else 2048)
    given.stream = (1500 if quick else 20000) if given.stream is None else given.stream
    given.stream_budget = given.stream_budget or (512 if quick else 1024)
    given.windows = given.windows or (8 if quick else 60)
    return given


def main() -> None:
    """Prints the tables, then one JSON line."""
    options = _options()
    began = time.monotonic()
    torch.set_num_threads(options.threads)
    path = ensure_weights(options.model)
    tokenizer, model = AutoTokenizer.from_pretrained(path), load_model(path)
    corpus = Corpus(tokenizer)
    figures: Figures = {}
    print(f"{options.threads} thread(s), {model.spec.dtype}".replace("torch.", ""))
    if options.only in (None, "selection"):
        with BareForward(options.model, options.threads, 0) as bare:
            figures |= measure_costs(model, bare, corpus, options)
    if options.only in (None, "decode"):
        figures |= measure_decode(model, corpus, options)
    if options.stream and options.only in (None, "stream"):
        budget = options.stream_budget
        lanes = Lanes(model, 2 * (budget + 512) * model.spec.kv_bytes_per_token, 1)
        ids = corpus.take(options.stream + budget)
        figures |= print_stream(run_stream(model, lanes, ids, budget, 4, options.windows))
    figures["run_s"] = round(time.monotonic() - began)
    print_result(
        "policies",
        f"one machine, {options.threads} thread(s), {'quick' if options.quick else 'whole'} run",
        "bare transformers forward (sdpa, logits_to_keep=1); rows that only grow; windows computed anew; same run",
        figures,
        targets_of(figures),
    )


if __name__ == "__main__":
    main()
