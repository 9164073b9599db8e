"""The sampler against a slow simulation written from the definitions, and each rule by hand."""

from __future__ import annotations

import hashlib
import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import SamplingParams
from engine.sampler import Sampled, SampleRow, SamplingError, sample, token_logprob, uniform

NO_END: frozenset[int] = frozenset()


def row(
    *,
    choice: int = 0,
    index: int = 0,
    prompt: tuple[int, ...] = (),
    generated: tuple[int, ...] = (),
    **params,
) -> SampleRow:
    return SampleRow(SamplingParams(**params), choice, index, prompt, generated)


def draw(logits, sample_row: SampleRow, end_tokens: frozenset[int] = NO_END) -> int:
    outcome = sample(torch.tensor([logits], dtype=torch.float32), [sample_row], end_tokens)[0]
    assert isinstance(outcome, Sampled), outcome
    return outcome.token_id


def reachable(logits, **params) -> set[int]:
    """Every token that 400 draws of one row give."""
    rows = [row(index=i, **params) for i in range(400)]
    outcomes = sample(torch.tensor(np.tile(logits, (400, 1)), dtype=torch.float32), rows, NO_END)
    return {outcome.token_id for outcome in outcomes}


def simulate(raw: np.ndarray, r: SampleRow, end_tokens: frozenset[int]) -> int:
    """The definition, one token at a time in Python floats."""
    p = r.params
    scores = [float(x) for x in raw]
    for t in range(len(scores)):
        if p.repetition_penalty != 1 and (t in r.prompt or t in r.generated):
            scores[t] = (
                scores[t] / p.repetition_penalty if scores[t] > 0 else scores[t] * p.repetition_penalty
            )
        count = list(r.generated).count(t)
        scores[t] -= p.presence_penalty * (count > 0) + p.frequency_penalty * count
        scores[t] += sum(bias for token, bias in p.logit_bias if token == t)
        ends = t in p.stop_token_ids or (t in end_tokens and not p.ignore_eos)
        scores[t] = -math.inf if ends and r.index < p.min_tokens else float(np.float32(scores[t]))
    order = sorted(range(len(scores)), key=lambda t: (-scores[t], t))
    if p.temperature == 0:
        return order[0]
    if p.top_k:
        order = order[: p.top_k]
    weights = [math.exp((scores[t] - scores[order[0]]) / p.temperature) for t in order]
    nucleus, mass = [], 0.0
    for t, weight in zip(order, weights, strict=True):
        if not nucleus or mass < p.top_p * sum(weights):
            nucleus.append((t, weight))
            mass += weight
    kept = [(t, weight) for t, weight in nucleus if weight >= p.min_p * weights[0] and weight > 0]
    target = uniform(p.seed, r.choice, r.index) * sum(weight for _, weight in kept)
    for t, weight in kept:
        target -= weight
        if target < 0:
            return t
    return kept[-1][0]


def random_row(rng: np.random.Generator, vocabulary: int) -> SampleRow:
    def maybe(value):
        return {} if rng.random() < 0.5 else value

    ids = [int(i) for i in rng.integers(0, vocabulary, 12)]
    params: dict = {"seed": int(rng.integers(0, 2**31)), "temperature": float(rng.choice([0, 0.3, 1, 1.7]))}
    params |= maybe({"top_k": int(rng.integers(1, vocabulary + 3))})
    params |= maybe({"top_p": float(rng.uniform(0, 1))})
    params |= maybe({"min_p": float(rng.uniform(0, 1))})
    params |= maybe({"repetition_penalty": float(rng.uniform(0.5, 2))})
    params |= maybe({"presence_penalty": float(rng.uniform(-2, 2))})
    params |= maybe({"frequency_penalty": float(rng.uniform(-2, 2))})
    params |= maybe({"logit_bias": ((ids[0], float(rng.uniform(-3, 3))), (ids[1], 1.5))})
    params |= maybe({"min_tokens": 4, "stop_token_ids": (ids[2],), "ignore_eos": bool(rng.integers(2))})
    return row(
        choice=int(rng.integers(4)), index=int(rng.integers(8)), prompt=ids[3:7], generated=ids[7:], **params
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_rows_draw_what_the_simulation_draws(dtype):
    rng = np.random.default_rng(7)
    for vocabulary in (16, 33, 61):
        # Rounded logits, so that ties are common.
        logits = torch.tensor(np.round(rng.normal(size=(250, vocabulary)) * 3, 1), dtype=dtype)
        rows = [random_row(rng, vocabulary) for _ in range(250)]
        ends = frozenset({0, 5})
        expected = [simulate(raw, r, ends) for raw, r in zip(logits.float().numpy(), rows, strict=True)]
        assert [outcome.token_id for outcome in sample(logits, rows, ends)] == expected


def test_top_k_draws_are_pinned():
    """Taken when every row was sorted whole."""
    rng = np.random.default_rng(11)
    drawn = []
    for vocabulary in (50, 49152):
        for dtype in (torch.float32, torch.bfloat16):
            logits = torch.tensor(np.round(rng.normal(size=(40, vocabulary)) * 3, 1), dtype=dtype)
            few = [1, 5, 40, vocabulary, vocabulary + 9]
            rows = [
                row(
                    choice=i % 3, index=i, prompt=tuple(range(9)), generated=(3, 3, 7), temperature=1.3, seed=i,
                    top_k=few[i % 5], top_p=0.95 if i % 2 else 1.0, frequency_penalty=0.4, repetition_penalty=1.2,
                )
                for i in range(40)
            ]  # fmt: skip
            drawn += [outcome.token_id for outcome in sample(logits, rows, NO_END)]
    assert drawn[:8] == [10, 44, 36, 47, 47, 5, 15, 28]
    digest = hashlib.sha256(np.array(drawn, np.int64).tobytes()).hexdigest()
    assert digest.startswith("2dbb0824a4e758de")


def test_uniform_has_its_pinned_values():
    assert uniform(0, 0, 0) == 0.026209590909182623
    assert uniform(1, 2, 3) == 0.31184127308246046
    assert uniform(-1, 0, 7) == uniform(2**64 - 1, 0, 7) == 0.1945749642067932


def test_uniform_is_uniform_and_its_three_arguments_are_independent():
    draws = np.array([[[uniform(s, c, i) for i in range(24)] for c in range(24)] for s in range(24)])
    assert draws.min() >= 0 and draws.max() < 1
    assert len(np.unique(draws)) == draws.size
    counts = np.histogram(draws, bins=20, range=(0, 1))[0]
    assert ((counts - draws.size / 20) ** 2 / (draws.size / 20)).sum() < 43.8  # chi-square, 19 dof, p = 0.001
    for axis in range(3):
        a, b = draws.take(range(23), axis), draws.take(range(1, 24), axis)
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.04


def test_frequencies_follow_the_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.0, 0.5, -3.0, 2.5])
    n = 4000
    for temperature in (0.7, 1.0, 1.5):
        rows = [row(seed=11, index=i, temperature=temperature) for i in range(n)]
        tokens = [outcome.token_id for outcome in sample(logits.expand(n, -1), rows, NO_END)]
        expected = torch.softmax(logits.double() / temperature, 0).numpy() * n
        statistic = ((np.bincount(tokens, minlength=8) - expected) ** 2 / expected).sum()
        assert statistic < 24.3  # chi-square, 7 dof, p = 0.001


def test_greedy_takes_the_lowest_id_among_ties():
    assert draw([1.0, 3.0, 3.0, 2.0, 3.0], row(temperature=0)) == 1
    assert draw([1.0, 3.0, 3.0, 2.0, 3.0], row(temperature=0, logprobs=1)) == 1
    assert draw([-0.0, 0.0], row(temperature=0)) == 0


def test_a_tiny_temperature_is_greedy_without_a_warning():
    assert draw([1.0, 3.0, 2.999, -5.0], row(temperature=1e-320)) == 1


@pytest.mark.parametrize(
    ("point", "logits", "expected"),
    [
        (0.0, [1.0, 2.0, 2.0], 1),  # likeliest first, ties by lower id
        (0.5, [0.0, 0.0], 1),  # the border belongs to the next token
        (1 - 2.0**-53, [0.0, 0.0, -5000.0], 1),  # never a token of probability zero
        (0.0, [-0.0, 0.0], 0),  # two zeros are a tie
    ],
)
def test_ends_and_borders_of_the_cumulative_distribution(monkeypatch, point, logits, expected):
    monkeypatch.setattr("engine.sampler.uniform", lambda seed, choice, index: point)
    assert draw(logits, row()) == expected


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_generated_tokens():
    penal = {"temperature": 0, "repetition_penalty": 2.0}
    assert draw([3.0, 2.0, 1.0], row(prompt=(0,), **penal)) == 1
    assert draw([3.0, 2.0, 1.6], row(prompt=(0,), generated=(1,), **penal)) == 2
    assert draw([-1.0, -1.5, -9.0], row(generated=(0,), **penal)) == 1
    # Once, however often the token occurs.
    assert draw([3.0, 1.4, 0.0], row(prompt=(0, 0), generated=(0, 0), **penal)) == 0


def test_presence_penalty_counts_once_and_ignores_the_prompt():
    penal = {"temperature": 0, "presence_penalty": 1.5}
    assert draw([3.0, 2.0], row(generated=(0,), **penal)) == 1
    assert draw([3.0, 1.0], row(generated=(0, 0, 0), **penal)) == 0
    assert draw([3.0, 2.0], row(prompt=(0,), **penal)) == 0


def test_frequency_penalty_grows_with_every_occurrence_and_ignores_the_prompt():
    penal = {"temperature": 0, "frequency_penalty": 0.6}
    assert draw([3.0, 2.0], row(generated=(0,), **penal)) == 0
    assert draw([3.0, 2.0], row(generated=(0, 0), **penal)) == 1
    assert draw([3.0, 2.0], row(prompt=(0, 0), **penal)) == 0


def test_logit_bias_of_100_forces_and_of_minus_100_bans():
    logits = [5.0, 4.0, 3.0, 2.0]
    assert reachable(logits, logit_bias=((3, 100.0),)) == {3}
    assert reachable(logits, logit_bias=((0, -100.0), (1, -100.0))) == {2, 3}
    assert draw(logits, row(temperature=0, logit_bias=((0, -100.0),))) == 1


def test_min_tokens_masks_end_tokens_and_stop_ids_until_reached():
    logits, ends = [9.0, 8.0, 7.0, 1.0], frozenset({0})
    early = row(temperature=0, min_tokens=3, stop_token_ids=(1,), index=2)
    assert draw(logits, early, ends) == 2
    assert draw(logits, replace(early, index=3), ends) == 0
    # With ignore_eos, an end token ends nothing and is an ordinary token.
    assert draw(logits, replace(early, params=replace(early.params, ignore_eos=True)), ends) == 0
    # Not even a bias brings it back, and ids beyond the vocabulary do no harm.
    forced = replace(early.params, logit_bias=((0, 100.0),), stop_token_ids=(1, 4, 10**6))
    assert draw(logits, replace(early, params=forced), ends) == 2


def test_top_p_keeps_the_smallest_set_that_reaches_it_and_at_least_one_token():
    logits = np.log([0.5, 0.25, 0.125, 0.125])
    assert reachable(logits, top_p=0.0) == {0}
    assert reachable(logits, top_p=0.4999) == {0}
    assert reachable(logits, top_p=0.51) == {0, 1}
    assert reachable(logits, top_p=0.76) == {0, 1, 2}  # of equal tokens the lower id comes first
    assert reachable(logits, top_p=1.0) == {0, 1, 2, 3}
    assert reachable([0.0] * 4, top_p=0.5) == {0, 1}  # reached exactly


def test_top_k_precedes_top_p_and_keeps_the_lower_of_tied_ids():
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert reachable(logits, top_k=1) == {0}
    assert reachable(logits, top_k=100) == {0, 1, 2, 3}
    assert reachable(logits, top_k=2, top_p=0.55) == {0}  # 0.4 of 0.7 is more than 0.55
    assert reachable([1.0, 1.0, 1.0, 1.0], top_k=2) == {0, 1}


def test_min_p_is_relative_to_the_likeliest_token_after_temperature():
    logits = np.log([0.5, 0.2, 0.1, 0.05])
    assert reachable(logits, min_p=0.39) == {0, 1}
    assert reachable(logits, min_p=0.41) == {0}
    assert reachable(logits, min_p=1.0) == {0}
    assert reachable(logits, min_p=0.41, temperature=2.0) == {0, 1, 2}


def test_logprobs_are_those_of_the_raw_logits():
    raw = np.array([1.0, 2.0, 2.0, -np.inf, 0.5, 3.0], dtype=np.float32)
    penalised = row(
        temperature=0.2, logprobs=4, logit_bias=((4, 100.0),), presence_penalty=1.0, generated=(5,)
    )
    outcome = sample(torch.from_numpy(raw)[None], [penalised], NO_END)[0]
    exact = torch.log_softmax(torch.from_numpy(raw).double(), 0)
    assert outcome.token_id == outcome.logprob.token_id == 4
    assert outcome.logprob.logprob == pytest.approx(float(exact[4]), abs=1e-6)
    assert [token for token, _ in outcome.logprob.top] == [5, 1, 2, 0]  # best first, ties by lower id
    assert [p for _, p in outcome.logprob.top] == pytest.approx(exact[[5, 1, 2, 0]].tolist(), abs=1e-6)
    assert token_logprob(raw, 5, 0).top == ()
    assert [token for token, _ in token_logprob(raw, 5, 50).top] == [
        5,
        1,
        2,
        0,
        4,
    ]  # the excluded one is left out


def test_choices_and_token_indices_draw_independently_and_replay_draws_the_same():
    logits = torch.zeros(1, 1000).expand(8, -1)
    by_choice = [row(seed=3, choice=c, index=5) for c in range(8)]
    by_index = [row(seed=3, choice=0, index=i) for i in range(8)]
    first = [outcome.token_id for outcome in sample(logits, by_choice, NO_END)]
    second = [outcome.token_id for outcome in sample(logits, by_index, NO_END)]
    assert len(set(first)) > 6 and len(set(second)) > 6
    assert [outcome.token_id for outcome in sample(logits, by_choice, NO_END)] == first


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(0, 2**32 - 1), st.sampled_from([50, 257, 4099]))
def test_an_outcome_does_not_depend_on_the_other_rows_nor_on_their_order(random, seed, vocabulary):
    rng = np.random.default_rng(seed)
    logits = torch.tensor(rng.normal(size=(9, vocabulary)) * 4, dtype=torch.float32)
    rows = [random_row(rng, 50) for _ in range(9)]
    rows = [replace(r, params=replace(r.params, logprobs=random.choice([None, 0, 5]))) for r in rows]
    ends = frozenset({0})
    alone = [sample(logits[i : i + 1], [rows[i]], ends)[0] for i in range(9)]
    order = random.sample(range(9), random.randint(1, 9))
    assert sample(logits[order], [rows[i] for i in order], ends) == [alone[i] for i in order]


def test_a_row_does_not_depend_on_the_number_of_threads():
    logits = torch.randn(5, 49152, generator=torch.Generator().manual_seed(1)) * 3
    rows = [row(index=i, top_p=0.95, logprobs=5) for i in range(5)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = sample(logits, rows, NO_END)
        torch.set_num_threads(4)
        assert sample(logits, rows, NO_END) == one
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 0, "logprobs": 2}]
)
@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ([1.0, math.nan, 2.0], "logits contain NaN"),
        ([math.inf, 0.0, math.nan], "logits contain NaN"),
        ([1.0, math.inf, 2.0], "logits contain +inf"),
        ([-math.inf] * 3, "every logit is -inf"),
    ],
)
def test_a_bad_row_gets_an_error_and_the_others_get_their_tokens(params, bad, reason):
    good = [0.0, 50.0, -math.inf]
    outcomes = sample(torch.tensor([good, bad, good]), [row(**params)] * 3, NO_END)
    assert [outcome.token_id for outcome in (outcomes[0], outcomes[2])] == [1, 1]
    error = outcomes[1]
    assert isinstance(error, SamplingError) and isinstance(error, ValueError)
    assert (error.row, error.reason, str(error)) == (1, reason, f"row 1: {reason}")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_row_with_nothing_left_or_a_bias_out_of_range_gets_an_error_of_its_own():
    nothing = row(min_tokens=1, stop_token_ids=(0, 1, 2))
    beyond = row(temperature=0, logit_bias=((3, 1.0),))
    below = row(temperature=0, logit_bias=((-1, 1.0),))
    outcomes = sample(torch.zeros(4, 3), [nothing, beyond, row(temperature=0), below], NO_END)
    assert "leave no token" in str(outcomes[0])
    assert "logit_bias names token 3" in str(outcomes[1])
    assert outcomes[2] == Sampled(0)
    assert "logit_bias names token -1" in str(outcomes[3])


def test_logits_are_left_as_they_were():
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
    before = logits.clone()
    penalised = {"logit_bias": ((1, 100.0),), "repetition_penalty": 1.3, "prompt": (1, 2), "generated": (3,)}
    sample(logits, [row(temperature=0), row(**penalised), row(temperature=0, logprobs=2)], NO_END)
    assert torch.equal(logits, before)
