"""What lossy codecs at rest cost: bytes, how far numbers and next tokens move, and processor time.

    python -m benchmarks.bench_codecs [--quick] [--tokens 3584] [--runs 5]

Ends with one JSON line (result.py). About 2 minutes on an idle core, half with --quick.

Regime: the demo model (SmolLM2-135M-Instruct) in bfloat16 and in float32, one thread, blocks of 16 tokens of real text.
All but the last 128 tokens of a prompt are written into blocks, encoded, decoded and read back, as a tier does; the
last 128 are computed behind them, and their next-token distributions compared with those behind the KV as computed: KL
divergence in nats (exact ‖ lossy), mean and largest, and how often the likeliest token is the same. Errors are of K and
V over all layers: the largest, and their root mean square over that of the numbers. Speeds are GB of KV as computed per
second of processor time, checksums on both sides included; medians. Baseline: the KV as computed; and, beside it, KV
that is computed as well, but in other pieces, which rounds otherwise.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.corpus import Corpus
from benchmarks.result import Bound, print_result
from engine.model import Model, load_model
from engine.weights import ensure_weights
from engine.workspace import PrefillPort, Workspace
from kernels.lossy import Encoded
from kv_tiers.at_rest import AtRest
from kv_tiers.block import BlockFault, open_block, read_layer_run, write_run
from kv_tiers.keys import BlockKey, block_keys, lossy_key
from kv_tiers.lossy_blocks import decode_blocks, encode_blocks

Figures = dict[str, float]

LOSSY = (AtRest.FP8, AtRest.INT8, AtRest.INT4)
TARGETS: dict[str, Bound] = {"float32_int8_kl": {"at_most": 1e-3}, "float32_int4_kl": {"at_most": 0.02}}
"""Of 3,584 tokens. In bfloat16 the numbers' own rounding moves next tokens more than int8 does."""

_SUFFIX = 128
_CHUNK = 1024
_OTHER_PIECES = 64


class Loss(NamedTuple):
    """Of one codec. Errors of K and V; `agree`: share of equal likeliest tokens."""

    largest: float
    k_rms: float
    v_rms: float
    kl: float
    kl_most: float
    agree: float


class Blocks:
    """The leading blocks of a prompt's KV, in page-aligned memory."""

    def __init__(self, model: Model, ids: Sequence[int], space: Workspace) -> None:
        spec = model.spec
        self.layout, self.fingerprint = spec.blocks, spec.fingerprint
        self.count = (len(ids) - _SUFFIX) // self.layout.block_tokens
        self.tokens = self.count * self.layout.block_tokens
        self.keys: list[BlockKey] = block_keys(self.fingerprint, ids, self.layout.block_tokens)[: self.count]
        self.exact = _buffers(self.layout.nbytes, self.count)
        write_run(
            [slot[: self.layout.nbytes] for slot in self.exact],
            self.layout,
            self.fingerprint,
            self.keys,
            [keys[:, : self.tokens] for keys in space.keys],
            [values[:, : self.tokens] for values in space.values],
        )

    def through(self, codec: AtRest, into: Workspace) -> None:
        """Put what comes back from a codec into a workspace."""
        names = [lossy_key(key, codec) for key in self.keys]
        encoded, decoded = self.room(codec), _buffers(self.layout.nbytes, self.count)
        assert encode_blocks(self.exact, encoded, self.keys, codec) == [Encoded.DONE] * self.count
        assert all(decode_blocks(encoded, decoded, names, codec))
        headers = [
            header
            for slot, name in zip(decoded, names, strict=True)
            if not isinstance(header := open_block(slot, self.layout, self.fingerprint, name), BlockFault)
        ]
        for layer in range(len(self.layout.layers)):
            k, v = into.keys[layer][:, : self.tokens], into.values[layer][:, : self.tokens]
            assert read_layer_run(decoded, self.layout, headers, layer, k, v) == self.count

    def room(self, codec: AtRest) -> list[memoryview]:
        return _buffers(self.layout.kept_as(codec).nbytes, self.count)


def computed(model: Model, ids: Sequence[int], piece_tokens: int = 256) -> Workspace:
    """A prompt's full KV."""
    space = Workspace(model.spec, len(ids), piece_tokens=piece_tokens)
    for start in range(0, len(ids), _CHUNK):
        forward(model, ids, space, start, min(start + _CHUNK, len(ids)))
    return space


def forward(model: Model, ids: Sequence[int], space: Workspace, start: int, stop: int) -> Tensor:
    """Compute positions [start, stop) behind what is in the workspace; → their log-probabilities."""
    port = PrefillPort([(space, start, stop - start)])
    wanted = list(range(stop - start)) if stop == len(ids) else [0]
    with torch.inference_mode():
        logits = model.forward(ids[start:stop], list(range(start, stop)), port, wanted, prompts=True)
    return logits.float().log_softmax(dim=-1)


def measure_loss(
    model: Model, ids: Sequence[int], blocks: Blocks, space: Workspace, lossy: Workspace
) -> Loss:
    """How far numbers and next tokens are apart behind the KV of two workspaces."""
    exact = forward(model, ids, space, blocks.tokens, len(ids))
    largest, squares = 0.0, [0.0, 0.0, 0.0, 0.0]
    for layer in range(len(blocks.layout.layers)):
        for which, (ours, theirs) in enumerate(
            ((space.keys[layer], lossy.keys[layer]), (space.values[layer], lossy.values[layer]))
        ):
            before, after = ours[:, : blocks.tokens].double(), theirs[:, : blocks.tokens].double()
            largest = max(largest, float((before - after).abs().max()))
            squares[which] += float((before - after).square().sum())
            squares[2 + which] += float(before.square().sum())
    moved = forward(model, ids, lossy, blocks.tokens, len(ids))
    kl = (exact.exp() * (exact - moved)).sum(dim=-1)
    agree = (exact.argmax(dim=-1) == moved.argmax(dim=-1)).float().mean()
    return Loss(
        largest,
        (squares[0] / squares[2]) ** 0.5,
        (squares[1] / squares[3]) ** 0.5,
        float(kl.mean()),
        float(kl.max()),
        float(agree),
    )


def measure_speed(blocks: Blocks, codec: AtRest, runs: int) -> tuple[float, float]:
    """GB/s of encoding and of decoding, of KV as computed."""
    encoded, decoded = blocks.room(codec), _buffers(blocks.layout.nbytes, blocks.count)
    names = [lossy_key(key, codec) for key in blocks.keys]
    times: dict[str, list[float]] = {"encode": [], "decode": []}

    def spend(name: str, work: Callable[[], object]) -> None:
        began = time.process_time()
        work()
        times[name].append(time.process_time() - began)

    for _ in range(runs + 1):  # the first touches the memory
        spend("encode", lambda: encode_blocks(blocks.exact, encoded, blocks.keys, codec))
        spend("decode", lambda: decode_blocks(encoded, decoded, names, codec))
    nbytes = blocks.count * blocks.layout.payload_bytes
    encode, decode = (nbytes / statistics.median(times[name][1:]) / 1e9 for name in ("encode", "decode"))
    return encode, decode


def _row(name: str, loss: Loss) -> str:
    return (
        f"{name:25} {loss.largest:7.3f} {loss.k_rms:8.3%} {loss.v_rms:8.3%} {loss.kl:9.2e} {loss.kl_most:9.2e}"
        f"  {loss.agree:6.1%}"
    )


def _buffers(nbytes: int, count: int) -> list[memoryview]:
    size = -(-nbytes // 4096) * 4096
    memory = memoryview(mmap.mmap(-1, size * count))
    return [memory[at : at + size] for at in range(0, size * count, size)]


def measure(model: Model, ids: Sequence[int], runs: int) -> Figures:
    """Everything of one model; prints its table."""
    space = computed(model, ids)
    blocks = Blocks(model, ids, space)
    layout = blocks.layout
    print(f"{layout.dtype}, {len(ids)} tokens, {blocks.count} blocks of {layout.nbytes} bytes")
    print(
        f"{'':26}largest    K rms    V rms        KL   KL most    same   bytes  encode  decode (GB/s per core)"
    )
    other = measure_loss(model, ids, blocks, space, computed(model, ids, _OTHER_PIECES))
    print(_row("computed in other pieces", other))
    figures = {f"computed_{name}": value for name, value in other._asdict().items()}
    for codec in LOSSY:
        lossy = Workspace(model.spec, len(ids))
        blocks.through(codec, lossy)
        loss = measure_loss(model, ids, blocks, space, lossy)
        share = layout.kept_as(codec).nbytes / layout.nbytes
        encode, decode = measure_speed(blocks, codec, runs)
        print(f"{_row(codec.label, loss)}  {share:6.1%} {encode:7.2f} {decode:7.2f}")
        told = {**loss._asdict(), "bytes": share, "encode_gb_s": encode, "decode_gb_s": decode}
        figures |= {f"{codec.label}_{name}": value for name, value in told.items()}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tokens", type=int, default=3584)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    tokens = min(arguments.tokens, 1024) if arguments.quick else arguments.tokens
    torch.set_num_threads(1)
    path = ensure_weights("demo")
    ids = Corpus(AutoTokenizer.from_pretrained(path)).take(tokens)
    figures: Figures = {}
    for dtype in ("bfloat16", "float32"):
        found = measure(load_model(path, dtype), ids, arguments.runs)
        figures |= {f"{dtype}_{name}": round(value, 7) for name, value in found.items()}
    print_result("codecs", f"SmolLM2-135M, {tokens} tokens, one thread", "KV as computed", figures, TARGETS)


if __name__ == "__main__":
    main()
