"""A directory in several shards: which shard a key belongs to, and one answer out of theirs.

A key's shard follows from the LAST two bytes of its digest. A shard finds keys by the first sixteen (`holders.py`), so
neither spread spoils the other: a shard's keys still differ in all the bits that its dictionaries hash.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kv_tiers.directory import DirectoryStats, Located, Outcome, Segment
from kv_tiers.keys import DIGEST_BYTES

_GRAVEST = (Outcome.STALE, Outcome.UNKNOWN, Outcome.GAP, Outcome.OK)
_HOLE = Segment(0, ())

PART_KEYS = 16_384  # a shard takes so many in some ten milliseconds, in which it answers nobody


class Part(NamedTuple):
    """One message of a resync."""

    keys: bytes
    first: bool
    last: bool


def parts(keys: bytes, part_keys: int = PART_KEYS) -> Iterator[Part]:
    """Cut a manifest for `resync`; an empty one is one empty part."""
    step = part_keys * DIGEST_BYTES
    for begin in range(0, max(len(keys), 1), step):
        yield Part(keys[begin : begin + step], begin == 0, begin + step >= len(keys))


class Split(NamedTuple):
    """`keys[s]`: the keys of shard s, in their order. `owner`: the shard of each key."""

    keys: tuple[bytes, ...]
    owner: np.ndarray


def split(keys: bytes, shards: int) -> Split:
    """Deal concatenated digests out to `shards` shards. ValueError if they are not whole."""
    if len(keys) % DIGEST_BYTES:
        raise ValueError(f"{len(keys)} bytes are no whole digests of {DIGEST_BYTES}")
    if shards == 1:
        return Split((keys,), np.zeros(len(keys) // DIGEST_BYTES, np.uint16))
    digests = np.frombuffer(keys, np.uint8).reshape(-1, DIGEST_BYTES)
    owner = (digests[:, -2].astype(np.uint16) << 8 | digests[:, -1]) % np.uint16(shards)
    return Split(tuple(digests[owner == shard].tobytes() for shard in range(shards)), owner)


def join_located(parted: Split, answers: Sequence[Located]) -> Located:
    """What one directory would have answered: the shards' runs woven together, cut at the first hole of any.

    Its epoch is that of the shard that started last.
    """
    epoch = max(answer.epoch for answer in answers)
    if len(answers) == 1:
        return Located(epoch, answers[0].segments)
    left = [iter(answer.segments) for answer in answers]
    now = [next(segments, _HOLE) for segments in left]
    used = [0] * len(answers)
    joined: list[Segment] = []
    for shard in parted.owner.tolist():
        if used[shard] == now[shard].count:
            now[shard], used[shard] = next(left[shard], _HOLE), 0
        if now[shard] is _HOLE:
            break
        used[shard] += 1
        places = now[shard].places
        if joined and joined[-1].places == places:
            joined[-1] = Segment(joined[-1].count + 1, places)
        else:
            joined.append(Segment(1, places))
    return Located(epoch, tuple(joined))


def join_bytes(parted: Split, answers: Sequence[bytes]) -> bytes:
    """One byte per key, back in the order of the keys."""
    joined = np.zeros(len(parted.owner), np.uint8)
    for shard, answer in enumerate(answers):
        joined[parted.owner == shard] = np.frombuffer(answer, np.uint8)
    return joined.tobytes()


def join_outcomes(outcomes: Sequence[Outcome]) -> Outcome:
    """The one that asks most of the sender: STALE, UNKNOWN, GAP, OK."""
    return min(outcomes, key=_GRAVEST.index)


def join_stats(answers: Sequence[DirectoryStats | None]) -> DirectoryStats:
    """One directory's stats out of those of its shards, None for one that did not answer.

    Every node speaks to every shard, so nodes are not added up, the oldest shard says how well they are known, and
    messages lost are those of the unluckiest.
    """
    known = [answer for answer in answers if answer is not None]
    tiers: dict[str, int] = {}
    for stats in known:
        for tier, entries in stats.tiers.items():
            tiers[tier] = tiers.get(tier, 0) + entries
    return DirectoryStats(
        epoch=max((stats.epoch for stats in known), default=0),
        age_s=max((stats.age_s for stats in known), default=0.0),
        nodes=max((stats.nodes for stats in known), default=0),
        nodes_in_gap=max((stats.nodes_in_gap for stats in known), default=0),
        keys=sum(stats.keys for stats in known),
        entries=sum(stats.entries for stats in known),
        tiers=tiers,
        unswept=sum(stats.unswept for stats in known),
        gaps=max((stats.gaps for stats in known), default=0),
        resyncs=max((stats.resyncs for stats in known), default=0),
        expired_nodes=max((stats.expired_nodes for stats in known), default=0),
        forgotten_entries=sum(stats.forgotten_entries for stats in known),
        reports={source: values for stats in known for source, values in stats.reports.items()},
    )
