"""When Scissorhands compresses: known beforehand, because a head's token count does not depend on what it holds."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int32]


class Compressions(NamedTuple):
    """The compressions of heads, all arrays int32 [...] of one shape; caps 0 where there is no head.

    A head is compressed as soon as it holds more than its cap: `drop` tokens leave, or more where it is further above,
    but never so many that fewer than `floor` (at most the cap) are left.
    """

    caps: Counts
    drop: Counts
    floor: Counts

    @property
    def spacing(self) -> Counts:
        """Tokens from one compression to the next."""
        return np.maximum(1, np.minimum(self.drop, self.caps + 1 - self.floor))

    def left(self, counts: Counts, coming: int = 0) -> Counts:
        """Tokens that a compression of `counts` leaves, so that `coming` more fit."""
        dropped = np.maximum(self.drop, counts + coming - self.caps)
        return np.minimum(counts, np.maximum(counts - dropped, self.floor))

    def ahead(self, window: int) -> int:
        """K: compressions, the present step's included, whose last `window` rows can hold the present one."""
        return max(1, ceil(window / int(self.spacing[self.caps > 0].min(initial=window))))

    def positions(self, counts: Counts, newest: int, number: int) -> NDArray[np.int64]:
        """Newest tokens of the next `number` compressions, int64 [..., number]; `counts` are held after token `newest`.

        The first is `newest` itself where that is more than the cap.
        """
        over = counts > self.caps
        left = np.where(over, self.left(counts), counts)
        first = (newest + self.caps + 1 - left).astype(np.int64)[..., None]
        later = first + self.spacing.astype(np.int64)[..., None] * np.arange(number)
        now = np.concatenate([np.full_like(first, newest), later[..., :-1]], -1)
        return np.where(over[..., None], now, later)
