"""The Redis tier, put together, and its client: redis-py, for small commands and for whole values in a cluster.

This is the only file that knows redis-py. What the tier does is in `kv_tiers/redis_blocks.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Literal, TypeVar

import xxhash
from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError, ResponseError

from kv_tiers.at_rest import AtRest
from kv_tiers.books import SlotBooks
from kv_tiers.breaker import Breaker
from kv_tiers.keys import BlockKey
from kv_tiers.packing import FRAME_BYTES, FrameHeader, read_frame_header
from kv_tiers.redis_address import RedisAddress
from kv_tiers.redis_blocks import RedisBlocks
from kv_tiers.redis_cluster import ClusterLanes
from kv_tiers.redis_lanes import Lanes
from kv_tiers.redis_ports import BlockLanes, Sent, Unreachable
from kv_tiers.redis_values import PATTERN, charge_of, largest_frame, value_name
from kv_tiers.tier import Fetched
from policies.tiering import EvictionPolicy

Answer = TypeVar("Answer")

_PAGE = 500


class RedisTier(RedisBlocks):
    """`Tier` in the Redis at `url` (`RedisAddress.parse`; Redis 6.2 or later), which other nodes share.

    `nbytes` bounds what the blocks in this node's books take there, metadata included; the client's and server's
    buffers, and parts that a killed writer left (they go within a minute), come on top. `block_bytes`: length of this
    node's blocks, by which the bound is divided (None: slot_bytes). `at_rest`: of the blocks that it is given; it does
    not see others, and removes those that it finds at its start. `deadline_s` for one block or command. `packing`
    "zstd" trades time for room, losslessly. With `ttl_s` Redis forgets by itself what nobody reads. After
    `breaker_failures` failures in a row Redis is asked once per `breaker_pause_s`. ValueError for a URL or sizes that
    cannot be; everything else (wrong password, no server) is a tier that fails until it is put right.
    """

    def __init__(
        self,
        url: str,
        nbytes: int,
        slot_bytes: int,
        *,
        block_bytes: int | None = None,
        at_rest: AtRest = AtRest.EXACT,
        connections: int = 4,
        deadline_s: float = 1.0,
        breaker_failures: int = 3,
        breaker_pause_s: float = 1.0,
        packing: Literal["none", "zstd"] = "none",
        policy: EvictionPolicy[BlockKey] | None = None,
        clock: Callable[[], float] = time.monotonic,
        ttl_s: float | None = None,
        tenant_share: float = 1.0,
        pin_share: float = 0.5,
        watch_s: float = 1.0,
    ) -> None:
        if not 2 <= connections <= 4:
            raise ValueError(f"2 to 4 connections carry blocks, not {connections}")
        address = RedisAddress.parse(url)
        usual = min(block_bytes or slot_bytes, slot_bytes)
        # Packed blocks have been seen at two thirds; where they come out smaller still, slots run out before bytes.
        slots = nbytes // charge_of(largest_frame(usual // 2 if packing == "zstd" else usual))
        if slots < 1:
            raise ValueError(f"{nbytes} bytes of Redis hold no block of {slot_bytes}")
        books = SlotBooks(
            slots,
            slot_bytes,
            policy=policy,
            clock=clock,
            ttl_s=ttl_s,
            tenant_share=tenant_share,
            pin_share=pin_share,
        )
        client = RedisClient(address, connections=connections, deadline_s=deadline_s, ttl_s=ttl_s)
        writers = connections // 2
        lanes: BlockLanes = (
            ClusterLanes(client, connections=connections, ttl_s=ttl_s)
            if address.cluster
            else Lanes(
                address, readers=connections - writers, writers=writers, deadline_s=deadline_s, ttl_s=ttl_s
            )
        )
        super().__init__(
            client,
            lanes,
            books,
            nbytes=nbytes,
            pack=packing == "zstd",
            kept_as=at_rest,
            breaker=Breaker(breaker_failures, breaker_pause_s),
            watch_s=watch_s,
            renew_s=None if ttl_s is None else ttl_s / 3,
            clock=clock,
        )


class RedisClient:
    """Commands within a deadline each, over few connections. Unreachable from all but `get`, `set` and `keep`."""

    def __init__(
        self, address: RedisAddress, *, connections: int, deadline_s: float, ttl_s: float | None
    ) -> None:
        self._deadline_s = deadline_s
        self._asked: set[asyncio.Future[Any]] = set()
        self._ttl_s = None if ttl_s is None else max(1, round(ttl_s))
        limits: dict[str, Any] = {
            "socket_timeout": deadline_s,
            "socket_connect_timeout": deadline_s,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
        }
        self._redis: Redis | RedisCluster
        if address.cluster:
            # Never waits for a connection, so as many as there can be calls.
            self._redis = RedisCluster.from_url(
                address.client_url,
                max_connections=2 * connections + 8,
                cluster_error_retry_attempts=1,
                **limits,
            )
        else:
            pool = BlockingConnectionPool.from_url(
                address.client_url, max_connections=connections, timeout=deadline_s, **limits
            )
            self._redis = Redis.from_pool(pool)

    async def headers(self, keys: Sequence[BlockKey]) -> list[FrameHeader | None]:
        """How the values of these blocks start; None for no value, or none of ours."""
        found: list[FrameHeader | None] = []
        for start in range(0, len(keys), _PAGE):
            names = [value_name(key) for key in keys[start : start + _PAGE]]
            heads = await self._each([("GETRANGE", name, 0, FRAME_BYTES - 1) for name in names])
            found += [read_frame_header(head) if isinstance(head, bytes) else None for head in heads]
        return found

    async def remove(self, names: Sequence[bytes]) -> None:
        """UNLINK each."""
        for start in range(0, len(names), _PAGE):
            await self._each([("UNLINK", name) for name in names[start : start + _PAGE]])

    async def lives(self, names: Sequence[bytes]) -> list[int]:
        """Milliseconds to live; negative for no end, or no value."""
        found: list[int] = []
        for start in range(0, len(names), _PAGE):
            lives = await self._each([("PTTL", name) for name in names[start : start + _PAGE]])
            found += [life if isinstance(life, int) else 0 for life in lives]
        return found

    async def renew(self, names: Sequence[bytes]) -> None:
        """Start the tier's time to live again; without one, end any."""
        command = ("PERSIST",) if self._ttl_s is None else ("EXPIRE",)
        rest = () if self._ttl_s is None else (self._ttl_s,)
        for start in range(0, len(names), _PAGE):
            await self._each([(*command, name, *rest) for name in names[start : start + _PAGE]])

    async def names(self) -> AsyncIterator[list[bytes]]:
        """All names that may be ours, in pages; one may come twice. What is there all the while is not left out."""
        page: list[bytes] = []
        try:
            async for name in self._redis.scan_iter(match=PATTERN, count=_PAGE):
                page.append(name)
                if len(page) >= _PAGE:
                    yield page
                    page = []
        except (RedisError, RedisClusterException, OSError) as error:
            raise Unreachable(str(error)) from error
        yield page

    async def incarnation(self) -> int:
        """A number of this run of Redis (of a cluster: of its primaries); a later run has a larger one.

        The second in which it started, which every client computes alike, then bits of the run's id.
        """
        if isinstance(self._redis, RedisCluster):
            answer = await self._ask(self._redis.info("server", target_nodes=RedisCluster.PRIMARIES))
            runs = list(answer.values()) if "run_id" not in answer else [answer]
        else:
            runs = [await self._ask(self._redis.info("server"))]
        try:
            started = max(
                int(run.get("server_time_usec", 0)) // 1_000_000 - int(run["uptime_in_seconds"])
                for run in runs
            )
            ids = ",".join(sorted(str(run["run_id"]) for run in runs))
        except (KeyError, ValueError) as error:  # something that speaks like Redis
            raise Unreachable(f"INFO tells of no run: {error}") from error
        return max(started, 0) << 31 | xxhash.xxh3_64_intdigest(ids.encode()) >> 33

    async def get(self, name: bytes) -> bytes | Fetched:
        """The value, or MISS, CORRUPT (another type), FAILED."""
        try:
            asked: Awaitable[Any] = (
                self._redis.get(name) if self._ttl_s is None else self._redis.getex(name, ex=self._ttl_s)
            )
            value = await self._ask(asked)
        except Unreachable as error:
            wrong_type = isinstance(error.__cause__, ResponseError) and "WRONGTYPE" in str(error)
            return Fetched.CORRUPT if wrong_type else Fetched.FAILED
        return Fetched.MISS if value is None else value

    async def set(self, name: bytes, value: bytes, seconds: int | None) -> Sent:
        """Set, with a time to live if one is given."""
        try:
            return Sent.STORED if await self._ask(self._redis.set(name, value, ex=seconds)) else Sent.UNKNOWN
        except Unreachable as error:
            return Sent.FULL if "command not allowed when used memory" in str(error) else Sent.UNKNOWN

    async def keep(self, names: Sequence[bytes]) -> bool:
        """`renew`; False where that is not certain."""
        try:
            await self.renew(names)
        except Unreachable:
            return False
        return True

    async def close(self) -> None:
        """Let go of the connections."""
        with contextlib.suppress(Unreachable):  # nobody is left to tell
            await self._ask(self._redis.aclose())

    async def _each(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Answers of small commands in one round trip (per node); an error of one of them is its answer."""
        if not commands:
            return []
        pipeline = (
            self._redis.pipeline() if isinstance(self._redis, RedisCluster) else self._redis.pipeline(False)
        )
        for command in commands:
            pipeline.execute_command(*command)
        answers: list[Any] = await self._ask(pipeline.execute(raise_on_error=False))
        for answer in answers:
            if isinstance(answer, Exception) and not isinstance(answer, ResponseError):
                raise Unreachable(str(answer)) from answer
        return answers

    async def _ask(self, question: Awaitable[Answer]) -> Answer:
        """In a task of its own: redis-py has been seen to swallow the cancellation of its caller."""
        task = asyncio.ensure_future(question)
        self._asked.add(task)
        task.add_done_callback(self._answered)
        try:
            await asyncio.wait({task}, timeout=self._deadline_s)
            if not task.done():
                raise Unreachable(f"no answer in {self._deadline_s} s")
            return task.result()
        except (RedisError, RedisClusterException, OSError) as error:
            raise Unreachable(str(error)) from error
        finally:
            task.cancel()

    def _answered(self, task: asyncio.Future[Any]) -> None:
        self._asked.discard(task)
        if not task.cancelled():
            task.exception()  # so that nobody is told of what nobody waits for
