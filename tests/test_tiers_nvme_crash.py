"""CASES O-24: a process killed at any write of the NVMe tier, and what the next one finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from nvme_crash import CALLS, NEW, OLD, SLOTS, WAYS
from nvme_stand import nbytes_for

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def deaths(tmp_path_factory):
    """What was found after a SIGKILL at each write of each call."""
    done = subprocess.run(
        [sys.executable, str(HERE / "nvme_crash.py"), str(tmp_path_factory.mktemp("crash"))],
        env={**os.environ, "PYTHONPATH": f"{HERE.parent}{os.pathsep}{HERE}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def of(deaths, call, way):
    return [death for death in deaths if (death["call"], death["way"]) == (call, way)]


def test_o24_after_a_kill_at_any_write_whole_blocks_are_served_and_nothing_else_is_left(deaths):
    assert {(death["call"], death["way"]) for death in deaths} == {
        (call, way) for call in CALLS for way in WAYS
    }
    for death in deaths:
        assert set(death["old"] + death["new"]) <= {"HIT", "MISS"}, "what is torn is not even listed"
        assert death["equal"] and death["listed_are_served"]
        assert set(death["again"]) <= {"STORED", "PRESENT"}
        assert death["recreated"] == 0
        assert death["folder"] == ["tier.kvnvme"] and death["size"] == nbytes_for(SLOTS)


def test_o24_a_put_touches_only_the_blocks_it_evicts_and_is_whole_or_absent_per_block(deaths):
    before, torn, after = (of(deaths, "put", way) for way in WAYS)
    assert len(before) == len(torn) == len(after) == 1 + len(NEW) + 1  # records voided, blocks, records
    spared = len(OLD) - len(NEW)
    for death in [*before, *torn, *after]:
        assert death["old"][:spared] == ["HIT"] * spared
    assert before[0]["old"] == ["HIT"] * len(OLD)
    for death in [*after[:-1], *before[1:], *torn[1:-1]]:
        assert death["old"][spared:] == death["new"] == ["MISS"] * len(NEW)
    assert after[-1]["new"] == ["HIT"] * len(NEW)


def test_o24_a_drop_or_clear_may_be_forgotten_but_never_half_a_block(deaths):
    assert of(deaths, "drop", "before")[0]["old"] == ["HIT"] * len(OLD)
    dropped = ["MISS" if index % 7 == 0 else "HIT" for index in range(len(OLD))]
    assert of(deaths, "drop", "after")[-1]["old"] == dropped
    assert of(deaths, "clear", "after")[-1]["old"] == ["MISS"] * len(OLD)
