"""What the edge knows about the served model: names, limits, and its tokenizer as pure functions of text."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import jinja2
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerFast

from deployments.api.recipes import RecipeBook
from engine.errors import InvalidRequest

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class ModelCard:
    """One served model. `names[0]` is the name in answers; every name is accepted.

    `context_length` bounds prompt plus generated tokens, `max_prompt_tokens` what prefill takes; `vocab_size`
    0 means the tokenizer's. `fingerprint` becomes `system_fingerprint`. The tokenizer is copied, so that
    nobody else's truncation settings reach ours, and only read afterwards: its methods here may run in any
    thread.
    """

    names: tuple[str, ...]
    tokenizer: PreTrainedTokenizerFast
    context_length: int
    max_prompt_tokens: int
    recipes: RecipeBook = field(default_factory=RecipeBook)
    end_token_ids: tuple[int, ...] = ()
    vocab_size: int = 0
    created: int = 0
    version: str = "0"
    fingerprint: str = ""

    def __post_init__(self) -> None:
        if not self.names or not all(self.names):
            raise ValueError("a served model needs at least one name, and no empty one")
        if self.context_length < 2 or self.max_prompt_tokens < 1:
            raise ValueError("context_length must be at least 2 and max_prompt_tokens at least 1")

    @cached_property
    def _encoder(self) -> Tokenizer:
        encoder: Tokenizer = copy.deepcopy(self.tokenizer.backend_tokenizer)
        encoder.no_truncation()  # tokenizer.json may carry a training-time truncation
        encoder.no_padding()
        return encoder

    @cached_property
    def vocabulary(self) -> int:
        """Number of valid token ids."""
        return self.vocab_size or len(self.tokenizer)

    @cached_property
    def prompt_prefix(self) -> tuple[int, ...]:
        """The begin token, where the tokenizer adds one to text; what it adds at the end is not wanted."""
        added: list[int] = self._encoder.encode("", add_special_tokens=True).ids
        begin = self.tokenizer.bos_token_id
        return tuple(added[:1]) if added and added[0] == begin else ()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` alone; the text of a special token becomes that token."""
        ids: list[int] = self.encoding(text).ids
        return ids

    def encoding(self, text: str) -> Encoding:
        """As `encode`, with each token's characters in `text` (`offsets`)."""
        return self._encoder.encode(text, add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`, special tokens included."""
        text: str = self._encoder.decode(ids, skip_special_tokens=False)
        return text

    def render_chat(self, messages: list[dict[str, str]], *, add_prompt: bool, go_on: bool) -> str:
        """`messages` in the model's chat template; `InvalidRequest` when there is none or it refuses them."""
        if not self.tokenizer.chat_template:
            raise InvalidRequest("This model has no chat template; use /v1/completions.", "messages")
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_prompt, continue_final_message=go_on
            )
        except (jinja2.TemplateError, ValueError) as error:  # what templates and transformers raise to refuse
            raise InvalidRequest(f"The chat template refuses these messages: {error}", "messages") from None
        assert isinstance(text, str)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token alone stands for: part of a character, perhaps."""
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._token_bytes[token_id] = self._bytes_of(token_id)
        return known

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token, bytes that are no whole characters replaced."""
        return [self.token_bytes(token_id).decode("utf-8", "replace") for token_id in ids]

    def token_label(self, token_id: int) -> str:
        r"""The token as a string; like OpenAI, "bytes:\xf0\x9f" where its bytes are no whole characters."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    @cached_property
    def _token_bytes(self) -> dict[int, bytes]:
        return {}

    @cached_property
    def _added(self) -> dict[int, str]:
        return {index: token.content for index, token in self.tokenizer.added_tokens_decoder.items()}

    @cached_property
    def _byte_of(self) -> dict[str, int] | None:
        """Character to byte of a byte-level vocabulary, None for other kinds."""
        decoder = self._encoder.decoder
        if decoder is None or decoder.decode(["\u0120"]) != " ":
            return None
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        hidden = [byte for byte in range(256) if byte not in printable]  # GPT-2 moved these up, in this order
        return {
            **{chr(byte): byte for byte in printable},
            **{chr(256 + i): byte for i, byte in enumerate(hidden)},
        }

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._encoder.id_to_token(token_id)
        if token is None:  # rows of the embedding that no token uses
            return b""
        if self._byte_of is not None and all(char in self._byte_of for char in token):
            return bytes(self._byte_of[char] for char in token)
        fallback = _BYTE_TOKEN.fullmatch(token)
        if fallback:
            return bytes([int(fallback[1], 16)])
        return str(token).replace("\u2581", " ").encode()
