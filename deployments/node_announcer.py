"""What a node agent tells the directory: which blocks its tiers have, message by message, and that it is alive."""

from collections.abc import Callable
from typing import Protocol

from kv_tiers.directory import Outcome, Place
from kv_tiers.keys import BlockKey
from kv_tiers.shards import parts
from kv_tiers.store_ports import Journal, joined


class Listener(Protocol):
    """The part of `DirectoryClient` that agents speak to."""

    async def register(self, place: Place, incarnation: int, address: str = "") -> Outcome: ...
    async def heartbeat(self, node: str, incarnation: int) -> Outcome: ...
    async def announce(
        self, place: Place, incarnation: int, seq: int, added: bytes, removed: bytes
    ) -> Outcome: ...
    async def resync(
        self, place: Place, incarnation: int, seq: int, keys: bytes, first: bool, last: bool
    ) -> Outcome: ...
    async def renew_shared(self, place: Place, incarnation: int) -> Outcome: ...
    async def announce_shared(
        self, place: Place, incarnation: int, added: bytes, removed: bytes, whole: bool = True
    ) -> Outcome: ...


class Announcer:
    """One agent's side. `speak` is one round: everything that is new, with a full list where the directory owes it.

    A message whose answer is lost may or may not have been taken: the directory's UNKNOWN, also said for it when it
    cannot be reached, leads to a new registration and a full list.
    """

    def __init__(
        self,
        directory: Listener,
        node: str,
        address: str,
        journals: Callable[[], list[tuple[Place, Journal]]],
        shared_incarnation: Callable[[str], int | None],
    ) -> None:
        """`address`: our actor name. `shared_incarnation(tier)`: of a shared tier's store; None: it does not answer."""
        self._directory = directory
        self._node = node
        self._address = address
        self._journals = journals
        self._shared_incarnation = shared_incarnation
        self._known: dict[Place, int] = {}  # where we are registered, as which term

    async def speak(self, term: int, *, beat: bool = True) -> Outcome:
        """OK, or UNKNOWN: some of it has to be said again; STALE: a newer agent has our node's name.

        `beat`: also say that we live, and that what all share does.
        """
        worst = Outcome.OK
        if beat and self._known:
            worst = await self._directory.heartbeat(self._node, term)
        if worst is Outcome.STALE:
            return worst
        if worst is Outcome.UNKNOWN:
            self._known.clear()
        owed = worst is Outcome.GAP
        for place, journal in self._journals():
            if place.node:
                outcome = await self._tell(place, journal, term, owed)
            else:
                outcome = await self._tell_shared(place, journal, beat)
            if outcome is Outcome.STALE and place.node:
                return outcome
            if outcome is not Outcome.OK:
                self._known.pop(place, None)
                worst = Outcome.UNKNOWN
        return worst if worst is Outcome.UNKNOWN else Outcome.OK

    async def _tell(self, place: Place, journal: Journal, term: int, owed: bool) -> Outcome:
        """Of our own tiers."""
        if self._known.get(place) != term:
            outcome = await self._directory.register(place, term, self._address)
            if outcome in (Outcome.STALE, Outcome.UNKNOWN):
                return outcome
            self._known[place] = term
            owed = True
        if not owed:
            changes = journal.drain_changes()
            if not changes.added and not changes.removed:
                return Outcome.OK
            outcome = await self._directory.announce(
                place, term, changes.seq, joined(changes.added), joined(changes.removed)
            )
            if outcome is not Outcome.GAP:
                return outcome
        return await self._resync(place, journal, term)

    async def _resync(self, place: Place, journal: Journal, term: int) -> Outcome:
        manifest = journal.manifest()
        for part in parts(joined(manifest.keys)):
            outcome = await self._directory.resync(
                place, term, manifest.seq, part.keys, part.first, part.last
            )
            if outcome is not Outcome.OK:
                return outcome
        return Outcome.OK

    async def _tell_shared(self, place: Place, journal: Journal, beat: bool) -> Outcome:
        """Of a tier that all nodes share; whoever is told UNKNOWN first lists it for all."""
        incarnation = self._shared_incarnation(place.tier)
        if incarnation is None:
            return Outcome.OK  # its entries' lease ends by itself
        listed = self._known.get(place) == incarnation
        outcome = Outcome.OK
        if beat or not listed:
            outcome = await self._directory.renew_shared(place, incarnation)
        if outcome is Outcome.OK and listed:
            changes = journal.drain_changes()
            return await self._announce_shared(place, incarnation, changes.added, changes.removed)
        if outcome is Outcome.STALE:
            return Outcome.OK  # we have not noticed yet that it was started anew
        for part in parts(joined(journal.manifest().keys)):
            outcome = await self._directory.announce_shared(place, incarnation, part.keys, b"", part.last)
            if outcome is not Outcome.OK:
                return outcome
        self._known[place] = incarnation
        return Outcome.OK

    async def _announce_shared(
        self, place: Place, incarnation: int, added: tuple[BlockKey, ...], removed: tuple[BlockKey, ...]
    ) -> Outcome:
        if not added and not removed:
            return Outcome.OK
        return await self._directory.announce_shared(
            place, incarnation, joined(added), joined(removed), False
        )
