"""What the machine can do: bandwidth of a plain read loop, and one layer's decode attention, native and torch's.

Runs in a process of its own: GOMP_SPINCOUNT=0 must be set before OpenMP is loaded (on a busy machine a spinning thread
keeps the other one from its core for milliseconds), and half a gigabyte of test data goes away with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from benchmarks.bench_kernels import Case, measure
from kernels.layout import min_page_bytes

_ATTENTION = Case(1, 4096)


@dataclass(frozen=True)
class Machine:
    """With `threads`: best read bandwidth seen (bytes/s), and one layer's attention at 4096 tokens (microseconds)."""

    threads: int
    read_bytes_per_s: float
    native_us: float
    sdpa_us: float

    @property
    def speedup(self) -> float:
        """How many times faster native attention is, median against median."""
        return self.sdpa_us / self.native_us


def measure_machines(threads: Sequence[int], head_dim: int, rounds: int) -> dict[int, Machine]:
    """Kernels, torch's attention and a read loop in turn, per number of threads; regime as in bench_kernels."""
    words = [str(head_dim), str(rounds), *map(str, threads)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.machine", *words],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        env={**os.environ, "GOMP_SPINCOUNT": "0"},
    )
    found = [Machine(**json.loads(line)) for line in done.stdout.splitlines()]
    return {each.threads: each for each in found}


def _measure(head_dim: int, rounds: int, threads: int) -> Machine:
    torch.set_num_threads(threads)
    found = measure(_ATTENTION, threads, min_page_bytes(head_dim, torch.bfloat16), rounds, 0.1)
    read = _ATTENTION.nbytes / found["floor"].best * 1e6
    return Machine(threads, read, found["native"].median, found["sdpa enable_gqa"].median)


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    for count in given[2:]:
        print(json.dumps(asdict(_measure(given[0], given[1], count))), flush=True)
