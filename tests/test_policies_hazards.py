"""What eviction learns: bins of ages, hazards of shared blocks and of sessions, and what they make a block worth."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.tiering.ages import BINS, ENDS, STARTS, Counts, bin_of, chance, gittins
from policies.tiering.curves import Curves
from policies.tiering.features import FEATURES, PRIOR_MEAN, Kind, Part, features, kind_of
from policies.tiering.regression import Regression, indices

often = settings(max_examples=60, deadline=None)

EVERY_KIND = {
    *(Kind(part, later) for part in (Part.LAST, Part.STALE) for later in (False, True)),
    *(Kind(Part.PATH, False, length=octave) for octave in range(8)),
    *(
        Kind(Part.PATH, True, turn=turn, pace=pace, newness=newness)
        for turn, pace, newness in product(range(4), range(13), range(6))
    ),
}


def test_age_bins_cover_all_ages_without_a_gap():
    assert STARTS[0] == 0.0 and ENDS[:-1] == STARTS[1:]
    assert all(bin_of(start) == number for number, start in enumerate(STARTS))
    assert bin_of(ENDS[-1] * 10) == BINS - 1


@pytest.mark.parametrize(
    "counts", [Curves().of(("anything",)), Regression().of(kind_of(Part.PATH, 1, None, 8, 8))]
)
def test_before_anything_is_known_a_block_is_worth_less_the_older_it_is(counts):
    counts.learn()
    index = counts.index[2:]  # the first bin is wider than the next
    assert index == sorted(index, reverse=True)


def returns_after(counts: Counts, seconds: float, now: float) -> None:
    """One block of this kind comes now (simulated backwards) and is asked for again after `seconds`."""
    late = bin_of(seconds)
    born = now - seconds
    for age_bin in range(late + 1):
        counts.enter(age_bin, 1.0, born + STARTS[age_bin])
        counts.leave(age_bin, 1.0, min(now, born + ENDS[age_bin]))
    counts.reused(late, 1.0)
    counts.saw_run(1.0)


def test_a_curve_learns_when_blocks_come_back():
    curves = Curves()
    curve = curves.of(("kind",))
    for number in range(200):
        curves.tick(100.0 * number)
        returns_after(curve, 60.0, 100.0 * number)
    curve.learn()
    assert chance(curve.rates, 0.0, 30.0) < 0.4 < 0.8 < chance(curve.rates, 0.0, 120.0)
    peak = curve.index.index(max(curve.index))
    assert abs(bin_of(60.0) - peak) <= 2, "just before they come back they are worth most"


def test_the_regression_learns_of_one_kind_from_those_that_resemble_it():
    """Sessions that come each minute come back, those of every hour never; prompts like them, unseen, promise alike."""
    regression = Regression()
    minute, hour = (kind_of(Part.PATH, 3, pace, 30, 2) for pace in (60.0, 3600.0))
    fits = 0
    for number in range(400):
        now = 100.0 * number
        fits += regression.tick(now)
        returns_after(regression.of(minute), 60.0, now)
        left = regression.of(hour)
        for age_bin in range(bin_of(5000.0)):
            left.enter(age_bin, 1.0, now + STARTS[age_bin])
            left.leave(age_bin, 1.0, now + ENDS[age_bin])
    assert fits > 30
    like_minute, like_hour = (kind_of(Part.PATH, 5, pace, 200, 2) for pace in (60.0, 3600.0))
    assert like_minute not in (minute, hour)
    soon = {kind: chance(regression.of(kind).rates, 20.0, 120.0) for kind in (like_minute, like_hour)}
    assert soon[like_minute] > 0.5 > 5 * soon[like_hour]


def test_what_faded_speaks_less_and_what_waits_keeps_waiting():
    counts = Counts()
    counts.enter(3, 2.0, 10.0)
    counts.reused(3, 4.0)
    counts.fade(0.5, 20.0)
    assert counts.events[3] == 2.0 and counts.at_risk(20.0)[3] == 10.0
    assert counts.at_risk(30.0)[3] == 30.0, "two blocks for ten more seconds"
    counts.leave(3, 2.0, 30.0)
    assert counts.at_risk(99.0)[3] == 30.0


@often
@given(st.lists(st.floats(-12, 1), min_size=BINS, max_size=BINS))
def test_many_indices_at_once_are_those_of_gittins(logs):
    rates = [10.0**log for log in logs]
    at_once = indices(np.array([rates, rates[::-1]]))
    assert at_once[0] == pytest.approx(gittins(rates), rel=1e-6)


@often
@given(
    st.sampled_from(Part),
    st.integers(1, 10**6),
    st.none() | st.floats(0, 1e9),
    st.integers(1, 10**6),
    st.integers(0, 10**6),
)
def test_kinds_are_few_and_known_by_finite_features(part, turn, pace_s, length, growth):
    kind = kind_of(part, turn, pace_s, length, min(growth, length))
    assert kind in EVERY_KIND
    table = features(kind)
    assert table.shape == (BINS, FEATURES) == (BINS, len(PRIOR_MEAN))
    assert np.isfinite(table).all() and np.abs(table).max() < 6
