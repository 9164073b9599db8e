"""What of ours lies in a Redis: whole blocks, and what is left of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kv_tiers.keys import BlockKey
from kv_tiers.packing import FRAME_BYTES
from kv_tiers.redis_ports import Client
from kv_tiers.redis_values import UNCOMMITTED_S, part_name, part_names, parts_of, read_name, value_name

_NO_VALUE = -2  # PTTL's answer


@dataclass(frozen=True)
class Listing:
    """`frames`: length of each whole block's frame. `debris`: names of values that belong to no whole block."""

    frames: dict[BlockKey, int]
    debris: list[bytes]


async def list_blocks(client: Client) -> Listing:
    """Unreachable. Others may write meanwhile: what they are at is not debris."""
    frames: dict[BlockKey, int] = {}
    parts: dict[BlockKey, set[int]] = {}
    debris: list[bytes] = []
    async for page in client.names():
        firsts: list[BlockKey] = []
        for name in page:
            if (read := read_name(name)) is None:
                continue
            key, part = read
            if part:
                parts.setdefault(key, set()).add(part)
            else:
                firsts.append(key)
        for key, header in zip(firsts, await client.headers(firsts), strict=True):
            if header is None:
                debris.append(value_name(key))
            else:
                frames[key] = FRAME_BYTES + header.body_bytes
    for key, frame_bytes in list(frames.items()):
        seen = parts.pop(key, set())
        if len(seen) < parts_of(frame_bytes) - 1 and not await _all_there(
            client, part_names(key, frame_bytes)
        ):
            del frames[key]
            debris += [value_name(key), *part_names(key, frame_bytes)]
    debris += await _orphans(client, parts)
    return Listing(frames, debris)


async def _all_there(client: Client, names: Sequence[bytes]) -> bool:
    """Asked again, since parts may have been written behind the listing's back."""
    return all(life != _NO_VALUE for life in await client.lives(names))


async def _orphans(client: Client, parts: dict[BlockKey, set[int]]) -> list[bytes]:
    """Parts without a first value, but for those whose writer may still be at it: they go by themselves if not."""
    keys = list(parts)
    alone = [key for key, header in zip(keys, await client.headers(keys), strict=True) if header is None]
    names = [part_name(key, part) for key in alone for part in sorted(parts[key])]
    lives = await client.lives(names)
    return [
        name for name, life in zip(names, lives, strict=True) if life == -1 or life > UNCOMMITTED_S * 1000
    ]
