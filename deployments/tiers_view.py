"""`kvtide tiers`: what /v1/kv/stats says, as a table for a terminal. Pure: text from values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Body = Mapping[str, Any]
"""A decoded answer of /v1/kv/stats."""

_COLUMNS = ("node", "tier", "used", "", "pinned", "hits", "GB/s", "evicted", "state")
_LEFT = frozenset({"node", "tier", "used", "state"})
_BAR = 10
_NODE_CHARS = 12
_NOTHING = "–"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def table(body: Body, before: Body | None = None, seconds: float = 0.0) -> str:
    """One row per node and tier, then the directory and whoever did not answer.

    GB/s: bytes read since `before`, which is `seconds` old; without it the speed that the node expects of the tier.
    """
    earlier = {} if before is None else {(node, row["tier"]): row for node, row in _rows(before)}
    rows = [_cells(node, row, earlier.get((node, row["tier"])), seconds) for node, row in _rows(body)]
    lines = _aligned(rows) if rows else ["no node with tiers"]
    return "\n".join((*lines, "", *_footer(body)))


def size(nbytes: float) -> str:
    """Bytes in the largest unit that leaves a whole number before the point: 1.5 GiB."""
    for unit in _UNITS:
        if nbytes < 1024 or unit == _UNITS[-1]:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError("the last unit takes everything")


def _rows(body: Body) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for node in body["nodes"]:
        for row in node["tiers"]:
            yield node["node"], row


def _cells(node: str, row: Mapping[str, Any], before: Mapping[str, Any] | None, seconds: float) -> list[str]:
    used, capacity = row.get("blocks", 0), row.get("capacity", 0)
    share = used / capacity if capacity else 0.0
    block = row.get("slot_bytes")
    amounts = f"{size(used * block)} of {size(capacity * block)}" if block else f"{used} of {capacity} blocks"
    asked = row.get("hits", 0) + row.get("misses", 0)
    return [
        node[:_NODE_CHARS],
        row["tier"] if row.get("codec", "exact") == "exact" else f"{row['tier']} {row['codec']}",
        bar(share),
        amounts,
        str(row.get("pinned", _NOTHING)),
        f"{row.get('hits', 0) / asked:.0%}" if asked else _NOTHING,
        _speed(row, before, seconds),
        str(row.get("evicted", _NOTHING)),
        _state(row),
    ]


def bar(share: float) -> str:
    """A tenth of it per sign."""
    full = min(_BAR, max(0, round(share * _BAR)))
    return "█" * full + "░" * (_BAR - full)


def _speed(row: Mapping[str, Any], before: Mapping[str, Any] | None, seconds: float) -> str:
    if before is not None and seconds > 0 and "bytes_read" in row and "bytes_read" in before:
        # Fewer bytes than before: the node's agent has started again.
        return f"{max(0, row['bytes_read'] - before['bytes_read']) / seconds / 1e9:.2f}"
    expected = row.get("read_bytes_per_s")
    return _NOTHING if expected is None else f"{expected / 1e9:.2f}"


def _state(row: Mapping[str, Any]) -> str:
    words = ["out of use" if row.get("open") else "ok"]
    words += [f"{row[name]} {name}" for name in ("failures", "corrupt") if row.get(name)]
    return ", ".join(words)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [_COLUMNS, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for line in cells:
        padded = [
            text.ljust(width) if name in _LEFT else text.rjust(width)
            for name, text, width in zip(_COLUMNS, line, widths, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return lines


def _footer(body: Body) -> list[str]:
    lines = []
    directory = body.get("directory")
    if directory is not None:
        tiers = ", ".join(f"{entries} in {tier}" for tier, entries in directory["tiers"].items())
        shards = f", {directory['shards']} shards" if directory.get("shards", 1) > 1 else ""
        lines.append(
            f"directory: {directory['keys']} blocks of {directory['nodes']} nodes"
            f"{f' ({tiers})' if tiers else ''}{shards}"
        )
    lines += [f"{each['source']}: {each['reason']}" for each in body["unanswered"]]
    return lines
