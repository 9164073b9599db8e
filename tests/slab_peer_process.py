"""The lending side of slab reads for tests, as a process of its own over NIXL.

`python slab_peer_process.py NAME SLAB_PATH SLOTS SLOT_BYTES`: one JSON command a line on stdin, one answer a line on
stdout.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import threading

import torch
from slab_blocks import LAYOUT, SLOT_BYTES, block_keys_of, write

from kv_tiers.books import SlotBooks
from kv_tiers.slab import Slab
from kv_tiers.store_lend import Loans
from kv_tiers.store_ports import parted
from kv_tiers.transfer.nixl import slab_wires
from kv_tiers.transfer.slab_peer import SlabExchange


def main(name: str, path: str, slots: int) -> None:
    assert LAYOUT.nbytes <= SLOT_BYTES
    with Slab.create(path, slots * SLOT_BYTES) as slab:
        books = SlotBooks(slots, SLOT_BYTES)
        loop = asyncio.new_event_loop()
        loans = Loans(books, loop.time)
        wires = slab_wires(name, torch.frombuffer(slab.view(0, slab.nbytes), dtype=torch.uint8))
        exchange = SlabExchange(name, slab, SLOT_BYTES, wires)
        for line in sys.stdin:
            command = json.loads(line)
            answer: object = None
            if command["do"] == "write":
                keys = block_keys_of(command["blocks"])
                lease = books.reserve(keys, "test")
                for entry in lease.entries:
                    write(slab.view(entry.offset, SLOT_BYTES), entry.key)
                answer = len(books.complete_write(lease.id, [entry.key for entry in lease.entries]))
            elif command["do"] == "lend":
                keys = parted(base64.b64decode(command["keys"]))
                loan = loans.take(books.prepare_read(keys, "borrower"), more=False)
                exchange.lent(len(loans))
                answer = base64.b64encode(exchange.loan(loan)).decode()
            elif command["do"] == "give back":
                answer = loans.give_back(command["lease"])
                exchange.lent(len(loans))
            elif command["do"] == "leases":
                answer = books.stats().read_leases
            print(json.dumps(answer), flush=True)
        exchange.close()
        assert threading.active_count() >= 1


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
