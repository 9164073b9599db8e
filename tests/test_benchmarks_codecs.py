"""What the codec benchmark measures is there: nothing behind exact KV, more the fewer bits are left."""

from __future__ import annotations

from tiny_models import one_thread, tiny, tokens_of

from benchmarks.bench_codecs import LOSSY, Blocks, computed, measure_loss, measure_speed
from engine.workspace import Workspace
from kv_tiers.at_rest import AtRest

__all__ = ["one_thread"]


def test_losses_are_those_of_the_codec_alone():
    model, ids = tiny().model, tokens_of(400)
    space = computed(model, ids)
    blocks = Blocks(model, ids, space)
    assert blocks.count == (400 - 128) // 16
    same = measure_loss(model, ids, blocks, space, computed(model, ids))
    assert same == (0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
    losses = {}
    for codec in LOSSY:
        lossy = Workspace(model.spec, len(ids))
        blocks.through(codec, lossy)
        losses[codec] = measure_loss(model, ids, blocks, space, lossy)
    assert 0 < losses[AtRest.INT8].kl < losses[AtRest.INT4].kl
    assert 0 < losses[AtRest.INT8].v_rms < losses[AtRest.FP8].v_rms < losses[AtRest.INT4].v_rms
    assert all(rate > 0 for rate in measure_speed(blocks, AtRest.FP8, 1))
