"""Prefill attention in all its forms against a float64 softmax written out."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import one_thread  # noqa: F401
from torch import Tensor

from engine.attention import Attended, AttentionCall, causal_attention, kvtide_attention
from engine.errors import UnsupportedModel

# Largest error over the largest value; bf16 rounds weights and results to 8 bits.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)
# Absolute, beside logits of up to some 50.
LSE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}


def explicit(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, start: int) -> Attended:
    """Softmax attention, one query at a time, with nothing clever in it; float64."""
    heads, length, _ = query.shape
    group = heads // key.shape[0]
    out = torch.empty(query.shape, dtype=torch.float64)
    lse = torch.empty(heads, length, dtype=torch.float64)
    for head in range(heads):
        k, v = key[head // group].double(), value[head // group].double()
        for t in range(length):
            place = start + t
            first = 0 if call.window is None else max(0, place - call.window + 1)
            logits = k[first : place + 1] @ query[head, t].double() * call.scale
            if call.softcap:
                logits = call.softcap * torch.tanh(logits / call.softcap)
            if call.sinks is not None:
                logits = torch.cat([logits, call.sinks[head : head + 1].double()])
            lse[head, t] = torch.logsumexp(logits, 0)
            weights = torch.softmax(logits, 0)[: place + 1 - first]
            out[head, t] = weights @ v[first : place + 1]
    return Attended(out, lse)


class Case(NamedTuple):
    """Arguments of causal_attention."""

    call: AttentionCall
    query: Tensor
    key: Tensor
    value: Tensor
    start: int


def make_case(
    dtype: torch.dtype = torch.float32,
    *,
    start: int = 0,
    length: int = 9,
    kv_heads: int = 2,
    group: int = 3,
    dim: int = 16,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: bool = False,
    seed: int = 0,
) -> Case:
    random = torch.Generator().manual_seed(seed)
    query = torch.randn(kv_heads * group, length, dim, generator=random).mul(2).to(dtype)
    # Longer storage than is used, as in a workspace: the views are not contiguous.
    key, value = torch.randn(2, kv_heads, start + length + 5, dim, generator=random).to(dtype)
    logits = torch.randn(kv_heads * group, generator=random).mul(2).to(dtype) if sinks else None
    call = AttentionCall(0, 1.3 * dim**-0.5, window, softcap, logits)
    return Case(call, query, key[:, : start + length], value[:, : start + length], start)


def check(case: Case) -> None:
    (found, lse), wanted = causal_attention(*case), explicit(*case)
    assert found.dtype is case.query.dtype and found.shape == case.query.shape
    error = (found.double() - wanted.out).abs().max() / wanted.out.abs().max()
    assert float(error) < TOLERANCE[found.dtype], (float(error), case.call)
    assert lse.dtype is torch.float32
    torch.testing.assert_close(lse.double(), wanted.lse, atol=LSE_TOLERANCE[found.dtype], rtol=1e-5)


@settings(max_examples=120, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    start=st.one_of(st.just(0), st.integers(1, 70)),
    length=st.integers(1, 40),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 7]),
    dim=st.sampled_from([8, 16, 24, 64, 65]),
    window=st.one_of(st.none(), st.integers(1, 90)),
    softcap=st.sampled_from([0.0, 0.0, 1.5, 30.0]),
    sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape_equals_the_written_out_softmax(dtype, seed, **shape):
    check(make_case(dtype, seed=seed, **shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [0, 37])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("window", [None, 33])
def test_more_queries_than_one_piece_holds(dtype, start, softcap, window):
    check(make_case(dtype, start=start, length=300, kv_heads=1, group=2, window=window, softcap=softcap))


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_sinks_take_their_share_of_every_form(window, softcap):
    case = make_case(start=11, window=window, softcap=softcap, sinks=True)
    check(case)
    without = causal_attention(AttentionCall(0, case.call.scale, window, softcap, None), *case[1:])
    found = causal_attention(*case)
    assert (found.out - without.out).abs().max() > 0.1
    assert (found.lse > without.lse).all(), "the sinks are part of the denominator"


def test_softcap_and_window_change_the_result():
    plain = make_case(start=20)
    base = causal_attention(*plain).out
    for window, softcap in ((5, 0.0), (None, 1.0)):
        call = AttentionCall(0, plain.call.scale, window, softcap, None)
        assert (causal_attention(call, *plain[1:]).out - base).abs().max() > 0.1


@pytest.mark.parametrize("window", [1, 28, 29, 30, 1000])
def test_a_window_around_the_length_of_the_prompt(window):
    check(make_case(start=20, length=9, window=window))


def test_a_window_that_reaches_everything_is_no_window():
    case = make_case(start=20, length=9)
    wide = AttentionCall(0, case.call.scale, 29, 0.0, None)
    found, plain = causal_attention(*case), causal_attention(wide, *case[1:])
    assert torch.equal(found.out, plain.out) and torch.equal(found.lse, plain.lse)


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_chunks_of_any_size_add_up_to_one_pass(window, softcap):
    whole = make_case(length=70, window=window, softcap=softcap)
    wanted = causal_attention(*whole)
    for chunk in (1, 13, 64):
        parts = []
        for start in range(0, 70, chunk):
            stop = min(70, start + chunk)
            query = whole.query[:, start:stop].contiguous()
            parts.append(
                causal_attention(whole.call, query, whole.key[:, :stop], whole.value[:, :stop], start)
            )
        for found, one_pass in zip(zip(*parts, strict=True), wanted, strict=True):
            torch.testing.assert_close(torch.cat(found, 1), one_pass, atol=1e-5, rtol=0)


@pytest.mark.parametrize("start", [0, 40])
@pytest.mark.parametrize("window", [None, 16])
def test_logits_of_any_size_do_not_overflow(start, window):
    case = make_case(start=start, window=window, sinks=True)
    steep = AttentionCall(0, 60.0, window, 0.0, case.call.sinks)
    found, lse = causal_attention(steep, *case[1:])
    wanted = explicit(steep, *case[1:])
    torch.testing.assert_close(found.double(), wanted.out, atol=2e-3, rtol=0)
    torch.testing.assert_close(lse.double(), wanted.lse, atol=1e-3, rtol=1e-5)


def test_what_lies_behind_the_last_key_is_never_read():
    case = make_case(start=20)
    storage = torch.full((2, 60, 16), float("nan"))
    key, value = storage.clone(), storage.clone()
    key[:, :29], value[:, :29] = case.key, case.value
    found, plain = (
        causal_attention(case.call, case.query, key[:, :29], value[:, :29], 20),
        causal_attention(*case),
    )
    assert torch.equal(found.out, plain.out) and torch.equal(found.lse, plain.lse)


class Recorder:
    """A port that keeps the call."""

    def attend(self, call, query, key, value):
        self.call = call
        return query.transpose(0, 1)


def attention_call(**keywords):
    """What a model's layer says to our attention function."""
    module = torch.nn.Module()
    module.layer_idx, module.config = 3, transformers.LlamaConfig()
    port, rows = Recorder(), torch.zeros(1, 2, 5, 16)
    kvtide_attention(module, rows, rows, rows, None, kvtide=port, **keywords)
    return port.call


def test_no_scale_is_the_usual_scale():
    assert attention_call().scale == attention_call(scaling=None).scale == 0.25
    assert attention_call(scaling=2.0).scale == 2.0


@pytest.mark.parametrize("name", ["position_bias", "indices", "block_indices", "sinks", "cu_seq_lens_q"])
def test_an_attention_call_with_more_than_we_compute_is_refused_by_name(name):
    with pytest.raises(UnsupportedModel, match=name):
        attention_call(**{name: torch.zeros(3)})
    attention_call(**{name: None})


def test_a_layer_that_looks_ahead_is_refused():
    with pytest.raises(UnsupportedModel, match="bidirectional"):
        attention_call(is_causal=False)
    attention_call(is_causal=True, dropout=0.0, use_cache=False, position_ids=torch.arange(5))


@pytest.mark.parametrize("threads", [1, 2])
@settings(max_examples=30, deadline=None)
@given(
    cached=st.integers(1, 15),
    rest=st.integers(1, 256),
    origin=st.sampled_from([0, 256, 512, 1280]),
    group=st.sampled_from([1, 3, 4]),
    seed=st.integers(0, 1000),
)
def test_the_end_of_a_piece_has_the_bits_that_it_has_in_the_piece(threads, cached, rest, origin, group, seed):
    """However many blocks of 16 tokens of it were cached."""
    cut = 16 * cached
    case = make_case(
        torch.bfloat16, start=origin, length=min(256, cut + rest), group=group, dim=64, seed=seed
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = causal_attention(*case)
        query = case.query[:, cut:].contiguous()
        end = causal_attention(case.call, query, case.key, case.value, origin + cut, origin)
    finally:
        torch.set_num_threads(before)
    assert end.out.shape[1] == whole.out.shape[1] - cut > 0
    assert torch.equal(end.out, whole.out[:, cut:])
    assert torch.equal(end.lse, whole.lse[:, cut:])
