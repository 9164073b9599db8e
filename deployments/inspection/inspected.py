"""What one recipe kept of one prompt: the numbers that pages and pictures draw, and nothing of engines."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isnan

import numpy as np
from numpy.typing import NDArray

LEVELS = 10
"""Shades of a kept share above none: 0 is kept nowhere, `LEVELS` everywhere, and both mean exactly that."""

PART = "·"
"""Stands for a token that ends inside a character; the token that completes it shows the character."""


@dataclass(frozen=True)
class CacheRow:
    """One KV cache. window: of sliding-window attention, None for full attention, on which the policy acts.

    budget: tokens per kv head that it was given (None: windowed); counts: tokens that each kv head kept; kept_mass:
    share of the observed attention that fell on survivors, None where it was not measured or nothing was observed.
    """

    index: int
    window: int | None
    budget: int | None
    counts: tuple[int, ...]
    kept_mass: float | None


@dataclass(frozen=True)
class Inspected:
    """One prompt of N tokens under one recipe.

    texts: what each token reads, N of them; kept: bool [heads, N], row by row the kv heads of the scored caches in
    order; `full_bytes` is the K and V of the whole prompt in all caches, `kept_bytes` what was left of it.
    """

    model: str
    recipe_id: str
    source: str
    texts: tuple[str, ...]
    kept: NDArray[np.bool_]
    caches: tuple[CacheRow, ...]
    kept_bytes: int
    full_bytes: int
    entropy: float

    @property
    def tokens(self) -> int:
        """N."""
        return len(self.texts)

    @property
    def scored(self) -> tuple[CacheRow, ...]:
        """The caches that the policy acts on."""
        return tuple(row for row in self.caches if row.window is None)

    @property
    def heads(self) -> int:
        """Scored caches x kv heads: how many decide about each token."""
        return len(self.kept)

    @property
    def votes(self) -> NDArray[np.int64]:
        """[N]: how many of `heads` kept each token."""
        return self.kept.sum(axis=0, dtype=np.int64)

    @property
    def kept_mass(self) -> float | None:
        """Mean over the caches where it is known."""
        known = [row.kept_mass for row in self.scored if row.kept_mass is not None]
        return sum(known) / len(known) if known else None

    @property
    def most_kept(self) -> int:
        """Most tokens of any kv head of any cache; at least 1."""
        return max([1, *(max(row.counts) for row in self.caches)])

    def facts(self) -> list[tuple[str, str]]:
        """The header: names and values in words."""
        counts = self.kept.sum(axis=1, dtype=np.int64)
        kept = "no scored caches"
        if self.heads:
            low, high, share = int(counts.min()), int(counts.max()), float(counts.mean()) / self.tokens
            kept = f"{low:,} per head ({share:.1%})"
            if low < high:
                kept = f"{low:,} – {high:,} per head ({share:.1%} on average)"
        return [
            ("Model", self.model),
            ("Recipe", self.recipe_id),
            ("Text", self.source),
            ("Prompt", f"{self.tokens:,} tokens"),
            ("Kept", kept),
            ("Bytes", f"{size(self.kept_bytes)} of {size(self.full_bytes)} ({self.kept_bytes / self.full_bytes:.1%})"),
            ("Attention mass kept", "not measured" if self.kept_mass is None else f"{self.kept_mass:.2%} on average"),
            ("Budget entropy", f"{self.entropy:.4f}"),
        ]  # fmt: skip

    def profile(self, bins: int) -> list[float]:
        """Kept share along the prompt: means over at most `bins` equal stretches, or a value per token."""
        if not self.heads:
            return []
        edges = np.linspace(0, self.tokens, min(bins, self.tokens) + 1).astype(int)
        shares = self.votes / self.heads
        return [float(shares[a:b].mean()) for a, b in pairwise(edges)]


def level(part: int, whole: int) -> int:
    """Shade of `part` of `whole`, 0 … LEVELS; only nothing is 0 and only everything is LEVELS."""
    if part <= 0 or whole <= 0:
        return 0
    return LEVELS if part >= whole else min(LEVELS - 1, max(1, round(part / whole * LEVELS)))


def known(share: float) -> float | None:
    """None for the NaN of a layer whose attention nobody observed."""
    return None if isnan(share) else share


def size(nbytes: int) -> str:
    """Bytes for readers: 12.3 MiB."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def readable(pieces: Sequence[bytes]) -> tuple[str, ...]:
    """Text of each token. Characters of several tokens stand in the last of them, the others read `PART`."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [decoder.decode(piece) or (PART if piece else "") for piece in pieces]
    if texts and (rest := decoder.decode(b"", final=True)):
        texts[-1] = texts[-1].removesuffix(PART) + rest
    return tuple(texts)
