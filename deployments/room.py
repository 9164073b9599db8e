"""A number of bytes that requests share, given out in order of arrival."""

import asyncio
from collections import deque


class Room:
    """`limit` bytes for many holders, of one event loop. A single holder may have more: one prompt always fits.

    First come, first served, so that a large request is not overtaken for ever by small ones.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, nbytes: int) -> None:
        """Wait for `nbytes` and hold them; cancelled, nothing is held."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((nbytes, turn))
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._serve()  # whoever stood behind may fit
            else:
                self.give(nbytes)  # it was granted in the same moment
            raise

    def give(self, nbytes: int) -> None:
        """Give back what was taken."""
        self.held -= nbytes
        assert self.held >= 0, "given back twice"
        self._serve()

    def _serve(self) -> None:
        while self._line:
            nbytes, turn = self._line[0]
            if not turn.cancelled():
                if self.held and self.held + nbytes > self.limit:
                    return
                self.held += nbytes
                turn.set_result(None)
            self._line.popleft()
