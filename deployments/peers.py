"""Other nodes' CPU slabs, as this node's agent reaches them: found by their agents' names, read by NIXL."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import RayError

from deployments.directory import NAMESPACE
from kv_tiers.keys import BlockKey
from kv_tiers.slab import Slab
from kv_tiers.store_ports import Peer
from kv_tiers.tier import Fetched
from kv_tiers.transfer.nixl import slab_wires, unavailable
from kv_tiers.transfer.slab_peer import SlabExchange, SlabPeer

_log = logging.getLogger("kvtide.node")

LEND_S = 3.0
"""Longest wait for a loan: the lender may have to load the blocks from its own lower tiers first."""


def find_agent(address: str) -> ActorHandle:
    """The agent of that actor name. ValueError: there is none."""
    return ray.get_actor(address, NAMESPACE)


def open_exchange(name: str, slab: Slab, slot_bytes: int) -> SlabExchange | None:
    """Our side of reads between slabs; None, logged, where NIXL does not exist."""
    reason = unavailable()
    if reason is not None:
        _log.warning("blocks of other nodes are not read: %s", reason)
        return None
    memory = torch.frombuffer(slab.view(0, slab.nbytes), dtype=torch.uint8)
    return SlabExchange(name, slab, slot_bytes, slab_wires(name, memory))


class AgentLender:
    """`Lender` over another agent's actor. Looked up anew after a failure."""

    def __init__(self, address: str, borrower: str, find: Callable[[str], ActorHandle]) -> None:
        self._address = address
        self._borrower = borrower
        self._find = find
        self._actor: ActorHandle | None = None

    async def lend(self, keys: bytes) -> bytes | None:
        try:
            async with asyncio.timeout(LEND_S):
                actor: ActorHandle = self._actor or await asyncio.to_thread(self._find, self._address)
                self._actor = actor
                loan: bytes | None = await actor.lend.remote(keys, self._borrower)
                return loan
        except (RayError, TimeoutError, ValueError) as error:
            _log.warning("agent %s does not lend: %s", self._address, type(error).__name__)
            self._actor = None
            return None

    def give_back(self, lease: int) -> None:
        if self._actor is not None:
            self._actor.give_back.remote(lease)


class Peers:
    """`Peer` by node. The exchange is opened when it is first needed: most clusters of one node never need it."""

    def __init__(
        self,
        node: str,
        open_: Callable[[], SlabExchange | None],
        find: Callable[[str], ActorHandle] = find_agent,
    ) -> None:
        self._node = node
        self._open = open_
        self._find = find
        self._exchange: SlabExchange | None = None
        self._opened = False
        self._opening = asyncio.Lock()
        self._addresses: Mapping[str, str] = {}
        self._lenders: dict[str, AgentLender] = {}

    def heard_of(self, addresses: Mapping[str, str]) -> None:
        """Node → its agent's actor name, as the directory knows them now."""
        self._addresses = addresses
        self._lenders = {
            address: lender for address, lender in self._lenders.items() if address in addresses.values()
        }

    def of(self, node: str) -> Peer | None:
        """That node's slab; None for one that cannot be read from here."""
        address = self._addresses.get(node)
        if address is None or node == self._node or (self._opened and self._exchange is None):
            return None
        lender = self._lenders.setdefault(address, AgentLender(address, self._node, self._find))
        return _Remote(self, lender)

    async def exchange(self) -> SlabExchange | None:
        """Ours, opened now if it was not; None where there can be none."""
        async with self._opening:
            if not self._opened:
                self._exchange = await asyncio.to_thread(self._open)
                self._opened = True
        return self._exchange

    def lent(self, count: int) -> None:
        """So many loans are open."""
        if self._exchange is not None:
            self._exchange.lent(count)

    def close(self) -> None:
        """Leave the transport."""
        exchange, self._exchange, self._opened = self._exchange, None, True
        if exchange is not None:
            exchange.close()


class _Remote:
    """`Peer` that opens the exchange when it is first asked."""

    def __init__(self, peers: Peers, lender: AgentLender) -> None:
        self._peers = peers
        self._lender = lender

    async def get(self, keys: Sequence[BlockKey], offsets: Sequence[int]) -> list[Fetched]:
        exchange = await self._peers.exchange()
        if exchange is None:
            return [Fetched.FAILED] * len(keys)
        return await SlabPeer(exchange, self._lender).get(keys, offsets)
