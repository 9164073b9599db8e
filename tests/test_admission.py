"""Admission `auto` before it has seen enough to forget anything: it must refuse from the beginning."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest

from policies.tiering import make_admission

SESSIONS = 500
BLOCKS = 8


class Shares(NamedTuple):
    """Of the blocks that nobody asked for again, and of those that somebody did: how many were written."""

    useless: float
    useful: float


def replay(capacity: int, seed: int) -> Shares:
    """A session begins every second; a third of them are long, and most of those go on after some minutes.

    Each is judged 50 s after its beginning, as it leaves the fast tier.
    """
    random_ = random.Random(seed)
    admission = make_admission("auto", capacity)
    events: list[tuple[float, str, int, bool]] = []
    for number in range(SESSIONS):
        goes_on = random_.random() < (0.6 if number % 3 == 0 else 0.1)
        events.append((number, "begins", number, goes_on))
        events.append((number + 50.0, "judged", number, goes_on))
        if goes_on:
            events.append((number + 60.0 + random_.expovariate(1 / 300), "goes on", number, goes_on))
    written = {True: 0, False: 0}
    judged = {True: 0, False: 0}
    for time, what, number, goes_on in sorted(events):
        if time > SESSIONS:
            break
        chain = [(number, block) for block in range(BLOCKS * (3 if number % 3 == 0 else 1))]
        if what == "judged":
            written[goes_on] += sum(admission.worth(chain, time))
            judged[goes_on] += len(chain)
        else:
            more = [(number, "answer", block) for block in range(4)] if what == "goes on" else []
            admission.accessed(chain + more, time)
    return Shares(written[False] / judged[False], written[True] / judged[True])


@pytest.mark.parametrize("seed", range(2))
def test_a_memory_that_is_far_from_full_lets_no_more_through_than_a_full_one(seed):
    """Chances over the age of the oldest key grew with that age, and eight of ten blocks passed."""
    shares = replay(50_000, seed)
    assert 0.05 < shares.useless < 0.62 and shares.useful > 0.05


def test_equal_blocks_are_judged_alike_whatever_was_judged_before():
    one, other = make_admission("auto", 100), make_admission("auto", 100)
    for admission in (one, other):
        for number in range(40):
            admission.accessed([(number, block) for block in range(4)], float(number))
    cold = [(number, 0) for number in range(30)]
    for key in cold:
        one.worth([key], 50.0)
    other.worth(cold, 50.0)
    assert one.worth(cold, 51.0) == other.worth(cold, 51.0)
