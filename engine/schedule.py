"""Scheduling decisions, pure: values in, values out. Who prefills how much next, who is admitted, who is preempted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PrefillNeed:
    """A running prefill as the planner sees it: `remaining` tokens from position `start`; lower `order` came first."""

    order: int
    remaining: int
    start: int = 0


def plan_prefill(needs: Sequence[PrefillNeed], budget: int, quantum: int = 1) -> dict[int, int]:
    """Tokens per `order` for the next step, at most `budget` in all, nobody twice.

    The one with the fewest remaining tokens chooses first, up to half of the budget (rounded up), so that a short
    prompt is not stuck behind a long one. The rest, and so at least the other half, goes to the oldest, so that nothing
    starves, and what that one leaves to the next in age.

    A prompt that is not finished by the step stops at a position that is a multiple of `quantum` (at most half of the
    budget, or 1), so its next chunk starts there.
    """
    plan: dict[int, int] = {}
    left = budget
    if not needs:
        return plan
    by_age = sorted(needs, key=lambda need: need.order)
    by_length = sorted(needs, key=lambda need: (need.remaining, need.order))

    def give(need: PrefillNeed, most: int) -> None:
        nonlocal left
        wanted = need.remaining - plan.get(need.order, 0)
        tokens = min(most, wanted, left)
        if tokens < wanted:
            tokens -= (need.start + plan.get(need.order, 0) + tokens) % quantum
        if tokens > 0:
            plan[need.order] = plan.get(need.order, 0) + tokens
            left -= tokens

    # A budget of one token goes to the oldest: endless short prompts must not stop it.
    give(by_length[0], budget - max(1, budget // 2) if len(needs) > 1 else budget)
    for need in by_age:
        give(need, left)
    return plan


@dataclass(frozen=True)
class Waiting:
    """A sequence ready to decode: pages it needs now, rows it takes (one per choice), pages it may grow by soon."""

    pages: int
    rows: int
    headroom: int


def admit(waiting: Iterable[Waiting], free_pages: int, free_rows: int, running: int) -> int:
    """How many of `waiting`, in order, may join now; nothing is read behind the first that may not.

    Each must leave its headroom free, or the next step would preempt it again; when nothing runs, the first needs only
    its own pages, or it could never start.
    """
    count = 0
    for entry in waiting:
        spare = entry.headroom if running or count else 0
        if entry.rows > free_rows or entry.pages + spare > free_pages:
            break
        free_pages -= entry.pages + entry.headroom
        free_rows -= entry.rows
        count += 1
    return count


def preemption_victim(orders: Sequence[int]) -> int:
    """Index of the sequence that gives way when pages run out: the one that came last."""
    assert orders, "nothing runs, so nothing can run out of pages"
    return max(range(len(orders)), key=lambda index: orders[index])
