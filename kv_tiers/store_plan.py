"""Where the blocks that are not in the slab lie, and which of them are worth loading."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field

from kv_tiers.books import SlotBooks
from kv_tiers.directory import Place
from kv_tiers.keys import BlockKey
from kv_tiers.store_ports import CPU, SHARED, DirectoryPort, Peer, joined
from kv_tiers.tier import BlockMemory, Fetched, Tier


@dataclass(frozen=True)
class Source:
    """Somewhere blocks can be loaded from. `place`: whose entry in the directory a miss disproves."""

    name: str
    """The measured speed's; its part before a colon is the counters'."""
    place: Place
    get: Callable[[Sequence[BlockKey], Sequence[int]], Awaitable[list[Fetched]]] = field(compare=False)
    """Keys and slab offsets → one answer per key."""

    @property
    def kind(self) -> str:
        """Name of the counters."""
        return self.name.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Keys [first, first + count) of a request with the same sources; none: in the slab, or on their way there."""

    first: int
    count: int
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Keys [first, first + count) to be loaded from one source; None: nothing to do but wait for who loads them."""

    first: int
    count: int
    source: Source | None


def worthwhile(
    stretches: Iterable[Stretch],
    slot_bytes: int,
    worth_per_block_s: float,
    estimate: Callable[[str, int], float],
) -> list[Load]:
    """The fastest source of every stretch, as far as loading is faster than computing: cut at the first that is not.

    `estimate(source name, bytes)` → seconds. Neighbours of one source are one load, so its latency counts once.
    """
    loads: list[Load] = []
    for stretch in stretches:
        nbytes = stretch.count * slot_bytes
        times = {source: estimate(source.name, nbytes) for source in stretch.sources}
        source = min(times, key=times.__getitem__, default=None)
        last = loads[-1] if loads else None
        if last is not None and last.source in (source, *stretch.sources):
            loads[-1] = Load(last.first, last.count + stretch.count, last.source)
        else:
            loads.append(Load(stretch.first, stretch.count, source))
    for place, load in enumerate(loads):
        if load.source is None:
            continue
        if estimate(load.source.name, load.count * slot_bytes) >= worth_per_block_s * load.count:
            return loads[:place]
    return loads


class Finder:
    """Finds sources: what is known here first, and the directory for the rest."""

    def __init__(
        self,
        node: str,
        books: SlotBooks,
        memory: BlockMemory,
        lower: Sequence[Tier],
        directory: DirectoryPort,
        peers: Callable[[str], Peer | None],
    ) -> None:
        """`lower` is looked at anew each time."""
        self._node = node
        self._books = books
        self._memory = memory
        self._lower = lower
        self._directory = directory
        self._peers = peers

    async def find(
        self, keys: Sequence[BlockKey], first: int, under_way: Container[BlockKey], *, abroad: bool
    ) -> list[Stretch]:
        """Stretches from `first` to the first key that nobody is known to have; asks the directory once at most."""
        stretches: list[Stretch] = []
        known: _Abroad | None = None
        at = first
        while at < len(keys):
            step = self._here(keys, at, under_way)
            if step is None and abroad:
                known = known or await self._ask(keys, at)
                step = known.at(at)
            if step is None:
                break
            stretches.append(step)
            at += step.count
        return stretches

    def place_of(self, tier: str) -> Place:
        """The directory's name of one of our tiers; what lies in Redis, any node can read."""
        return Place("" if tier in SHARED else self._node, tier)

    def _here(self, keys: Sequence[BlockKey], at: int, under_way: Container[BlockKey]) -> Stretch | None:
        """A stretch that needs no directory."""
        rest = keys[at:] if at else keys
        count = 0
        for key in rest:
            if key not in under_way and not self._books.holds(key):
                break
            count += 1
        if count:
            return Stretch(at, count, ())
        runs = [(tier, run) for tier in self._lower if (run := tier.longest_run(rest))]
        if not runs:
            return None
        return Stretch(at, min(run for _, run in runs), tuple(self._tier(tier) for tier, _ in runs))

    def _tier(self, tier: Tier) -> Source:
        async def get(keys: Sequence[BlockKey], offsets: Sequence[int]) -> list[Fetched]:
            if tier not in self._lower:  # let go of since it was found
                return [Fetched.FAILED] * len(keys)
            size = tier.slot_bytes
            return await tier.get(keys, [self._memory.view(offset, size) for offset in offsets])

        return Source(tier.name, self.place_of(tier.name), get)

    async def _ask(self, keys: Sequence[BlockKey], at: int) -> _Abroad:
        located = await self._directory.locate(joined(keys[at:]))
        stretches, first = [], at
        for segment in located.segments:
            sources = [source for place in segment.places if (source := self._source(place)) is not None]
            stretches.append(Stretch(first, segment.count, tuple(sources)))
            first += segment.count
        return _Abroad(stretches)

    def _source(self, place: Place) -> Source | None:
        node, name = place
        if node in ("", self._node):
            if name == CPU:
                return None  # said before our last eviction: our own books know better
            return next((self._tier(tier) for tier in self._lower if tier.name == name), None)
        peer = self._peers(node)
        if peer is None:
            return None
        kind = "peer" if name == CPU else f"peer+{name}"
        return Source(f"{kind}:{node}", place, peer.get)


class _Abroad:
    """What the directory said of a request's keys."""

    def __init__(self, stretches: list[Stretch]) -> None:
        self._stretches = stretches

    def at(self, first: int) -> Stretch | None:
        """From key `first` to the end of its stretch; None where nobody within reach has it."""
        for stretch in self._stretches:
            end = stretch.first + stretch.count
            if stretch.first <= first < end:
                return Stretch(first, end - first, stretch.sources) if stretch.sources else None
        return None
