"""Connections to other nodes' slabs, and the rule that memory is nobody's before nothing can land in it any more."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kv_tiers.transfer.ticket import PeerId
from kv_tiers.transfer.wire import Read, Step, Wire


@dataclass(eq=False)
class Link:
    """A connected peer. `users`: calls at work with it. Doomed: the last of them disconnects.

    `pending`: reads that were given up and are not over. `over`: reads whose handles nobody has freed yet.
    """

    peer: PeerId
    users: int = 0
    doomed: bool = False
    pending: list[Read] = field(default_factory=list)
    over: deque[Read] = field(default_factory=deque)
    gone: threading.Event = field(default_factory=threading.Event)

    def free(self) -> None:
        """Free the handles of reads that are over."""
        while self.over:
            self.over.popleft().close()


class Links:
    """The peers that are connected. Thread safe."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self._links: dict[PeerId, Link] = {}

    @contextmanager
    def using(self, peer: PeerId, metadata: bytes) -> Iterator[Link | None]:
        """The peer, connected; None: out of reach, or about to be disconnected.

        Leaving with a read in `link.pending` (given up, and not over) dooms the link, and returns only after the peer
        was disconnected: when the last of its users, each with a deadline, has left.
        """
        link = self._enter(peer, metadata)
        try:
            yield link
        finally:
            if link is not None:
                self._leave(link)

    @property
    def count(self) -> int:
        """Peers that are connected."""
        return len(self._links)

    def close(self) -> None:
        """Disconnect all; no call may be at work."""
        with self._lock:
            for link in list(self._links.values()):
                assert not link.users, "close during a read"
                self._drop(link)

    def _enter(self, peer: PeerId, metadata: bytes) -> Link | None:
        with self._connecting:
            with self._lock:
                link = self._links.get(peer)
                if link is not None:
                    if link.doomed:
                        return None
                    link.users += 1
                    return link
                # Another life of the same name: the older one's memory is gone, or about to be.
                for other in [
                    other for other in self._links.values() if other.peer.endpoint == peer.endpoint
                ]:
                    other.doomed = True
                    self._drop_if_unused(other)
            if self._wire.connect(peer, metadata) is not Step.DONE:
                return None
            with self._lock:
                link = self._links[peer] = Link(peer, users=1)
            return link

    def _leave(self, link: Link) -> None:
        with self._lock:
            quarantined = bool(link.pending)
            link.doomed = link.doomed or quarantined
            link.users -= 1
            self._drop_if_unused(link)
        if quarantined:
            link.gone.wait()

    def _drop_if_unused(self, link: Link) -> None:
        if link.doomed and not link.users:
            self._drop(link)

    def _drop(self, link: Link) -> None:
        link.free()
        for read in link.pending:
            read.close()
        self._wire.disconnect(link.peer)
        del self._links[link.peer]
        link.gone.set()
