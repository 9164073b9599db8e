"""Attention mass of every implementation's decode attention against the float64 reference.

Unused slots of the pool and every entry of the mass start as NaN, so that reading the one or missing the other shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from paged_batches import KV_HEADS, LENGTHS, Batch, implementation, make_batch

from kernels import ops, reference
from kernels.ops import Kernels
from kernels.reference import GROUP_MAX, GROUP_MEAN, UNOBSERVED

MIXED = [GROUP_MEAN, UNOBSERVED, GROUP_MAX, GROUP_MAX, GROUP_MEAN, UNOBSERVED]
# Of each single entry, in both dtypes: mass comes from fp32 logits, which are that exact for bf16 inputs too.
RELATIVE = 2e-5
LEAD, TRAIL = 3, 5  # entries of a mass buffer around the slots that the kernel is given


@pytest.fixture(params=["native", "portable", "torch"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return implementation(request.param)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Observed(NamedTuple):
    """What one call returned, and the whole buffer that its mass is a strided part of."""

    out: torch.Tensor
    lse: torch.Tensor
    buffer: torch.Tensor

    @property
    def mass(self) -> torch.Tensor:
        """Slots [B,Hk,M], NaN where nothing was written."""
        return inner(self.buffer)


def inner(buffer: torch.Tensor) -> torch.Tensor:
    return buffer[:, 1 : 1 + KV_HEADS, LEAD:-TRAIL]


def codes_of(codes: list[int]) -> torch.Tensor:
    return torch.tensor(codes, dtype=torch.int32)


def longest(batch: Batch, codes: list[int]) -> int:
    """The slots that the mass must hold: those of the longest observed head."""
    return max(max(LENGTHS[row]) for row, code in zip(batch.rows.tolist(), codes, strict=True) if code)


def observe(
    kernels: Kernels, batch: Batch, codes: list[int], softcap: float = 0.0, sinks: torch.Tensor | None = None
) -> Observed:
    buffer = torch.full((len(codes), KV_HEADS + 2, LEAD + longest(batch, codes) + TRAIL), torch.nan)
    out, lse = kernels.paged_decode_attention(
        *batch, softcap=softcap, sinks=sinks, mass=inner(buffer), reduce=codes_of(codes)
    )
    return Observed(out, lse, buffer)


def written(batch: Batch, codes: list[int], shape: torch.Size) -> torch.Tensor:
    """Which entries of a mass buffer the kernel owns: those of the observed sequences' slots."""
    mask = torch.zeros(shape, dtype=torch.bool)
    for b, row in enumerate(batch.rows.tolist()):
        for head in range(KV_HEADS):
            if codes[b]:
                inner(mask)[b, head, int(batch.starts[row]) : LENGTHS[row][head]] = True
    return mask


def assert_same_mass(found: Observed, wanted: Observed, relative: float = RELATIVE) -> None:
    assert torch.equal(found.buffer.isnan(), wanted.buffer.isnan())
    torch.testing.assert_close(found.buffer, wanted.buffer, rtol=relative, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("codes", [MIXED, MIXED[1:] + MIXED[:1], MIXED[2:] + MIXED[:2], [GROUP_MEAN] * 6])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mass_matches_the_reference_in_batches_of_mixed_reductions(
    kernels: Kernels, dtype: torch.dtype, group: int, codes: list[int]
) -> None:
    batch = make_batch(dtype, 32, group, 1, started=True)
    found = observe(kernels, batch, codes)
    assert torch.equal(~found.buffer.isnan(), written(batch, codes, found.buffer.shape))
    assert_same_mass(found, observe(reference, batch, codes))


@pytest.mark.parametrize("head_dim", [64, 65, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mass_matches_the_reference_without_a_start(
    kernels: Kernels, dtype: torch.dtype, head_dim: int
) -> None:
    batch = make_batch(dtype, head_dim, 3)
    assert_same_mass(observe(kernels, batch, MIXED), observe(reference, batch, MIXED))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softcap_and_sinks_count_in_the_mass(kernels: Kernels, dtype: torch.dtype) -> None:
    batch = make_batch(dtype, 64, 4)
    sinks = torch.linspace(-3, 8, 4 * KV_HEADS)
    wanted = observe(reference, batch, MIXED, 2.0, sinks)
    assert_same_mass(observe(kernels, batch, MIXED, 2.0, sinks), wanted)
    for other in (observe(reference, batch, MIXED, 2.0), observe(reference, batch, MIXED, 0.0, sinks)):
        assert not torch.allclose(wanted.mass, other.mass, rtol=0.05, atol=0, equal_nan=True)


@pytest.mark.parametrize("code", [GROUP_MEAN, GROUP_MAX])
def test_the_reference_is_the_softmax_of_the_canonical_rows(code: int) -> None:
    batch = make_batch(torch.float32, 64, 3)
    sinks = torch.linspace(-1, 2, 3 * KV_HEADS)
    row, length = 3, LENGTHS[3][1]
    at = batch.rows.tolist().index(row)
    k, v = torch.empty(2, length, 64)
    reference.gather(batch.pool, batch.layout, batch.tables[row, 1], 0, length, k, v)
    logits = batch.q[at, 3:] @ k.T / 8
    probabilities = torch.softmax(torch.cat([logits, sinks[3:, None]], dim=1), dim=1)[:, :length]
    wanted = probabilities.mean(dim=0) if code == GROUP_MEAN else probabilities.max(dim=0).values
    codes = [code if b == at else UNOBSERVED for b in range(len(LENGTHS))]
    torch.testing.assert_close(observe(reference, batch, codes, sinks=sinks).mass[at, 1], wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_observing_changes_no_bit_of_the_attention(kernels: Kernels, dtype: torch.dtype) -> None:
    for group in (1, 3, 8):
        batch = make_batch(dtype, 64, group, started=True)
        out, lse = kernels.paged_decode_attention(*batch)
        for codes in (MIXED, [GROUP_MEAN] * 6, [GROUP_MAX] * 6):
            found = observe(kernels, batch, codes)
            assert torch.equal(found.out, out) and torch.equal(found.lse, lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_gets_the_same_mass_alone_and_in_any_batch(kernels: Kernels, dtype: torch.dtype) -> None:
    batch = make_batch(dtype, 64, 3, started=True)
    together = observe(kernels, batch, MIXED)
    for b, row in enumerate(batch.rows.tolist()):
        if MIXED[b] == UNOBSERVED:
            continue
        one = batch._replace(q=batch.q[b : b + 1], rows=batch.rows[b : b + 1])
        alone = observe(kernels, one, MIXED[b : b + 1])
        for head, stop in enumerate(LENGTHS[row]):
            span = slice(int(batch.starts[row]), stop)
            assert torch.equal(alone.mass[0, head, span], together.mass[b, head, span])


@pytest.mark.parametrize("name", ["native", "portable"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_changes_no_bit_of_the_mass(name: str, dtype: torch.dtype) -> None:
    batch = make_batch(dtype, 64, 3, started=True)
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(observe(implementation(name), batch, MIXED).buffer.view(torch.int32))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_nothing_of_an_earlier_call_reaches_the_mass(kernels: Kernels) -> None:
    batch = make_batch(torch.float32, 64, 3, started=True)
    codes = [GROUP_MAX] * len(LENGTHS)
    wanted = observe(kernels, batch, codes)
    poisoned = observe(kernels, batch._replace(q=torch.full_like(batch.q, torch.nan)), codes)
    assert bool(poisoned.buffer.isnan().all())
    assert_same_mass(observe(kernels, batch, codes), wanted, relative=0.0)


def test_mass_of_huge_logits_does_not_overflow(kernels: Kernels) -> None:
    batch = make_batch(torch.float32, 64, 3)._replace(scale=100.0)
    found, wanted = observe(kernels, batch, MIXED), observe(reference, batch, MIXED)
    # Logits near 5000 carry a rounding of 2.4e-4 each, and weights the exponential of it.
    torch.testing.assert_close(found.mass, wanted.mass, rtol=0, atol=2e-3, equal_nan=True)


def test_the_chosen_implementation_is_asked_for_the_mass() -> None:
    batch = make_batch(torch.float32, 32, 3, 1, started=True)
    mass = torch.full((len(LENGTHS), KV_HEADS, 2049), torch.nan)
    out, lse = ops.paged_decode_attention(*batch, mass=mass, reduce=codes_of(MIXED))
    wanted = observe(reference, batch, MIXED)
    filled = wanted.mass.shape[2]
    torch.testing.assert_close(mass[:, :, :filled], wanted.mass, rtol=RELATIVE, atol=1e-12, equal_nan=True)
    torch.testing.assert_close((out, lse), (wanted.out, wanted.lse))


@pytest.mark.parametrize("name", ["native", "portable", "torch", "reference"])
def test_mass_that_does_not_fit_and_unknown_reductions_are_our_mistake(name: str) -> None:
    kernels = reference if name == "reference" else implementation(name)
    batch = make_batch(torch.float32, 64, 3)
    mass, reduce = torch.zeros(6, KV_HEADS, 2049), codes_of([GROUP_MEAN] * 6)
    wrong: list[dict[str, torch.Tensor]] = [
        {"mass": mass},
        {"reduce": reduce},
        {"mass": mass[:, :, :2048], "reduce": reduce},
        {"mass": mass, "reduce": codes_of([GROUP_MEAN, GROUP_MAX, 0, 3, 0, 0])},
        {"mass": mass, "reduce": codes_of([GROUP_MEAN, GROUP_MAX, 0, -1, 0, 0])},
        {"mass": mass, "reduce": reduce.long()},
        {"mass": mass, "reduce": reduce[:5]},
        {"mass": mass[:5], "reduce": reduce},
        {"mass": mass[:, :1], "reduce": reduce},
        {"mass": mass.double(), "reduce": reduce},
        {"mass": torch.zeros(6, 2049, KV_HEADS).transpose(1, 2), "reduce": reduce},
    ]
    kernels.paged_decode_attention(*batch, mass=mass, reduce=reduce)
    for arguments in wrong:
        with pytest.raises(AssertionError):
            kernels.paged_decode_attention(*batch, **arguments)
