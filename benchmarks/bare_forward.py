"""The baseline of the time to first token: one bare transformers forward, in a process of its own.

As fair to transformers as it gets: sdpa attention, the checkpoint's dtype, `logits_to_keep=1` (only the last row of
logits, as a server needs), a KV cache that is kept (as a server needs), no generate() and no HTTP; as many threads and
the same scheduling priority as a prefill replica.

The child reads one JSON list of token ids per line and answers with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import TracebackType


@dataclass(frozen=True)
class ModelSizes:
    """Bytes that a decode step must read: every weight once, and so much KV per token of every sequence."""

    weight_bytes: int
    kv_bytes_per_token: int
    head_dim: int
    dtype: str


@dataclass(frozen=True)
class Forward:
    """One forward over a prompt: wall and processor seconds, and the likeliest next token."""

    wall_s: float
    cpu_s: float
    token: int


class BareForward:
    """Context manager around the child process; idle (blocked on its input) between calls."""

    def __init__(self, model: str, threads: int, niceness: int) -> None:
        """`niceness`: that of the process it is compared with; where it is lower than ours, ours is used."""
        command = [sys.executable, "-m", "benchmarks.bare_forward", model, str(threads), str(niceness)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        pipe = subprocess.PIPE
        # A session of its own, as `kvtide serve` makes one: Linux shares busy cores out by session before niceness.
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=environment, start_new_session=True
        )
        self.sizes = ModelSizes(**json.loads(self._line()))

    def __enter__(self) -> BareForward:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def run(self, ids: Sequence[int]) -> Forward:
        """One forward over `ids`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(list(ids)) + "\n")
        self._process.stdin.flush()
        return Forward(**json.loads(self._line()))

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the transformers baseline ended with status {self._process.wait()}")
        return line


def serve(model_name: str, threads: int, niceness: int) -> None:
    """The child: load, say the sizes, answer until the input ends."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from engine.weights import ensure_weights

    disable_progress_bar()
    if niceness > os.nice(0):
        os.nice(niceness - os.nice(0))
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(
        ensure_weights(model_name), dtype="auto", attn_implementation="sdpa"
    ).eval()
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = ModelSizes(
        weight_bytes=sum(each.numel() * each.element_size() for each in model.parameters()),
        kv_bytes_per_token=2
        * config.num_hidden_layers
        * config.num_key_value_heads
        * head_dim
        * model.dtype.itemsize,
        head_dim=head_dim,
        dtype=str(model.dtype).removeprefix("torch."),
    )
    print(json.dumps(asdict(sizes)), flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            ids = torch.tensor([json.loads(line)])
            began, cpu_began = time.perf_counter(), time.process_time()
            logits = model(input_ids=ids, use_cache=True, logits_to_keep=1).logits
            token = int(logits[0, -1].argmax())
            took = Forward(time.perf_counter() - began, time.process_time() - cpu_began, token)
            print(json.dumps(asdict(took)), flush=True)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("model")
    options.add_argument("threads", type=int)
    options.add_argument("niceness", type=int)
    given = options.parse_args()
    serve(given.model, given.threads, given.niceness)
