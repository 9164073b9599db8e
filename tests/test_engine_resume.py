"""A sequence goes on elsewhere, from a snapshot or by replay, as if nothing had happened: tokens, text and finish."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest
import resume_peer
import tiny_models
from resume_peer import FAMILY, byte_pieces, finish, plain, raw
from tiny_models import one_thread, request, snapkv, tiny, tokens_of  # noqa: F401

from engine.batch import DecodeEngine
from engine.request import FinishReason
from engine.sampler import Sampled
from engine.sequence import Choice
from policies import make_recipe

MODEL = tiny(FAMILY).model
REPOSITORY = Path(__file__).parent.parent

FORGETFUL = make_recipe(policy="h2o", budget=20, decode={"rule": "h2o", "every": 4})
ENDLESS = make_recipe(decode={"rule": "streaming_llm", "budget": 24}, positions="slot")

ASKED = request(
    "asked", tokens_of(90, 3), snapkv(30), n=2, temperature=1.0, seed=18, frequency_penalty=0.6,
    repetition_penalty=1.1, max_tokens=36,
)  # fmt: skip
OTHERS = [
    request("greedy", tokens_of(50, 1), snapkv(20), max_tokens=20),
    request("full", tokens_of(33, 5), temperature=0.7, top_p=0.9, seed=8, max_tokens=30),
    request("three", tokens_of(70, 8), snapkv(40), n=3, temperature=1.0, seed=2, top_k=20, max_tokens=24),
    request("forgets", tokens_of(44, 9), FORGETFUL, n=2, temperature=1.0, seed=4, max_tokens=30),
    request("endless", tokens_of(40, 10), ENDLESS, temperature=1.0, seed=6, max_tokens=30),
]


def first_choices(done, generated=()):
    """A finished prompt's choices and their first events; with `generated` ids of each, as they are made anew."""
    wanted = done.job.request
    ends = MODEL.spec.end_tokens
    if generated:
        return [Choice(wanted, i, byte_pieces(), ends, ids) for i, ids in enumerate(generated)], []
    choices = [Choice(wanted, i, byte_pieces(), ends) for i in range(wanted.sampling.n)]
    return choices, [choice.accept(first) for choice, first in zip(choices, done.first, strict=True)]


def uninterrupted(done):
    """All events of each choice of one request, alone in an engine."""
    choices, firsts = first_choices(done)
    engine = DecodeEngine(MODEL, tiny_models.new_pool(MODEL))
    engine.add(choices, done.layout, tiny_models.packed(done))
    later = finish(engine)
    name = done.job.request.request_id
    return [[plain(first), *later.get(f"{name}/{first.choice}", [])] for first in firsts]


def ids(events):
    return [token for _, token, _, _ in events]


def text(events):
    return "".join(part for _, _, part, _ in events)


@pytest.fixture(scope="module")
def prompts():
    return tiny_models.prefill_all(MODEL, [ASKED, *OTHERS])


@pytest.fixture(scope="module")
def expected(prompts):
    return {name: uninterrupted(done) for name, done in prompts.items()}


def with_stop(done, events):
    """The request, with a stop string that the first choice meets late, over several tokens."""
    whole = text(events)
    for start in range(len(whole) // 2, len(whole) - 3):
        stop = whole[start : start + 3]
        if whole.index(stop) == start and "\ufffd" not in stop and not stop.isascii():
            sampling = replace(done.job.request.sampling, stop=(stop,))
            done.job.request = replace(done.job.request, sampling=sampling)
            return done
    raise AssertionError("no stop string to be had from this text")


def test_a_sequence_goes_on_in_another_process_from_a_snapshot_and_by_replay(tmp_path, expected):
    done = with_stop(tiny_models.prefill_all(MODEL, [ASKED])["asked"], expected["asked"][0])
    wanted = uninterrupted(done)
    assert wanted[0][-1][3] is FinishReason.STOP and len(wanted[0]) < ASKED.sampling.max_tokens
    sampling = asdict(done.job.request.sampling)
    (tmp_path / "prompt").write_bytes(tiny_models.packed(done).numpy().tobytes())
    jobs, cuts = [], {}

    def job(kind, choice, cut, file):
        name = f"{kind} {choice} {cut}"
        generated = ids(wanted[choice])[:cut]
        jobs.append([name, file, ASKED.prompt, sampling, choice, generated])
        cuts[f"{name}/{choice}"] = (choice, cut)

    for choice in range(2):
        for cut in range(1, len(wanted[choice]), 2):
            job("replay", choice, cut, "prompt")
    for cut in range(2, len(wanted[0])):
        engine = DecodeEngine(MODEL, tiny_models.new_pool(MODEL))
        engine.add(first_choices(done)[0], done.layout, tiny_models.packed(done))
        for _ in range(cut - 1):
            engine.step()
        taken = engine.take_out("asked", 0)
        assert taken.choice.generated == ids(wanted[0])[:cut]
        engine.check()
        (tmp_path / f"taken{cut}").write_bytes(taken.buffer.numpy().tobytes())
        job("taken", 0, cut, f"taken{cut}")
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    peer = subprocess.run(
        [sys.executable, resume_peer.__file__, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        check=False,
    )
    assert peer.returncode == 0, peer.stderr
    found = json.loads(peer.stdout)
    assert found.keys() == cuts.keys()
    for name, (choice, cut) in cuts.items():
        assert [tuple(event) for event in found[name]] == wanted[choice][cut:], name
    assert_hard_places_were_cut(sampling["stop"][0], wanted[0])


def assert_hard_places_were_cut(stop, events):
    """One of the cuts is within the stop string and within a character, at once."""
    parts = [raw(ids(events)[:cut]) for cut in range(2, len(events))]
    assert any(
        part[-1] >= 0xC2 and part.decode(errors="ignore").endswith((stop[:1], stop[:2])) for part in parts
    )


@pytest.mark.parametrize("pages", [2000, 150])
@pytest.mark.parametrize("cut", [2, 9, 17])
def test_replays_run_in_company_and_are_preempted_without_a_gap_or_a_repeat(prompts, expected, pages, cut):
    engine = DecodeEngine(MODEL, tiny_models.new_pool(MODEL, pages, rows=12))
    choices = {}
    for name, done in prompts.items():
        cuts = [min(cut + i, len(events) - 1) for i, events in enumerate(expected[name])]
        if name == "full":
            cuts = [1]  # one that is not replayed at all
        known = [ids(events)[:at] for events, at in zip(expected[name], cuts, strict=True)]
        choices[name], _ = first_choices(done, known)
        engine.add(choices[name], done.layout, tiny_models.packed(done))
    starts = {f"{n}/{c.choice}": len(c.generated) for n, own in choices.items() for c in own}
    found = {key: [] for key in starts}
    step = 0
    while not engine.idle:
        for result in engine.step():
            for event in result.events:
                found[f"{result.request_id}/{event.choice}"].append(plain(event))
        engine.check()
        if engine.running and step % 2 == 0:
            engine.preempt(step % engine.running)
            engine.check()
        step += 1
    for key, start in starts.items():
        name, choice = key.split("/")
        assert found[key] == expected[name][int(choice)][start:], key
    assert engine.preemptions > 10 and engine.use.used == 0


def test_replayed_steps_give_no_results(prompts, expected):
    known = [ids(events)[:10] for events in expected["asked"]]
    engine = DecodeEngine(MODEL, tiny_models.new_pool(MODEL))
    engine.add(
        first_choices(prompts["asked"], known)[0],
        prompts["asked"].layout,
        tiny_models.packed(prompts["asked"]),
    )
    assert [engine.step() for _ in range(9)] == [[]] * 9
    (result,) = engine.step()
    assert [(event.choice, event.index) for event in result.events] == [(0, 10), (1, 10)]


def test_an_abort_in_the_middle_of_a_replay_frees_everything(prompts, expected):
    known = [ids(events)[:10] for events in expected["asked"]]
    released = []
    engine = DecodeEngine(MODEL, tiny_models.new_pool(MODEL))
    for name in ("asked", "greedy"):
        own = first_choices(prompts[name], known if name == "asked" else ())[0]
        engine.add(
            own,
            prompts[name].layout,
            tiny_models.packed(prompts[name]),
            lambda name=name: released.append(name),
        )
    for _ in range(4):
        engine.step()
    engine.preempt(0)
    engine.abort("asked")
    assert finish(engine)["greedy/0"] == expected["greedy"][0][5:]
    assert released == ["asked", "greedy"]


@pytest.mark.parametrize("steps", [0, 3, 14])
def test_choices_move_between_engines_while_they_wait_replay_or_run(prompts, expected, steps):
    """After 0 steps they wait, after 3 they replay, after 14 they run."""
    done, released = prompts["three"], []
    known = [ids(events)[:8] for events in expected["three"]]
    source, target = (DecodeEngine(MODEL, tiny_models.new_pool(MODEL)) for _ in range(2))
    source.add(
        first_choices(done, known)[0], done.layout, tiny_models.packed(done), lambda: released.append(1)
    )
    early = {}
    for _ in range(steps):
        for result in source.step():
            for event in result.events:
                early.setdefault(event.choice, []).append(plain(event))
    for choice in (1, 0, 2):
        taken = source.take_out("three", choice)
        source.check()
        target.add([taken.choice], taken.layout, taken.buffer)
        with pytest.raises(LookupError, match="three"):
            source.take_out("three", choice)
    assert source.idle and source.use.used == 0 and released == [1]
    found = finish(target)
    for choice, events in enumerate(expected["three"]):
        assert early.get(choice, []) + found[f"three/{choice}"] == events[8:]


def test_a_choice_made_anew_is_where_it_was(expected):
    """Finished or not, with the same text still to come, for every number of known tokens."""
    events = expected["asked"][0]
    whole = text(events)
    place = len(whole) // 2
    for more in (
        {},
        {"stop": (whole[place : place + 3],)},
        {"stop_token_ids": (events[20][1],)},
        {"min_tokens": 9},
    ):
        wanted = replace(ASKED, sampling=replace(ASKED.sampling, max_tokens=30, **more))
        old = Choice(wanted, 0, byte_pieces(), frozenset())
        tokens = ids(events)[:30]
        for at, token in enumerate(tokens):
            old_event = plain(old.accept(Sampled(token)))
            new = Choice(wanted, 0, byte_pieces(), frozenset(), tokens[: at + 1])
            assert (new.generated, new.finish_reason) == (tokens[: at + 1], old.finish_reason)
            before = Choice(wanted, 0, byte_pieces(), frozenset(), tokens[:at])
            assert plain(before.accept(Sampled(token))) == old_event
            if old.finish_reason is not None:
                break
        assert old.finish_reason is (FinishReason.STOP if "stop" in str(more) else FinishReason.LENGTH)


@pytest.mark.parametrize("name", ["forgets", "endless"])
def test_a_sequence_that_evicts_moves_in_the_middle_of_a_replay_and_after_it(prompts, expected, name):
    done = prompts[name]
    known = [ids(events)[:14] for events in expected[name]]
    engines = [DecodeEngine(MODEL, tiny_models.new_pool(MODEL)) for _ in range(4)]
    engines[0].add(first_choices(done, known)[0], done.layout, tiny_models.packed(done))
    found = {}
    for source, target in pairwise(engines):
        for _ in range(7):
            for result in source.step():
                for event in result.events:
                    found.setdefault(f"{name}/{event.choice}", []).append(plain(event))
        for choice in range(len(known)):
            taken = source.take_out(name, choice)
            target.add([taken.choice], taken.layout, taken.buffer)
        source.check()
        assert source.idle and source.use.used == 0
    for key, events in finish(engines[-1]).items():
        assert found[key] + events == expected[name][int(key[-1])][14:]


def test_a_snapshot_of_another_recipe_is_our_own_mistake(prompts):
    done = prompts["forgets"]
    wanted = replace(done.job.request, recipe=ENDLESS)
    choice = Choice(wanted, 0, byte_pieces(), frozenset(), [5])
    with pytest.raises(AssertionError, match="another recipe"):
        DecodeEngine(MODEL, tiny_models.new_pool(MODEL)).add([choice], done.layout, tiny_models.packed(done))


def test_a_snapshot_of_another_text_is_our_own_mistake(prompts, expected):
    engine = DecodeEngine(MODEL, tiny_models.new_pool(MODEL))
    engine.add(
        first_choices(prompts["greedy"])[0], prompts["greedy"].layout, tiny_models.packed(prompts["greedy"])
    )
    for _ in range(5):
        engine.step()
    choice, layout, buffer = engine.take_out("greedy", 0)
    choice.generated[2] += 1
    with pytest.raises(AssertionError, match="another text"):
        engine.add([choice], layout, buffer)
    with pytest.raises(AssertionError, match="next input"):
        engine.add([Choice(OTHERS[0], 0, byte_pieces(), frozenset())], layout, buffer)
