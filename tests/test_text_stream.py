"""Streamed text against the tokenizer's own decode: split characters, special tokens, broken bytes."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.errors import UnsupportedModel
from engine.text import Detokenizer, TextStream, TokenPieces

REPLACEMENT = "\ufffd"
DECLARATION = {
    line["lang"]: line["text"]
    for line in map(json.loads, (Path(__file__).parent / "data/udhr_excerpts.jsonl").open(encoding="utf-8"))
}
HARD_TEXTS = [
    "🦤 🫎",  # rare emoji
    "👨‍👩‍👧‍👦👩🏽‍🚀🏴󠁧󠁢󠁳󠁣󠁴󠁿",  # joiners, skin tones, tags
    "ď",
    "d\u030c",  # the same as a letter and a combining mark
    "𠮷野家で𩸽を食べる",  # rare CJK outside the basic plane
    f"a real {REPLACEMENT} in the text{REPLACEMENT}",
    "  leading, \t\n trailing  ",
    "",
]
TEXTS = [*DECLARATION.values(), *HARD_TEXTS]


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2, SmolLM2, Llama 3 and Qwen: byte-level BPE, with a special and an ordinary added token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([DECLARATION["eng"], DECLARATION["rus"], DECLARATION["tha"]], trainer)
    return finished(tokenizer)


@cache
def llama() -> PreTrainedTokenizerFast:
    """As Llama 2 and Mistral: SentencePiece spaces; what is not in the vocabulary falls back to bytes."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return with_byte_fallback(steps, normalizer, None)


@cache
def metaspace() -> PreTrainedTokenizerFast:
    """Byte fallback below a Metaspace decoder, which drops the first space in its own way."""
    steps = [decoders.ByteFallback(), decoders.Metaspace()]
    return with_byte_fallback(steps, None, pre_tokenizers.Metaspace())


def with_byte_fallback(steps: list, normalizer, pre_tokenizer) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.Sequence(steps)
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=names, limit_alphabet=60, show_progress=False
    )
    tokenizer.train_from_iterator([DECLARATION["eng"], DECLARATION["vie"]], trainer)
    # Byte tokens are ordinary tokens; training can only add them as special ones.
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] == "<unk>"]
    return finished(Tokenizer.from_str(json.dumps(spec)))


def finished(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens([AddedToken("<tool ü世>", special=False, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


TOKENIZERS = {"byte_level": byte_level, "llama": llama, "metaspace": metaspace}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request) -> PreTrainedTokenizerFast:
    return TOKENIZERS[request.param]()


@cache
def pieces(tokenizer: PreTrainedTokenizerFast) -> TokenPieces:
    return TokenPieces(tokenizer)


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def decode(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def split_into_tokens(tokenizer: PreTrainedTokenizerFast, text: str, cuts: random.Random) -> list[int]:
    """Ids of `text` cut at random places, so that they are not the tokenizer's own choice."""
    ids, rest = [], text
    while rest:
        size = cuts.choice([1, 2, 5, 20])
        ids += encode(tokenizer, rest[:size])
        rest = rest[size:]
    return ids


def deltas(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(pieces(tokenizer))
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_o35_stream_of_a_text_adds_up_to_its_decode_without_replacement_characters(tokenizer, text):
    ids = encode(tokenizer, text)
    parts = deltas(tokenizer, ids)
    assert "".join(parts) == decode(tokenizer, ids)
    assert sum(part.count(REPLACEMENT) for part in parts) == text.count(REPLACEMENT)
    assert parts[-1] == ""


def test_o35_smollm2_streams_every_script_and_emoji(smollm2_path):
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    split = 0
    for text in TEXTS:
        ids = encode(tokenizer, text)
        parts = deltas(tokenizer, ids)
        split += parts.count("") > 1
        assert "".join(parts) == decode(tokenizer, ids) == text
    assert split > 8  # these texts do have characters that span tokens


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([*TOKENIZERS]), st.text(max_size=40), st.randoms(use_true_random=False))
def test_stream_of_any_text_in_any_tokenisation_adds_up_to_its_decode(name, text, cuts):
    tokenizer = TOKENIZERS[name]()
    ids = split_into_tokens(tokenizer, text, cuts)
    for _ in range(cuts.randint(0, 3)):  # skipped and unknown ids anywhere, even inside a character
        ids.insert(
            cuts.randint(0, len(ids)), cuts.choice([tokenizer.convert_tokens_to_ids("<|end|>"), 10**6])
        )
    parts = deltas(tokenizer, ids)
    full = decode(tokenizer, ids)
    assert "".join(parts) == full
    assert (REPLACEMENT in "".join(parts)) == (REPLACEMENT in full)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_byte_level_stream_of_arbitrary_ids_adds_up_to_their_decode(data):
    tokenizer = byte_level()
    ids = data.draw(st.lists(st.integers(0, len(tokenizer)), max_size=30))
    assert "".join(deltas(tokenizer, ids)) == decode(tokenizer, ids)


def cut_broken_runs(parts: list[bytes | str]) -> tuple[str, bool]:
    """Text of byte tokens and words, and whether a run breaks only behind complete characters."""
    text, run, late = "", b"", False
    for part in [*parts, ""]:
        if isinstance(part, bytes):
            run += part
            continue
        try:
            text += run.decode()
        except UnicodeDecodeError as error:
            text += run[: error.start].decode() + REPLACEMENT * (len(run) - error.start)
            late |= error.start > 0
        text, run = text + part, b""
    return text, late


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([llama, metaspace]),
    st.lists(st.sampled_from([*"aé😀ก", b"\xe0", b"\xb8", b"\x81", "o"])),
)
def test_byte_fallback_stream_of_arbitrary_bytes_keeps_what_is_complete(build, drawn):
    tokenizer = build()
    parts: list[bytes | str] = []
    for part in drawn:  # a character in bytes is several byte tokens
        in_bytes = isinstance(part, bytes) or part != "o"
        data = part if isinstance(part, bytes) else part.encode()
        parts += [data[i : i + 1] for i in range(len(data))] if in_bytes else ["o"]
    ids = [id_of(tokenizer, part) for part in parts]
    text, late = cut_broken_runs(parts)
    assert "".join(deltas(tokenizer, ids)) == text
    assert late or text == decode(tokenizer, ids)


def id_of(tokenizer: PreTrainedTokenizerFast, part: bytes | str) -> int:
    return tokenizer.convert_tokens_to_ids(f"<0x{part[0]:02X}>" if isinstance(part, bytes) else part)


def byte_ids(tokenizer: PreTrainedTokenizerFast, data: bytes) -> list[int]:
    return [id_of(tokenizer, data[i : i + 1]) for i in range(len(data))]


def test_byte_fallback_character_leaves_with_its_last_byte():
    tokenizer = llama()
    assert deltas(tokenizer, byte_ids(tokenizer, "ก😀\n".encode())) == [
        *("", "", "ก"),
        *("", "", "", "😀"),
        "\n",
        "",
    ]


def test_byte_fallback_run_that_breaks_is_replaced_byte_by_byte_up_to_its_end():
    tokenizer = llama()
    word = encode(tokenizer, "human")[-1:]
    broken = [*byte_ids(tokenizer, b"\xe0\xb8a\xe0"), *word, *byte_ids(tokenizer, "é".encode())]
    assert "".join(deltas(tokenizer, broken)) == decode(tokenizer, broken)
    assert decode(tokenizer, broken).count(REPLACEMENT) == 4
    # What had left as a character cannot be taken back; decoding all at once would lose it.
    late = byte_ids(tokenizer, "é".encode() + b"\xff")
    assert deltas(tokenizer, late) == ["", "é", REPLACEMENT, ""]
    assert decode(tokenizer, late) == REPLACEMENT * 3


@pytest.mark.parametrize("build", [llama, metaspace])
def test_leading_space_as_a_byte_token_is_treated_as_decode_treats_it(build):
    tokenizer = build()
    ids = byte_ids(tokenizer, b"  x")
    assert "".join(deltas(tokenizer, ids)) == decode(tokenizer, ids)


def test_unfinished_character_comes_out_at_the_end_as_decode_shows_it(tokenizer):
    ids = encode(tokenizer, "so 😀")[:-1]
    parts = deltas(tokenizer, ids)
    assert "".join(parts[:-1]) == "so "
    assert parts[-1] and set(parts[-1]) == {REPLACEMENT}
    assert "".join(parts) == decode(tokenizer, ids)


def test_invalid_bytes_are_not_held_back_for_ever():
    tokenizer = byte_level()
    invalid = tokenizer.convert_tokens_to_ids("ÿ")  # stands for byte 0xFF
    parts = deltas(tokenizer, [invalid] * 100)
    assert "".join(parts[:-1]) == decode(tokenizer, [invalid] * 100)


def test_word_after_a_skipped_special_token_keeps_its_space():
    tokenizer = llama()
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    ids = [end, *encode(tokenizer, "the"), end, end, *encode(tokenizer, "world")]
    assert "".join(deltas(tokenizer, ids)) == decode(tokenizer, ids) == "the world"


def test_special_tokens_appear_when_they_are_not_skipped(tokenizer):
    shown = TokenPieces(tokenizer, skip_special_tokens=False)
    ids = [*encode(tokenizer, "the end"), tokenizer.convert_tokens_to_ids("<|end|>")]
    detokenizer = Detokenizer(shown)
    text = "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.flush()
    assert text == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert "<|end|>" in text


def test_continuation_of_a_prompt_keeps_the_first_leading_space(tokenizer):
    prompt, ids = encode(tokenizer, "Whereas the"), encode(tokenizer, " rights")
    detokenizer = Detokenizer(pieces(tokenizer), continues=True)
    text = "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.flush()
    assert decode(tokenizer, prompt) + text == decode(tokenizer, prompt + ids)
    assert text.startswith(" ")


def test_decoder_that_looks_across_tokens_is_refused_by_name():
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        TokenPieces(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)])
    with pytest.raises(UnsupportedModel, match="Fuse \\+ Strip"):
        TokenPieces(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([*TOKENIZERS]), st.text("ab é世😀", max_size=30), st.integers(0, 40))
def test_replayed_stream_continues_like_the_original(name, text, at):
    tokenizer = TOKENIZERS[name]()
    ids = encode(tokenizer, text)
    stops = ("aba", "世b", "b a")
    original = TextStream(Detokenizer(pieces(tokenizer)), stops)
    before = original.replay(ids[:at])
    assume(not before.stopped)
    replayed = TextStream(Detokenizer(pieces(tokenizer)), stops)
    assert replayed.replay(ids[:at]) == before
    assert replayed.replay(ids[at:]) == original.replay(ids[at:])
