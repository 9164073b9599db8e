"""What comes back from the tiers, how fast, against computing it anew and against each medium's own ceiling.

    python -m benchmarks.bench_tiers [--quick] [--size 6144] [--rounds 2]
        [--only recall|second_node|throughput|spill]

Ends with one JSON line (result.py). About 21 minutes on 2 idle cores, the spill ten of them; less with --quick.

Recall: documents are asked cold, the first in turn with a bare transformers forward, then again, each from one tier
only: after every replica was killed and replaced (CPU, NVMe, Redis), after every process was stopped and started again
(NVMe, Redis), and by another node (its CPU tier through NIXL). Throughput, verification on: CPU slab against memcpy,
NVMe against fio, Redis against a raw socket reader, another node's slab against raw NIXL. Spill: time per token of
a running stream while blocks are written down, against another service that writes none down, in turns.

Regime: one machine; the demo model; greedy; `admission=always`; files in --folder (default: a temporary folder), whose
disk is what "NVMe" means here.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import AutoTokenizer

from benchmarks.bare_forward import BareForward
from benchmarks.own_service import OwnService
from benchmarks.redis_process import RedisProcess
from benchmarks.result import Bound, print_result
from benchmarks.tiers_nvme import LAYOUTS, measure_nvme
from benchmarks.tiers_recall import Recall, RecallBench, niceness_of
from benchmarks.tiers_redis import measure_redis
from benchmarks.tiers_remote import measure_remote
from benchmarks.tiers_second_node import measure_second_node
from benchmarks.tiers_slab import measure_slab
from benchmarks.tiers_spill import measure_spill
from engine.weights import ensure_weights

Figures = dict[str, float]

RECALL_TARGETS = {"cpu": 1 / 10, "nvme": 1 / 6, "redis": 1 / 5}
COLD_TARGET = 1.1
THROUGHPUT_TARGETS = {"cpu": 0.7, "nvme": 0.8, "redis": 0.6, "remote": 0.8}


@contextmanager
def tiered_service(folder: Path, tier_gib: float, admission: str = "always") -> Iterator[OwnService]:
    """A service with all tiers, and the Redis it uses."""
    with RedisProcess(folder, persistent=True) as redis:
        options = {
            "threads": 1, "admission": admission, "cpu_tier_gib": tier_gib, "nvme_tier_gib": tier_gib,
            "nvme_tier_folder": folder, "redis_url": redis.url, "redis_tier_gib": tier_gib,
        }  # fmt: skip
        with OwnService(folder, options) as service:
            yield service


# Source in the report: the only tier that has its documents.
SOURCES = {
    "cpu": "cpu",
    "nvme": "nvme",
    "redis": "redis",
    "nvme after a restart": "nvme",
    "redis after a restart": "redis",
}


def measure_recall(folder: Path, size: int, rounds: int) -> Figures:
    """Every source in turn; prints the table."""
    tokenizer = AutoTokenizer.from_pretrained(ensure_weights("demo"))
    documents = rounds * len(SOURCES)
    with tiered_service(folder, 0.5 + documents * size * 24_000 / (1 << 30)) as service:
        bench = RecallBench(service, tokenizer, size, rounds, list(SOURCES))
        with BareForward("demo", 1, niceness_of(service)) as bare:
            ratios = bench.cold(bare)
        bench.wait_written()
        for source, tier in SOURCES.items():
            bench.keep_only(source, tier)
        service.drop_pools()
        for source in ("cpu", "nvme", "redis"):
            bench.again(source)
        service.stop()
        service.start()
        for source in ("nvme after a restart", "redis after a restart"):
            bench.again(source)
    figures = {"cold_of_bare": round(statistics.median(ratios), 3)}
    print(f"\ncold / bare transformers forward, {size} tokens: {figures['cold_of_bare']:.2f}")
    return figures | print_recalls(list(bench.recalls.values()), size)


def print_recalls(recalls: list[Recall], size: int) -> Figures:
    print(f"\n{'from':<24}{'TTFT s':>8}{'of cold':>9}{'cached':>8}{'same tokens':>13}   {size} tokens")
    figures: Figures = {}
    for each in recalls:
        ttft = statistics.median(each.ttft_s)
        print(
            f"{each.source:<24}{ttft:>8.2f}{each.ratio:>9.3f}{min(each.cached):>8}{sum(each.same):>8}/{len(each.same)}"
        )
        key = each.source.replace(" after a restart", "_restarted").replace(" ", "_")
        figures[f"ttft_s_{key}"] = round(ttft, 3)
        figures[f"ttft_of_cold_{key}"] = round(each.ratio, 4)
        figures[f"same_{key}"] = sum(each.same) / len(each.same)
        figures[f"cached_share_{key}"] = round(min(each.cached) / size, 3)
    return figures


def measure_another_node(size: int, rounds: int) -> Figures:
    """A document from the slab of the node that has it; prints a line."""
    figures = measure_second_node(size, rounds)
    print(
        f"\nfrom another node's slab: {figures['ttft_s_another_node']:.2f} s, cold"
        f" {figures['ttft_s_cold_first_node']:.2f} s, of cold {figures['ttft_of_cold_another_node']:.3f}"
    )
    return figures


def measure_throughput(folder: Path, quick: bool) -> Figures:
    """Every medium against its ceiling, blocks of the demo model; prints the table."""
    runs = 3 if quick else 7
    slab = measure_slab(runs=runs)
    nvme = measure_nvme(folder, layouts=LAYOUTS[:1], runs=runs)
    redis = measure_redis(rounds=runs)
    remote = measure_remote(rounds=5 * runs)  # of 0.1 s each
    slot = next(name.partition("_")[0] for name in nvme)
    rows = {
        "cpu": (slab["get"], slab["memcpy_get"], slab["get_ratio"], "memcpy"),
        "nvme": (nvme[f"{slot}_get"], nvme[f"{slot}_fio_read"], nvme[f"{slot}_get_ratio"], "fio"),
        "redis": (
            redis["tier_get_gb_s_smollm2"],
            redis["raw_get_gb_s_smollm2"],
            redis["share_of_raw_smollm2"],
            "raw socket",
        ),
        "remote": (
            remote["get_gb_s_smollm2"],
            remote["raw_gb_s_smollm2"],
            remote["ratio_smollm2"],
            "raw NIXL",
        ),
    }
    print(f"\n{'tier':<10}{'GB/s':>8}{'ceiling':>9}{'share':>8}   of")
    figures: Figures = {}
    for tier, (reached, ceiling, ratio, of) in rows.items():
        print(f"{tier:<10}{reached:>8.2f}{ceiling:>9.2f}{ratio:>8.2f}   {of}")
        figures |= {f"{tier}_gb_s": reached, f"{tier}_ceiling_gb_s": ceiling, f"{tier}_of_ceiling": ratio}
    return {name: round(value, 3) for name, value in figures.items()}


def measure_write_down(folder: Path, size: int, quick: bool) -> Figures:
    """What the write-down costs a stream; prints a line."""
    tokenizer = AutoTokenizer.from_pretrained(ensure_weights("demo"))
    nothing = folder / "control"
    nothing.mkdir()
    with tiered_service(folder, 2.0) as service, tiered_service(nothing, 2.0, "never") as control:
        figures = measure_spill(service, control, tokenizer, size, 2 if quick else 6)
    slower = figures["step_slowdown_while_spilling"]
    print(f"\ntime per token while {size} tokens are written down / while they are not: {slower:.3f}")
    return figures


def targets_of(figures: Figures) -> dict[str, Bound]:
    """The targets of the issue that this run can judge."""
    targets: dict[str, Bound] = {}
    if "cold_of_bare" in figures:
        targets["cold_of_bare"] = {"at_most": COLD_TARGET}
    for name in figures:
        kind, _, source = name.partition("_of_cold_")
        if kind == "ttft" and source:
            tier = "cpu" if source in ("cpu", "another_node") else source.partition("_")[0]
            targets[name] = {"at_most": round(RECALL_TARGETS[tier], 4)}
        if name.startswith("same_"):
            targets[name] = {"at_least": 1.0}
    for tier, bound in THROUGHPUT_TARGETS.items():
        if f"{tier}_of_ceiling" in figures:
            targets[f"{tier}_of_ceiling"] = {"at_least": bound}
    if "step_slowdown_while_spilling" in figures:
        targets["step_slowdown_while_spilling"] = {"at_most": 1.05}
        targets["spilled_share"] = {"at_least": 0.25}  # or there was nothing to slow it down
    return targets


def main() -> None:
    """Prints the tables, then one JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one document, short measurements")
    parser.add_argument("--size", type=int, default=6144, help="tokens of a document")
    parser.add_argument("--rounds", type=int, help="documents per source; default 2, 1 with --quick")
    parser.add_argument("--folder", type=Path, help="where the NVMe tier's files go")
    parser.add_argument("--only", choices=["recall", "second_node", "throughput", "spill"])
    options = parser.parse_args()
    began = time.monotonic()
    figures: Figures = {}
    with tempfile.TemporaryDirectory(prefix="kvtide-bench-", dir=options.folder) as folder:
        rounds = options.rounds or (1 if options.quick else 2)
        if options.only in (None, "recall"):
            figures |= measure_recall(Path(folder), options.size, rounds)
        if options.only in (None, "second_node"):
            figures |= measure_another_node(options.size, rounds)
        if options.only in (None, "throughput"):
            figures |= measure_throughput(Path(folder), options.quick)
        if options.only in (None, "spill"):
            figures |= measure_write_down(Path(folder), options.size, options.quick)
    figures["run_s"] = round(time.monotonic() - began)
    print_result(
        "tiers",
        f"one machine, one thread per replica, {options.size} tokens, {'quick' if options.quick else 'whole'} run",
        "cold prompt; bare transformers forward; memcpy, fio, raw socket, raw NIXL",
        figures,
        targets_of(figures),
    )


if __name__ == "__main__":
    main()
