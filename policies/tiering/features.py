"""What is known of a run of blocks, in classes, and what may matter of it for when the blocks are used again.

Nothing here is in blocks or seconds of some trace: lengths and times count by their logarithms, a turn's growth by its
share of the prompt, an age against the session's own pace.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import log2, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.tiering.ages import BINS, ENDS, STARTS

Array = NDArray[np.float64]


class Part(Enum):
    """Where in its request a run of blocks lies."""

    PATH = "path"
    LAST = "last"
    """The last block: often not full where prompts are cut into blocks, so that nobody asks for it again."""
    STALE = "stale"
    """A later turn of the session went another way."""


class Kind(NamedTuple):
    """Class of a run. Fields that do not apply are -1; `first`, `later` and `of` bound their number to about 330."""

    part: Part
    later: bool
    length: int = -1
    """Of a first turn: octave of its blocks."""
    turn: int = -1
    pace: int = -1
    """Octave of the session's usual seconds between turns."""
    newness: int = -1
    """How often the turn's new blocks, halved or doubled, fit into its prompt: 0 is more than half of it."""


_MOST_LENGTH, _MOST_TURN, _MOST_PACE, _MOST_NEWNESS = 7, 3, 12, 5


def kind_of(part: Part, turn: int, pace_s: float | None, length: int, growth: int) -> Kind:
    """Of blocks of one session: its turn from 1, its usual gap, the prompt's blocks and how many of them were new."""
    if part is not Part.PATH:
        return Kind(part, turn > 1)
    if turn == 1 or pace_s is None:
        return Kind(part, False, length=min(_MOST_LENGTH, int(log2(length))))
    return Kind(
        part,
        True,
        turn=min(_MOST_TURN, int(log2(turn))),
        pace=min(_MOST_PACE, int(log2(pace_s + 1) + 0.5)),
        newness=min(_MOST_NEWNESS, int(log2(length / max(growth, 0.5)))),
    )


_LOG_AGES = np.log2([sqrt(max(start, 0.25) * end) for start, end in zip(STARTS, ENDS, strict=True)])
_TILT = ((_LOG_AGES - 6.0) / 4.0)[:, None]
"""[BINS, 1]: lets an effect grow or shrink with age; 0 at about a minute."""
_FLAT = np.ones((BINS, 1))

_LENGTH_KNOTS = (1, 2, 3, 4, 5.5, 7)
_NEWNESS_KNOTS = (0, 1, 2, 3, 5)
_PACE_KNOTS = (-5, -3, -2, -1, 0, 1, 2, 3, 5)
"""Octaves of age over pace."""


def _hats(places: Any, knots: Sequence[float]) -> Array:
    """Linear interpolation between knots as features: [places, knots], rows sum to 1."""
    return np.stack([np.interp(places, knots, row) for row in np.eye(len(knots))], axis=-1)


BASIS = _hats(_LOG_AGES, range(-1, 17))
"""[BINS, BASIS_FEATURES]: the curve over ages that all kinds have in common."""
BASIS_FEATURES = BASIS.shape[1]


def features(kind: Kind) -> Array:
    """[BINS, FEATURES], in the order of `PRIOR_MEAN`."""
    path = kind.part is Part.PATH
    first, later = path and not kind.later, path and kind.later
    blocks = [
        _if(kind.part is Part.LAST, np.hstack([_FLAT, _TILT])),
        _if(kind.part is Part.STALE, np.hstack([_FLAT, _TILT])),
        _if(later, np.hstack([_FLAT, _TILT])),
        _if(first, _FLAT * _hats([kind.length], _LENGTH_KNOTS)),
        _if(first, (kind.length - 4) / 2 * _TILT),
        _if(later, _FLAT * _hats([kind.newness], _NEWNESS_KNOTS)),
        _if(later, (kind.newness - 1.5) / 2 * _TILT),
        _if(later, (kind.turn - 1) * _FLAT),
        _if(later, (kind.pace - 6) / 3 * np.hstack([_FLAT, _TILT])),
        _if(later, _hats(_LOG_AGES - kind.pace, _PACE_KNOTS)),
    ]
    return np.hstack(blocks)


def _if(applies: bool, block: Array) -> Array:
    return block if applies else np.zeros_like(block)


PRIOR_MEAN = np.array(
    [
        *(0.0, 0.0),  # last: as good as the others where blocks are full
        *(-1.5, 0.0),  # stale: the session went another way
        *(0.3, 0.0),  # later turns: who came back comes back
        *(0.0,) * len(_LENGTH_KNOTS),
        0.0,
        *(-0.6, -0.2, 0.1, 0.2, 0.2),  # a prompt that is mostly new shares a beginning, not a session
        0.0,
        0.1,  # turn
        *(0.0, 0.0),  # pace
        *(-0.3, -0.2, 0.0, 0.2, 0.4, 0.4, 0.0, 0.0, 0.0),  # sessions keep their pace; a pause says little
    ]
)
"""Logarithms of hazard ratios expected before anything is seen: what sessions are, not what some trace showed."""

FEATURES = len(PRIOR_MEAN)
