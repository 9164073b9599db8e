"""Old objects are not looked at again and again, and no garbage stays for ever."""

from __future__ import annotations

import gc
import weakref

import pytest

from deployments.node_garbage import ALL_S, OldObjects


class Knot:
    """In a cycle with itself: only a collector ends it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def as_before():
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def test_what_survives_is_set_aside_and_young_garbage_is_not():
    old = OldObjects()
    old.set_aside()
    before = gc.get_freeze_count()
    kept, garbage = [Knot() for _ in range(1_000)], Knot()
    gone = weakref.ref(garbage)
    del garbage
    old.set_aside()
    assert gone() is None
    assert gc.get_freeze_count() - before >= 900
    assert len(gc.get_objects()) < 1_000, "what the next collection looks at"
    del kept


def test_garbage_among_the_old_goes_within_the_hour():
    now = [0.0]
    old = OldObjects(lambda: now[0])
    knot = Knot()
    gone = weakref.ref(knot)
    old.set_aside()
    del knot
    now[0] = ALL_S - 1
    old.set_aside()
    assert gone() is not None
    now[0] = ALL_S
    old.set_aside()
    assert gone() is None
