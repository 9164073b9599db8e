"""A running service against bare transformers and against the machine's memory bandwidth.

    python -m benchmarks.bench_serving [--url URL] [--quick] [--sizes 1024,4096,7000] [--concurrency 1,4,8]

Ends with one JSON line (result.py). About 8 minutes on 2 idle cores, 2 with --quick.

Regime: one machine, real text, greedy. Cold prompts run alone, each under a new `cache_salt`, given as token ids. Load:
N requests over one cached document, each with 64 tokens of its own behind it; once all N decode, they are watched for
some seconds (so tokens/s is of the full batch, prefill apart) and then left. Full KV and SnapKV 512 take turns.

Baselines, in the same run and in turn with the service: a transformers forward of the same prompt with as many threads
as a prefill replica and its priority (bare_forward.py); torch's `enable_gqa` attention; reading weights and KV once at
the bandwidth that a plain read loop reaches. Without --url, port 8000 of this machine is tried; when nothing answers
there, a service is started for the run and stopped. What is read from /proc (processor time, memory) is n/a where the
service's processes are not found on this machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence

import torch
from transformers import AutoTokenizer

from benchmarks.bare_forward import BareForward, ModelSizes
from benchmarks.corpus import Corpus
from benchmarks.machine import Machine, measure_machines
from benchmarks.phases import POLICIES, Bench, Cold, Load
from benchmarks.result import Bound, print_result
from benchmarks.running_service import Processes, Service, find_or_start
from deployments.config import AppArgs, resolve
from engine.weights import ensure_weights
from kernels.layout import min_page_bytes

TTFT_TARGET = 1.1  # cold time to first token over a bare forward of the same prompt, at most
ATTENTION_TARGET = 10.0  # native decode attention over torch's, bf16, 4096 tokens, at least
POOLS = ("Prefill", "Decode", "Gateway")
Figures = dict[str, float]


def _rounds(size: int, quick: bool) -> tuple[int, int]:
    """(cold, load) rounds: as many as minutes allow."""
    if quick:
        return (2 if size <= 1024 else 1), 1
    if size <= 1024:
        return 5, 2
    return (2, 2) if size <= 4096 else (1, 1)


def print_machine(machines: Sequence[Machine]) -> Figures:
    print(
        f"\n{'machine':<12}{'read GB/s':>10}{'native us':>11}{'sdpa us':>9}{'speed-up':>10}"
        "   one layer, 4096 tokens, bf16"
    )
    figures: Figures = {}
    for each in machines:
        name = f"{each.threads} thread" + "s" * (each.threads > 1)
        row = f"{each.read_bytes_per_s / 1e9:>10.1f}{each.native_us:>11.0f}{each.sdpa_us:>9.0f}"
        print(f"{name:<12}{row}{each.speedup:>10.1f}")
        figures[f"read_gb_s_t{each.threads}"] = round(each.read_bytes_per_s / 1e9, 2)
        figures[f"attention_speedup_t{each.threads}"] = round(each.speedup, 2)
    return figures


def print_cold(cold: Cold, local: bool) -> Figures:
    print(
        f"\n{'cold':<6}{'policy':<12}{'bare s':>8}{'TTFT s':>8}{'ratio':>7}{'cpu ratio':>11}"
        f"{'handover ms':>13}{'shipped MB':>12}{'kept':>6}{'rounds':>8}   same first token as bare"
    )
    bare = statistics.median(each.wall_s for each in cold.bare)
    figures: Figures = {f"bare_s_{cold.size}": round(bare, 3)}
    for policy in POLICIES:
        ttft = statistics.median(cold.ttft_s[policy])
        handover = statistics.median(cold.handover_s[policy]) * 1e3
        cpu = f"{cold.cpu_ratio(policy):.2f}" if local else "n/a"
        same = f"   {sum(cold.same_token)}/{len(cold.same_token)}" if policy == "full" else ""
        print(
            f"{cold.size:<6}{policy:<12}{bare:>8.2f}{ttft:>8.2f}{cold.ratio(policy):>7.2f}{cpu:>11}"
            f"{handover:>13.0f}{cold.shipped_bytes[policy] / 1e6:>12.1f}{cold.kept_tokens[policy]:>6}"
            f"{len(cold.bare):>8}{same}"
        )
        key = f"{cold.size}_{policy.replace(' ', '')}"
        figures[f"ttft_s_{key}"] = round(ttft, 3)
        figures[f"ttft_ratio_{key}"] = round(cold.ratio(policy), 3)
        if local:
            figures[f"ttft_cpu_ratio_{key}"] = round(cold.cpu_ratio(policy), 3)
        figures[f"handover_ms_{key}"] = round(handover, 1)
    return figures


def print_loads(
    loads: Sequence[Load], kept: Mapping[str, int], sizes: ModelSizes, machine: Machine, page_bytes: int
) -> Figures:
    print(
        f"\n{'load':<6}{'policy':<12}{'N':>3}{'tokens/s':>10}{'p50 ms':>8}{'p99 ms':>8}{'floor ms':>10}"
        f"{'x floor':>9}{'warm TTFT s':>13}{'KV pages MB':>13}{'prefill MB':>12}{'decode MB':>11}"
    )
    figures: Figures = {}
    for load in loads:
        step, tail = load.gap_s(50), load.gap_s(99)
        floor = load.floor_s(
            sizes.weight_bytes,
            sizes.kv_bytes_per_token,
            kept[load.policy],
            machine.read_bytes_per_s,
        )
        rate, ttft = statistics.median(load.tokens_per_s), statistics.median(load.ttfts_s)
        pages_mb = max(each.pages for each in load.memory) * page_bytes / 1e6
        prefill_mb, decode_mb = load.most_mb("prefill"), load.most_mb("decode")
        print(
            f"{load.size:<6}{load.policy:<12}{load.concurrency:>3}{rate:>10.1f}{step * 1e3:>8.1f}{tail * 1e3:>8.1f}"
            f"{floor * 1e3:>10.1f}{step / floor:>9.1f}{ttft:>13.2f}"
            f"{pages_mb:>13.0f}{_megabytes(prefill_mb):>12}{_megabytes(decode_mb):>11}"
        )
        key = f"{load.size}_{load.policy.replace(' ', '')}_n{load.concurrency}"
        figures[f"tokens_per_s_{key}"] = round(rate, 2)
        figures[f"itl_p50_ms_{key}"] = round(step * 1e3, 2)
        figures[f"itl_p99_ms_{key}"] = round(tail * 1e3, 2)
        figures[f"floor_ms_{key}"] = round(floor * 1e3, 2)
        figures[f"warm_ttft_s_{key}"] = round(ttft, 3)
        figures[f"kv_pages_mb_{key}"] = round(pages_mb, 1)
    return figures


def targets_of(figures: Figures, sizes: Sequence[int], threads: int) -> dict[str, Bound]:
    """The targets that this run can judge.

    The ratio of processor time is judged too: where others use the cores, a lucky wall time proves nothing.
    """
    ratios = [f"ttft_{kind}ratio_{size}_full" for size in sizes for kind in ("", "cpu_")]
    targets: dict[str, Bound] = {name: {"at_most": TTFT_TARGET} for name in ratios if name in figures}
    targets[f"attention_speedup_t{threads}"] = {"at_least": ATTENTION_TARGET}
    return targets


def measure(bench: Bench, options: argparse.Namespace, threads: int) -> Figures:
    """All phases; prints each table as soon as it is known."""
    sizes, dtype = bench.bare.sizes, getattr(torch, bench.bare.sizes.dtype)
    cores = resolve(AppArgs.model_validate({})).cores
    counts = sorted({1, threads, cores})
    machines = measure_machines(counts, sizes.head_dim, 3 if options.quick else 7)
    figures = print_machine(list(machines.values()))
    bench.warm_up()
    tiny = bench.cold(16, 3)
    fixed_s = min(tiny.ttft_s["full"]) - min(each.wall_s for each in tiny.bare)
    figures["fixed_overhead_ms"] = round(fixed_s * 1e3, 1)
    print(
        f"\na prompt of 16 tokens: {figures['fixed_overhead_ms']:.0f} ms over its bare forward, best against best"
    )
    page_bytes = min_page_bytes(sizes.head_dim, dtype)
    for size in options.sizes:
        cold_rounds, load_rounds = _rounds(size, options.quick)
        cold = bench.cold(size, cold_rounds)
        figures |= print_cold(cold, bool(bench.prefill.pids))
        loads = bench.loads(size, options.concurrency, load_rounds, 2.0 if options.quick else 3.0)
        figures |= print_loads(loads, cold.kept_tokens, sizes, machines[threads], page_bytes)
    pools = {pool: Processes.of_pool(bench.service, pool) for pool in POOLS}
    peaks = {pool: found.peak_rss_mb() if found.pids else None for pool, found in pools.items()}
    print(
        "\npeak resident MB (shared memory included): "
        + ", ".join(f"{pool} {_megabytes(peak)}" for pool, peak in peaks.items())
    )
    known = {pool: peak for pool, peak in peaks.items() if peak is not None}
    return figures | {f"peak_rss_mb_{pool.lower()}": round(peak) for pool, peak in known.items()}


def _megabytes(size: float | None) -> str:
    return "n/a" if size is None else f"{size:.0f}"


def warn_of_another_model(service: Service, model: str) -> None:
    expected = AppArgs.model_validate({"model": model}).name
    if service.model != expected:
        print(
            f"warning: the service at {service.url} serves {service.model!r}, the baseline is {expected!r} (--model);"
            " ratios compare two models unless both are the same under two names"
        )


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Prints the tables, then one JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="of a running service, e.g. http://127.0.0.1:8000")
    parser.add_argument(
        "--model", default="demo", help="what the service was started with (for the baseline)"
    )
    parser.add_argument("--threads", type=int, help="threads of a replica; default: as `kvtide config` says")
    parser.add_argument("--quick", action="store_true", help="1K and 4K, 1 and 4 at once, few rounds")
    parser.add_argument("--sizes", type=_numbers, help="prompt tokens, comma-separated")
    parser.add_argument("--concurrency", type=_numbers, help="requests at once, comma-separated")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="after half of them, measurements are no longer repeated"
    )
    options = parser.parse_args()
    options.sizes = options.sizes or ([1024, 4096] if options.quick else [1024, 4096, 7000])
    options.concurrency = options.concurrency or ([1, 4] if options.quick else [1, 4, 8])
    threads = options.threads or resolve(AppArgs.model_validate({})).threads_per_replica
    url = (options.url or "http://127.0.0.1:8000").removesuffix("/v1")
    began = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(ensure_weights(options.model))
    with find_or_start(url, options.model, may_start=options.url is None) as service:
        warn_of_another_model(service, options.model)
        niceness = Processes.of_pool(service, "Prefill").niceness()
        with BareForward(options.model, threads, niceness) as bare:
            print(
                f"{threads} thread(s) per replica and for the baseline, niceness {niceness}, {bare.sizes.dtype}"
            )
            more_until = began + options.minutes * 60 / 2
            bench = Bench(service, bare, tokenizer, Corpus(tokenizer), more_until)
            figures = measure(bench, options, threads)
    figures["run_s"] = round(time.monotonic() - began)
    print_result(
        "serving",
        f"one machine, {threads} thread(s) per replica, {'quick' if options.quick else 'whole'} run",
        "bare transformers forward (sdpa, logits_to_keep=1); torch enable_gqa attention; bytes / bandwidth",
        figures,
        targets_of(figures, options.sizes, threads),
    )


if __name__ == "__main__":
    main()
