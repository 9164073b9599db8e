"""The other process of tests/test_engine_resume.py: takes sequences over and runs them to their end, all in one batch.

Its tokens are single bytes: letters, the first bytes of two-byte characters, and their second bytes.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from tiny_models import VOCABULARY, new_pool, tiny
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from engine.batch import DecodeEngine
from engine.request import GenerationRequest, SamplingParams, TokenEvent
from engine.sequence import Choice
from engine.snapshot import parse_snapshot
from engine.text import TokenPieces

FAMILY = "gemma3"  # windowed and full layers
# Byte-level BPE spells these bytes as the characters of the same number.
BYTES = (*range(0x41, 0x65), *range(0xC2, 0xE0), *(byte for byte in range(0xA1, 0xC0) if byte != 0xAD))
assert len(BYTES) == VOCABULARY


@functools.cache
def byte_pieces() -> TokenPieces:
    tokenizer = Tokenizer(models.BPE(vocab={chr(byte): i for i, byte in enumerate(BYTES)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return TokenPieces(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def raw(tokens: Iterable[int]) -> bytes:
    return bytes(BYTES[token] for token in tokens)


Event = tuple[int, int, str, str | None]


def plain(event: TokenEvent) -> Event:
    return event.index, event.token_id, event.text, event.finish_reason


def finish(engine: DecodeEngine) -> dict[str, list[Event]]:
    """Events per request and choice, until the engine is idle; nothing may be left then."""
    events: dict[str, list[Event]] = {}
    while not engine.idle:
        for result in engine.step():
            assert result.error is None, result.error
            for event in result.events:
                events.setdefault(f"{result.request_id}/{event.choice}", []).append(plain(event))
        engine.check()
    assert engine.use.used == 0
    return events


def main(folder: Path) -> None:
    """`folder`/jobs.json: [name, snapshot's file name, prompt, sampling, choice, generated] per sequence."""
    torch.set_num_threads(1)
    model = tiny(FAMILY).model
    jobs = json.loads((folder / "jobs.json").read_text())
    engine = DecodeEngine(model, new_pool(model, rows=len(jobs)))
    for name, file, prompt, sampling, index, generated in jobs:
        params = SamplingParams(**{**sampling, "stop": tuple(sampling["stop"])})
        request = GenerationRequest(name, tuple(prompt), params)
        buffer = torch.from_numpy(np.fromfile(folder / file, np.uint8))
        choice = Choice(request, index, byte_pieces(), model.spec.end_tokens, generated)
        engine.add([choice], parse_snapshot(model.spec, buffer), buffer)
    print(json.dumps(finish(engine)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
