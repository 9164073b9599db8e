"""When a tier that does not answer is asked."""

from __future__ import annotations

import pytest

from kv_tiers.breaker import Breaker


def test_a_breaker_opens_after_failures_in_a_row_and_lets_one_try_through_per_pause():
    breaker = Breaker(2, 5.0)
    breaker.failed(0.0)
    breaker.succeeded()
    breaker.failed(1.0)
    assert breaker.allow(1.0) and not breaker.is_open
    breaker.failed(1.0)
    assert breaker.is_open and not breaker.allow(5.9)
    assert [breaker.allow(6.0), breaker.allow(6.1), breaker.allow(10.9), breaker.allow(11.0)] == [
        True,
        False,
        False,
        True,
    ]
    breaker.failed(12.0)
    assert not breaker.allow(16.9) and breaker.allow(17.0)
    breaker.succeeded()
    assert not breaker.is_open and breaker.allow(17.0)


def test_a_breaker_that_a_smaller_answer_closed_opens_at_the_next_failure():
    breaker = Breaker(3, 5.0)
    breaker.failed(0.0)
    breaker.answers()
    breaker.failed(0.0)
    assert not breaker.is_open, "it was closed, and that changed nothing"
    breaker.failed(0.0)
    breaker.answers()
    assert not breaker.is_open
    breaker.failed(1.0)
    assert breaker.is_open and not breaker.allow(5.9)
    breaker.succeeded()
    breaker.failed(7.0)
    assert not breaker.is_open


@pytest.mark.parametrize(("failures", "pause_s"), [(0, 1.0), (1, 0.0)])
def test_a_breaker_that_could_not_open_or_close_is_refused(failures, pause_s):
    with pytest.raises(ValueError, match="breaker"):
        Breaker(failures, pause_s)
