"""A prompt's known blocks on their way into its workspace, in a tier thread, while the engine computes the rest."""

import asyncio
import logging
from functools import partial

from deployments.blocking import BlockingCalls, outlast
from engine.errors import KvtideError
from engine.prefix import PrefixLoad
from kv_tiers.keys import BlockKey

_log = logging.getLogger("kvtide.prefill")


class Loading:
    """One `PrefixLoad` that runs in a thread from now on. For the event loop of `calls`.

    A tier that fails costs the blocks that it did not give, and is logged.
    """

    def __init__(self, calls: BlockingCalls, load: PrefixLoad, request_id: str) -> None:
        self._load = load
        self._request_id = request_id
        self._loop = asyncio.get_running_loop()
        self._opened = asyncio.Event()
        self._task = asyncio.create_task(self._run(calls))

    @property
    def keys(self) -> list[BlockKey]:
        """Keys of the prompt's full blocks."""
        return self._load.keys

    async def opened(self) -> None:
        """Wait until it is known how much will come, or that nothing will."""
        await self._opened.wait()

    async def ended(self) -> None:
        """Wait until everything is in and its lease has ended. Raises what was no failure of the tier."""
        await asyncio.shield(self._task)

    async def stop(self) -> bool:
        """Have it end soon, and wait until it writes nothing more and holds no lease; → whether we were cancelled."""
        self._task.cancel()
        cancelled = await outlast(self._task)
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            _log.error("loading blocks of %s failed", self._request_id, exc_info=error)
        return cancelled

    async def _run(self, calls: BlockingCalls) -> None:
        def tell() -> None:
            self._loop.call_soon_threadsafe(self._opened.set)

        try:
            await calls.run(partial(self._load.run, tell), stop=self._load.stop)
        except (KvtideError, LookupError, OSError, ValueError) as error:
            _log.warning("blocks of %s could not be loaded: %s", self._request_id, error)
        finally:
            self._opened.set()
