"""Real text as token ids, dealt out in slices that no two prompts share until it has been used up once."""

from __future__ import annotations

import lzma
from pathlib import Path

from transformers import PreTrainedTokenizerBase

_TEXT = Path(__file__).parent / "data" / "state_of_the_union.txt.xz"


class Corpus:
    """The addresses as one long token sequence; `take` hands out the next slice."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        with lzma.open(_TEXT, "rt", encoding="utf-8") as file:
            self._ids: list[int] = tokenizer.encode(file.read(), add_special_tokens=False, verbose=False)
        self._next = 0

    def take(self, tokens: int) -> list[int]:
        """The next `tokens` ids; starts over at the end, so that callers also keep prompts apart by a salt."""
        assert tokens <= len(self._ids)
        if self._next + tokens > len(self._ids):
            self._next = 0
        begin, self._next = self._next, self._next + tokens
        return self._ids[begin : self._next]
