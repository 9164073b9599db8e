"""From token ids to the text a client may see: incremental detokenising and stop strings.

Everything here is a function of the token ids alone, so a replayed or moved sequence continues its text
without a gap or a repeat. No step looks at more than the newest token and the text held back.

The usual way, decoding a window of the last few tokens and taking the difference, fails at skipped special
tokens (the next word loses its space), after invalid bytes and inside long byte runs. Decoders of language
models work token by token, except for joining bytes into characters and for the very first token; so each
token's piece is asked once from the tokenizer, and only the bytes are joined here.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from engine.errors import UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_REPLACEMENT = "\ufffd"
_TOKENWISE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class TokenPieces:
    """What each token of one tokenizer adds to a text. Built once per model, shared by all sequences.

    `tokenizer.decode(..., clean_up_tokenization_spaces=False)` is the specification. Raises UnsupportedModel
    for a tokenizer whose decoder does not work token by token (WordPiece, CTC, BPE with word-end suffixes).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, skip_special_tokens: bool = True) -> None:
        self._backend = tokenizer.backend_tokenizer
        decoder = self._backend.decoder
        steps = _decoder_steps(None if decoder is None else json.loads(decoder.__getstate__()))
        self.byte_level = any(step["type"] == "ByteLevel" for step in steps)
        self._byte_fallback = any(step["type"] == "ByteFallback" for step in steps)
        added = self._backend.get_added_tokens_decoder()
        self._skipped = {i for i, token in added.items() if token.special} if skip_special_tokens else set()
        self._later: dict[int, str | bytes | None] = {}
        self._anchor = None if self.byte_level else self._find_anchor()

    def piece(self, token_id: int, *, first: bool) -> str | bytes | None:
        """What the token adds: finished text, bytes to be joined with its neighbours', or None if skipped.

        `first` is whether no unskipped token came before it (SentencePiece drops the leading space there).
        Ids outside the vocabulary are skipped, as `decode` does.
        """
        if first:
            return self._first_piece(token_id)
        if token_id not in self._later:
            self._later[token_id] = self._later_piece(token_id)
        return self._later[token_id]

    def _first_piece(self, token_id: int) -> str | bytes | None:
        piece = self._raw_piece(token_id)
        if self.byte_level or piece is None:
            return piece
        text = self._decode(token_id)
        if isinstance(piece, bytes):
            return piece if text else b""  # a space as a byte token is dropped, too
        return text

    def _later_piece(self, token_id: int) -> str | bytes | None:
        piece = self._raw_piece(token_id)
        if isinstance(piece, str):
            if self._anchor is None:
                return self._decode(token_id)
            return self._decode(self._anchor, token_id).removeprefix(self._decode(self._anchor))
        return piece

    def _raw_piece(self, token_id: int) -> str | bytes | None:
        """The token as the vocabulary spells it, or its bytes, or None if it is skipped."""
        token = self._backend.id_to_token(token_id)
        if token is None or token_id in self._skipped:
            return None
        if self.byte_level:
            if all(char in _BYTE_OF for char in token):
                return bytes(_BYTE_OF[char] for char in token)
            return str(token).encode()  # an added token, spelled in plain text
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes.fromhex(token[3:5])
            except ValueError:
                return str(token)
        return str(token)

    def _find_anchor(self) -> int | None:
        """A token with text of its own: behind it, other tokens show what they add when not the first."""
        for token_id in range(self._backend.get_vocab_size()):
            if isinstance(self._raw_piece(token_id), str) and self._decode(token_id):
                return token_id
        return None

    def _decode(self, *token_ids: int) -> str:
        return str(self._backend.decode(list(token_ids), skip_special_tokens=False))


def _decoder_steps(spec: Mapping[str, object] | None) -> list[Mapping[str, object]]:
    """The decoder's steps, flattened, after checking that they work token by token."""
    if spec is None:  # tokens joined by spaces
        return []
    nested = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    assert isinstance(nested, list)
    steps: list[Mapping[str, object]] = []
    for step in nested:
        steps += _decoder_steps(step) if step["type"] == "Sequence" else [step]
    kinds = [str(step["type"]) for step in steps]
    if "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}:
        return steps
    tail = steps[kinds.index("Fuse") + 1 :] if "Fuse" in kinds else []
    if set(kinds) <= _TOKENWISE and all(step["type"] == "Strip" and not step["stop"] for step in tail):
        return steps
    raise UnsupportedModel(f"tokenizer decoder {' + '.join(kinds)}: it does not work token by token")


def _byte_alphabet() -> dict[str, int]:
    """Byte of each character in which byte-level BPE spells its tokens (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()


class _ByteJoiner(Protocol):
    """Joins bytes into characters; what cannot be decided yet is held back."""

    def push(self, data: bytes) -> str:
        """Add bytes; give the characters that are now certain."""

    def close(self) -> str:
        """No byte follows: give what was held back, as replacement characters."""


class _ByteLevelJoiner:
    """Byte-level BPE: a lossy UTF-8 stream, U+FFFD per maximal invalid part (Rust's and Python's rule)."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, data: bytes) -> str:
        return self._decoder.decode(data)

    def close(self) -> str:
        return self._decoder.decode(b"", final=True)


class _ByteRunJoiner:
    """Byte fallback: a run of byte tokens is valid as a whole, or each of its bytes becomes U+FFFD.

    A character leaves as soon as it is complete (a run may be a page of Thai, or one newline), so where a run
    turns invalid later, only its rest is replaced, whereas decoding all at once replaces its valid beginning,
    too.
    """

    def __init__(self) -> None:
        self._held = b""
        self._broken = False

    def push(self, data: bytes) -> str:
        self._held += data
        if not self._broken:
            try:
                text = self._held.decode()
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data":
                    return ""
                self._broken = True
            else:
                self._held = b""
                return text
        return self._replace_held()

    def close(self) -> str:
        self._broken = False
        return self._replace_held()

    def _replace_held(self) -> str:
        count, self._held = len(self._held), b""
        return _REPLACEMENT * count


class Detokenizer:
    """Text of one growing token sequence. What `push` and `flush` return adds up to `decode` of all ids.

    `push` never returns part of a character. The one difference to `decode`: `_ByteRunJoiner`, for invalid
    bytes. `continues` is for text that goes on after a prompt: the first token then keeps its leading space.
    """

    def __init__(self, pieces: TokenPieces, *, continues: bool = False) -> None:
        self._pieces = pieces
        self._first = not continues
        self._joiner: _ByteJoiner = _ByteLevelJoiner() if pieces.byte_level else _ByteRunJoiner()

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty for a skipped token or a character's beginning."""
        piece = self._pieces.piece(token_id, first=self._first)
        if piece is None:
            return ""
        self._first = False
        if isinstance(piece, bytes):
            return self._joiner.push(piece)
        return self._joiner.close() + piece

    def flush(self) -> str:
        """The sequence has ended: U+FFFD for the incomplete character that was held back, if any."""
        return self._joiner.close()


@dataclass(frozen=True)
class TextDelta:
    """Text that may be shown now, and whether the choice has ended at stop string `stop`."""

    text: str
    stopped: bool = False
    stop: str | None = None


class TextStream:
    """Text of one choice, cut before the first stop string.

    The stop that starts first in the text wins, of several that start together the shortest (it is complete
    first); how the text was split into tokens does not matter. So a complete match waits while an earlier
    start can still become one: `stopped` then comes with a later token, or from `flush`. Text is held back
    only while it is the beginning of a stop. Text of the first `min_tokens` tokens cannot be part of a stop.
    """

    def __init__(self, detokenizer: Detokenizer, stop: tuple[str, ...] = (), *, min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._search = _StopSearch(stop)
        self._unchecked = min_tokens

    def push(self, token_id: int) -> TextDelta:
        """Add a token. Nothing may be pushed after `stopped`."""
        text = self._detokenizer.push(token_id)
        if self._unchecked > 0:
            self._unchecked -= 1
            return TextDelta(text)
        return self._search.push(text)

    def flush(self) -> TextDelta:
        """End the choice (length or end token): whatever was held back, or a stop that waited."""
        return self._search.close(self._detokenizer.flush())

    def replay(self, token_ids: Iterable[int]) -> TextDelta:
        """Push tokens generated elsewhere, up to a stop; returns everything they release, joined."""
        texts: list[str] = []
        for token_id in token_ids:
            delta = self.push(token_id)
            texts.append(delta.text)
            if delta.stopped:
                return TextDelta("".join(texts), True, delta.stop)
        return TextDelta("".join(texts))


class _StopSearch:
    """Finds several strings at once in a text that grows, one Knuth-Morris-Pratt automaton each."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert all(stops), "an empty stop string is refused at the gateway"
        self._stops = stops
        self._fallbacks = [_fallbacks(stop) for stop in stops]
        self._openings = frozenset(stop[0] for stop in stops)
        self._matched = [0] * len(stops)  # characters of each stop that the text ends with
        self._seen = 0  # characters of text so far
        self._held = ""  # the last of them, not released yet
        self._hit: tuple[int, str] | None = None  # start and text of the best complete match
        self._ended = False

    def push(self, text: str) -> TextDelta:
        assert not self._ended, "text pushed after the end"
        if not self._held and self._openings.isdisjoint(text):
            self._seen += len(text)
            return TextDelta(text)
        held_from = self._seen - len(self._held)
        self._held += text
        for char in text:
            self._advance(char)
            if self._hit is not None and self._hit[0] <= self._earliest_open():
                return self._stop(held_from)
        released = self._earliest_open() - held_from
        delta, self._held = TextDelta(self._held[:released]), self._held[released:]
        return delta

    def close(self, text: str) -> TextDelta:
        """The text ends with `text`: settle what is open."""
        delta = self.push(text)
        if delta.stopped:
            return delta
        self._ended = True
        if self._hit is None:
            return TextDelta(delta.text + self._held)
        rest = self._stop(self._seen - len(self._held))
        return TextDelta(delta.text + rest.text, True, rest.stop)

    def _stop(self, held_from: int) -> TextDelta:
        """End at the match found; the held text starts at character `held_from`."""
        assert self._hit is not None
        self._ended = True
        start, stop = self._hit
        return TextDelta(self._held[: start - held_from], True, stop)

    def _advance(self, char: str) -> None:
        self._seen += 1
        for i, (stop, fallbacks) in enumerate(zip(self._stops, self._fallbacks, strict=True)):
            length = self._matched[i]
            while length and stop[length] != char:
                length = fallbacks[length - 1]
            length += stop[length] == char
            if length == len(stop):
                start = self._seen - length
                if self._hit is None or start < self._hit[0]:
                    self._hit = (start, stop)
                length = fallbacks[length - 1]
            self._matched[i] = length

    def _earliest_open(self) -> int:
        """Where the earliest match that may still complete would start."""
        return self._seen - max(self._matched)


def _fallbacks(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper suffix that is a prefix of `stop`."""
    lengths = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = lengths[length - 1]
        length += stop[i] == stop[length]
        lengths[i] = length
    return lengths
