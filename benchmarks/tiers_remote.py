"""Blocks of another process's slab against raw NIXL: GB/s of verified reads, in the same run.

    python -m benchmarks.tiers_remote [--blocks 512] [--rounds 9]

Regime: two processes of one machine, slabs as node agents make them, whole slots of one size in random order on both
sides, batches of `BATCH` blocks, `AHEAD` of them under way, warm connection and touched memory. `remote` is what a node
agent does (`SlabPeer`: ask for a loan, read, verify every byte, give the loan back); `raw` posts NIXL reads of the same
descriptors into the same memory, looks at nothing and asks nobody, and has its descriptors made beforehand, with one
NIXL agent; `floor` does the same with all the agents that `remote` has, each on a thread: what physics allow here. All
take turns; medians over the rounds; ratios are medians of ratios of neighbours, since other work slows all.
`cpu_ms_gb`: processor time of the reading process, which is what counts where no processor is idle.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.result import Bound, print_result
from deployments.slabs import slab_folder
from kv_tiers.block import BlockLayout, write_block
from kv_tiers.books import SlotBooks
from kv_tiers.keys import BlockKey, Fingerprint, block_keys
from kv_tiers.slab import Slab
from kv_tiers.store_fetch import AHEAD
from kv_tiers.store_lend import Loans
from kv_tiers.store_ports import parted
from kv_tiers.tier import Fetched
from kv_tiers.transfer.nixl import NixlWire, slab_wires
from kv_tiers.transfer.slab_loan import SlabLoan
from kv_tiers.transfer.slab_peer import SlabExchange, SlabPeer
from kv_tiers.transfer.ticket import PeerId
from kv_tiers.transfer.wire import Read, SpanTable, Step

TARGET_RAW_SHARE = 0.8
BATCH = 128
_PAGE = 4096
_PAUSE_S = 20e-6
_FINGERPRINT = Fingerprint(bytes(32))
_LAYOUTS = {
    "smollm2": BlockLayout(layers=((3, 64),) * 30, dtype=torch.bfloat16),  # 372,736 bytes
    "2mb": BlockLayout(layers=((8, 128),) * 31, dtype=torch.bfloat16),
}


class Spent(NamedTuple):
    """Seconds: of the clock, and of the reading process's threads together."""

    wall: float
    cpu: float


def measure_remote(*, nbytes: int = 192 << 20, rounds: int = 9) -> dict[str, float]:
    """Medians by block size: `{get,raw,floor}_gb_s_{layout}`, `…_cpu_ms_gb_{layout}` and `ratio_{layout}`.

    Takes 2 `nbytes` of shared memory, and 0.1 s a round.
    """
    figures: dict[str, float] = {}
    for name, layout in _LAYOUTS.items():
        slot_bytes = _slot_bytes(layout)
        gb = nbytes // slot_bytes * slot_bytes / 1e9
        found = _measure(name, slot_bytes, nbytes // slot_bytes, rounds)
        pairs = zip(found["get"], found["raw"], strict=True)
        for what, spent in found.items():
            wall, cpu = (statistics.median(column) for column in zip(*spent, strict=True))
            figures[f"{what}_gb_s_{name}"] = round(gb / wall, 3)
            figures[f"{what}_cpu_ms_gb_{name}"] = round(1e3 * cpu / gb, 1)
        figures[f"ratio_{name}"] = round(statistics.median(raw.wall / get.wall for get, raw in pairs), 3)
    return figures


class LenderProcess:
    """Another process that lends, and its agent's calls (`Lender`), over pipes."""

    def __init__(self, name: str, path: Path, blocks: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.tiers_remote", "--lend", name, str(path), str(blocks)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._asking = asyncio.Lock()

    async def lend(self, keys: bytes) -> bytes | None:
        async with self._asking:
            self._say("lend", keys.hex())
            return bytes.fromhex(await asyncio.to_thread(self._hear))

    def give_back(self, lease: int) -> None:
        self._say("back", str(lease))

    def _say(self, what: str, value: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what} {value}\n")
        self._process.stdin.flush()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        if not answer:
            raise SystemExit("the lending process ended")
        return answer

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def _slot_bytes(layout: BlockLayout) -> int:
    return -(-layout.nbytes // _PAGE) * _PAGE


def _keys(layout: BlockLayout, blocks: int) -> list[BlockKey]:
    return block_keys(_FINGERPRINT, np.zeros(blocks * layout.block_tokens, int), layout.block_tokens)


def lend(name: str, path: Path, blocks: int) -> None:
    """The other process: a slab full of blocks, in random slots, that answers commands until stdin closes."""
    layout = _LAYOUTS[name]
    slot_bytes = _slot_bytes(layout)
    torch.manual_seed(0)
    rows = [torch.randn(heads, layout.block_tokens, dim).to(layout.dtype) for heads, dim in layout.layers]
    keys = _keys(layout, blocks)
    order = np.random.default_rng(1).permutation(blocks)
    with Slab.create(path, blocks * slot_bytes) as slab:
        books = SlotBooks(blocks, slot_bytes)
        books.adopt([(keys[index], slot) for slot, index in enumerate(order.tolist())])
        for key in keys:
            view = slab.view(books.offset_of(key), layout.nbytes)
            write_block(view, layout, _FINGERPRINT, key, rows, rows)
        wires = slab_wires("lender", torch.frombuffer(slab.view(0, slab.nbytes), dtype=torch.uint8))
        exchange = SlabExchange("lender", slab, slot_bytes, wires)
        loans = Loans(books, time.monotonic)
        for line in sys.stdin:
            what, value = line.rstrip("\n").split(" ")
            if what == "lend":
                loan = loans.take(books.prepare_read(parted(bytes.fromhex(value)), "borrower"), more=False)
                print(exchange.loan(loan).hex(), flush=True)
            else:
                loans.give_back(int(value))
            exchange.lent(len(loans))
        exchange.close()
        slab.unlink()


def _measure(name: str, slot_bytes: int, blocks: int, rounds: int) -> dict[str, list[Spent]]:
    nbytes = blocks * slot_bytes
    with tempfile.TemporaryDirectory(prefix="kvtide-bench-", dir=slab_folder(None, 2 * nbytes)) as folder:
        lender = LenderProcess(name, Path(folder) / "lender.kvslab", blocks)
        with Slab.create(Path(folder) / "borrower.kvslab", nbytes) as slab:
            wires = slab_wires("borrower", torch.frombuffer(slab.view(0, slab.nbytes), dtype=torch.uint8))
            exchange = SlabExchange("borrower", slab, slot_bytes, wires)
            try:
                return asyncio.run(
                    _alternate(
                        SlabPeer(exchange, lender),
                        wires,
                        lender,
                        _keys(_LAYOUTS[name], blocks),
                        slot_bytes,
                        rounds,
                    )
                )
            finally:
                exchange.close()
                lender.close()


async def _alternate(
    peer: SlabPeer,
    wires: Sequence[NixlWire],
    lender: LenderProcess,
    keys: Sequence[BlockKey],
    slot_bytes: int,
    rounds: int,
) -> dict[str, list[Spent]]:
    offsets = [slot * slot_bytes for slot in np.random.default_rng(2).permutation(len(keys)).tolist()]
    message = await lender.lend(b"".join(key.digest for key in keys))
    assert message is not None
    loan = SlabLoan.from_bytes(message)  # kept: raw reads use its addresses, and the lender polls for them
    found: dict[str, list[Spent]] = {"get": [], "raw": [], "floor": []}
    batches = [slice(at, at + BATCH) for at in range(0, len(keys), BATCH)]
    spans = SpanTable.columns(loan.addresses, offsets, slot_bytes)
    tables = [spans[batch] for batch in batches]
    for round_ in range(rounds + 1):
        for what, values in found.items():
            wall, cpu = time.perf_counter(), time.process_time()
            if what == "raw":
                await asyncio.to_thread(_raw, wires[0], loan.peer, tables)
            elif what == "floor":
                shares = [tables[index :: len(wires)] for index in range(len(wires))]
                works = zip(wires, shares, strict=True)
                await asyncio.gather(
                    *(asyncio.to_thread(_raw, wire, loan.peer, share) for wire, share in works)
                )
            else:
                await _remote(peer, keys, offsets, batches)
            if round_:  # the first pays for the connection and for untouched memory
                values.append(Spent(time.perf_counter() - wall, time.process_time() - cpu))
    lender.give_back(loan.lease)
    return found


async def _remote(
    peer: SlabPeer, keys: Sequence[BlockKey], offsets: Sequence[int], batches: Sequence[slice]
) -> None:
    """Every batch, as a store reads them: some are under way at once."""
    waiting = iter(batches)

    async def work() -> None:
        for batch in waiting:
            assert set(await peer.get(keys[batch], offsets[batch])) == {Fetched.HIT}

    await asyncio.gather(*(work() for _ in range(AHEAD)))


def _raw(wire: NixlWire, peer: PeerId, batches: Sequence[SpanTable]) -> None:
    """Every batch; the next is posted before the last is over."""
    reads = deque[Read]()
    for batch in [*batches, None]:
        if batch is not None:
            reads.append(wire.read(peer, batch))
        while reads and (batch is None or len(reads) >= AHEAD):
            while (state := reads[0].state()) is Step.PENDING:
                time.sleep(_PAUSE_S)
            assert state is Step.DONE
            reads.popleft().close()


def main() -> None:
    """Print the table, then one JSON line."""
    parser = argparse.ArgumentParser(description="Blocks from another process's slab against raw NIXL")
    parser.add_argument("--mib", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--lend", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.lend:
        lend(args.lend[0], Path(args.lend[1]), int(args.lend[2]))
        return
    figures = measure_remote(nbytes=args.mib << 20, rounds=args.rounds)
    print(
        f"{'block':>8} {'remote GB/s':>12} {'raw GB/s':>9} {'floor GB/s':>11} {'ratio':>6} "
        f"{'remote ms/GB':>13} {'raw ms/GB':>10}"
    )
    for name in _LAYOUTS:
        wanted = ("get_gb_s", "raw_gb_s", "floor_gb_s", "ratio", "get_cpu_ms_gb", "raw_cpu_ms_gb")
        get, raw, floor, ratio, get_cpu, raw_cpu = (figures[f"{each}_{name}"] for each in wanted)
        print(
            f"{name:>8} {get:>12.2f} {raw:>9.2f} {floor:>11.2f} {ratio:>6.2f} {get_cpu:>13.0f} {raw_cpu:>10.0f}"
        )
    targets: dict[str, Bound] = {f"ratio_{name}": {"at_least": TARGET_RAW_SHARE} for name in _LAYOUTS}
    print_result(
        "tiers_remote",
        f"two processes of one machine, batches of {BATCH}, {args.mib} MiB, median of {args.rounds} alternating rounds",
        "raw NIXL: one read of the same descriptors into the same memory, unverified",
        figures,
        targets,
    )


if __name__ == "__main__":
    main()
