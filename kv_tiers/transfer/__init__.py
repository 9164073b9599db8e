"""How packed survivors move from a prefill process to a decode process: tickets, staging, transports.

`endpoint.TransferEndpoint` is the contract; `local.LocalEndpoint` works within one process,
`nixl.NixlEndpoint` between processes and machines (imports NIXL on use), `faults.FaultyEndpoint` wraps
either and misbehaves by script.
"""

from __future__ import annotations

from kv_tiers.transfer.endpoint import (
    Counters,
    EndReason,
    Outcome,
    Pull,
    Scope,
    TicketEnd,
    TransferEndpoint,
)
from kv_tiers.transfer.staging import StagingLease, payload_checksum
from kv_tiers.transfer.ticket import Ticket, TicketError

__all__ = [
    "Counters",
    "EndReason",
    "Outcome",
    "Pull",
    "Scope",
    "StagingLease",
    "Ticket",
    "TicketEnd",
    "TicketError",
    "TransferEndpoint",
    "payload_checksum",
]
