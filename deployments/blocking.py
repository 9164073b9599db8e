"""Blocking calls off the event loop, none of which is left running unseen when its caller is cancelled."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


async def outlast(future: asyncio.Future[Result]) -> bool:
    """Wait until `future` is done, however often we are cancelled meanwhile; → whether we were.

    For clean-up: a second cancellation must not cut short what the first one began.
    """
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            cancelled = True
    return cancelled


class BlockingCalls:
    """A few threads of one event loop for calls of one kind, so that slow ones hold up no other kind."""

    def __init__(self, name: str, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(
        self,
        work: Callable[[], Result],
        *,
        stop: Callable[[], None] = lambda: None,
        discard: Callable[[Result], None] = lambda result: None,
    ) -> Result:
        """Result of `work()`, run in a thread.

        Cancelling drops a call that has not begun. One that runs may use what the caller frees next, so it is told to
        `stop` and waited for; a result it still has goes to `discard`.
        """
        call = self._threads.submit(work)
        done = asyncio.wrap_future(call)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            if not call.cancel():
                stop()
                await outlast(done)
                if not done.cancelled() and done.exception() is None:
                    discard(done.result())
            raise

    def post(self, work: Callable[[], None]) -> None:
        """Have `work()` done some time soon, whatever becomes of the caller; it must not raise."""
        self._threads.submit(work)

    async def close(self) -> None:
        """Wait for what was begun and posted; no call may follow."""
        await asyncio.to_thread(self._threads.shutdown)
