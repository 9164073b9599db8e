"""How fast a pull is: NIXL between two processes of one host, against a plain memcpy in the same run.

    python -m benchmarks.bench_transfer [--mb 1 12 64 180] [--repeats 7]

A pull is what a decode replica waits for: two seal reads, the payload in pieces of 1 MB, xxh3_64 of every byte. The
baseline is one thread copying as many bytes between two touched buffers. Both are single-threaded and warm; `first` is
the first pull of that size (untouched landing memory, and for the first row the connection).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

import torch

from benchmarks.result import Bound, print_result
from kv_tiers.transfer import Ticket, payload_checksum
from kv_tiers.transfer.nixl import NixlEndpoint

FINGERPRINT = b"bench"
# What a warm pull of 12 MB or more must reach of a memcpy's speed, although it also hashes every byte.
TARGET_MEMCPY_SHARE = 0.4
TARGET_FROM_MB = 12


def serve(sizes: list[int]) -> None:
    """The source process: publish one ticket for each size, poll until stdin closes."""
    endpoint = NixlEndpoint("bench-source", sum(sizes) + (len(sizes) + 1) * 8192)
    for nbytes in sizes:
        lease = endpoint.reserve(nbytes)
        assert lease is not None
        lease.buffer.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8))
        ticket = endpoint.publish(
            lease,
            request_id=str(nbytes),
            attempt=0,
            fingerprint=FINGERPRINT,
            checksum=payload_checksum(lease.buffer),
            ttl_s=600.0,
        )
        print(ticket.to_bytes().hex(), flush=True)
    while endpoint.open_tickets:
        endpoint.poll()
        time.sleep(endpoint.wait_hint())
    endpoint.close()


def memcpy_seconds(nbytes: int, repeats: int) -> float:
    """Median seconds of one thread copying `nbytes`."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def pull_seconds(endpoint: NixlEndpoint, ticket: Ticket, repeats: int) -> tuple[float, float]:
    """(first, median of the others) seconds of a verified pull."""
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        pull = endpoint.pull(ticket, fingerprint=FINGERPRINT, timeout_s=60.0)
        times.append(time.perf_counter() - begin)
        if pull.lease is None:
            raise SystemExit(f"pull failed: {pull.outcome} {pull.detail}")
        pull.lease.release()
    return times[0], statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mb", type=int, nargs="+", default=[1, 12, 64, 180], help="payload sizes, MB (10^6 bytes)"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [mb * 10**6 for mb in args.mb]
    if args.serve:
        serve(sizes)
        return
    command = [sys.executable, "-m", "benchmarks.bench_transfer", "--serve", "--mb", *map(str, args.mb)]
    source = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert source.stdout is not None
    tickets = [Ticket.from_bytes(bytes.fromhex(source.stdout.readline())) for _ in sizes]
    endpoint = NixlEndpoint("bench-destination", max(sizes) + 16384)
    figures: dict[str, float] = {}
    targets: dict[str, Bound] = {}
    print(f"{'MB':>5} {'first ms':>9} {'pull ms':>9} {'pull GB/s':>10} {'memcpy GB/s':>12} {'share':>6}")
    for mb, ticket in zip(args.mb, tickets, strict=True):
        copy = memcpy_seconds(ticket.nbytes, args.repeats)
        first, warm = pull_seconds(endpoint, ticket, args.repeats)
        row = {
            "first_ms": round(first * 1e3, 2),
            "pull_ms": round(warm * 1e3, 3),
            "pull_gb_s": round(mb / warm / 1e3, 2),
            "memcpy_gb_s": round(mb / copy / 1e3, 2),
            "share_of_memcpy": round(copy / warm, 2),
        }
        print("{:>5} {:>9} {:>9} {:>10} {:>12} {:>6}".format(mb, *row.values()))
        figures |= {f"{name}_{mb}": value for name, value in row.items()}
        if mb >= TARGET_FROM_MB:
            targets[f"share_of_memcpy_{mb}"] = {"at_least": TARGET_MEMCPY_SHARE}
        endpoint.acknowledge(ticket)
    endpoint.close()
    source.wait(timeout=30)
    print_result(
        "transfer",
        "NIXL/UCX, two processes, one host, warm, verified; figures end in the payload's MB",
        "single-threaded memcpy, same run",
        figures,
        targets,
    )


if __name__ == "__main__":
    main()
