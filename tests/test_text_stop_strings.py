"""Stop strings in streamed text (O-34) against a search in the whole text."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.text import Detokenizer, TextDelta, TextStream, TokenPieces


def first_stop(text: str, stops: tuple[str, ...]) -> TextDelta:
    """What a stream must add up to: the whole text, searched at once."""
    hits = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not hits:
        return TextDelta(text)
    start, _, stop = min(hits)
    return TextDelta(text[:start], True, stop)


def streamed(stream: TextStream, ids: list[int]) -> TextDelta:
    released = stream.replay(ids)
    if released.stopped:
        return released
    rest = stream.flush()
    return TextDelta(released.text + rest.text, rest.stopped, rest.stop)


def stub(tokens: list[str]) -> tuple[TokenPieces, list[int]]:
    """A model that emits these tokens, each a vocabulary entry of its own."""
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys([*tokens, "?"]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    return TokenPieces(fast), [vocabulary[token] for token in tokens]


def texts_of(tokens: list[str], stops: tuple[str, ...]) -> list[str | tuple[str, str]]:
    """Delta by delta, with flush last; a delta that stops is (text, stop)."""
    source, ids = stub(tokens)
    stream = TextStream(Detokenizer(source), stops)
    seen: list[str | tuple[str, str]] = []
    for token_id in ids:
        delta = stream.push(token_id)
        seen.append((delta.text, delta.stop) if delta.stopped else delta.text)
        if delta.stopped:
            return seen
    rest = stream.flush()
    return [*seen, (rest.text, rest.stop) if rest.stopped else rest.text]


def test_o34_nothing_of_a_stop_over_several_tokens_is_sent():
    tokens = ["ABC", "DE", "F", "G", "HI", "J", "KL"]
    assert texts_of(tokens, ("DEFGHIJ",)) == ["ABC", "", "", "", "", ("", "DEFGHIJ")]


def test_o34_text_around_a_stop_inside_one_token_is_cut():
    assert texts_of(["xxDE", "Fyy"], ("DEF",)) == ["xx", ("", "DEF")]
    assert texts_of(["xxDEFyyDEF"], ("DEF",)) == [("xx", "DEF")]
    assert texts_of(["DEF"], ("DEF",)) == [("", "DEF")]


def test_o34_near_miss_is_released_as_soon_as_it_cannot_match():
    assert texts_of(["DE", "FG", "X", "Y"], ("DEFGHIJ",)) == ["", "", "DEFGX", "Y", ""]
    assert texts_of(["aa", "a", "b"], ("aab",)) == ["", "a", ("", "aab")]  # what may still match stays
    assert texts_of(["ab", "ab", "ac"], ("ababad",)) == ["", "", "ababac", ""]
    assert texts_of(["x", "DE"], ("DEF",)) == ["x", "", "DE"]  # the end of the text settles it


def test_o34_stop_of_200_characters():
    stop = "".join(chr(0x4E00 + i * 7 % 200) for i in range(199)) + "!"
    assert texts_of(["a", *stop, "b"], (stop,)) == ["a", *[""] * 199, ("", stop)]
    miss = stop[:-1] + "?"
    assert texts_of(["a", *miss, "b"], (stop,)) == ["a", *[""] * 199, miss, "b", ""]


def test_o34_overlapping_stops_the_one_that_starts_first_wins():
    assert texts_of([*"xabcd"], ("bc", "abcd")) == ["x", "", "", "", ("", "abcd")]
    assert texts_of([*"xabce"], ("bc", "abcd")) == ["x", "", "", "", ("a", "bc")]  # it had waited for "d"
    assert texts_of([*"xabc"], ("bc", "abcd")) == ["x", "", "", "", ("a", "bc")]  # the text ended meanwhile
    assert texts_of(["xabcde"], ("cd", "bcde", "e")) == [("xa", "bcde")]
    assert texts_of([*"abc"], ("abc", "ab")) == ["", ("", "ab")]  # same start: complete first


def test_o34_smollm2_stop_strings_in_every_tokenisation(smollm2_path):
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    source = TokenPieces(tokenizer)
    text = "Answer: 42\n\nUser: DEFGHIJ 👨‍👩‍👧‍👦 done<|stop|> tail"
    cuts = random.Random(3)
    for stops in [
        ("DEFGHIJ",),
        ("\n\nUser:", "\n"),
        ("👩",),
        ("\u200d👧", "👦"),
        ("<|stop|>",),
        ("nowhere",),
    ]:
        for _ in range(10):
            places = sorted(cuts.sample(range(len(text)), 8))
            parts = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
            ids = [i for part in parts for i in tokenizer.encode(part, add_special_tokens=False)]
            assert streamed(TextStream(Detokenizer(source), stops), ids) == first_stop(text, stops)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.text("abé", min_size=1, max_size=4), max_size=12),
    st.lists(st.text("abé", min_size=1, max_size=5), max_size=4),
)
def test_stream_equals_the_text_cut_at_its_first_stop(tokens, stops):
    source, ids = stub(tokens)
    stream = TextStream(Detokenizer(source), tuple(stops))
    assert streamed(stream, ids) == first_stop("".join(tokens), tuple(stops))


@settings(max_examples=150, deadline=None)
@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3))
def test_no_more_is_held_back_than_could_become_a_stop(text, stops):
    source, ids = stub([*text])
    stream = TextStream(Detokenizer(source), tuple(stops))
    released = ""
    for i, token_id in enumerate(ids):
        delta = stream.push(token_id)
        released += delta.text
        if delta.stopped:
            break
        held = text[len(released) : i + 1]
        assert text.startswith(released)
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_text_of_the_first_min_tokens_cannot_stop():
    source, ids = stub(["a", "b", "a", "b"])
    stream = TextStream(Detokenizer(source), ("ab",), min_tokens=1)
    assert [stream.push(token_id) for token_id in ids] == [
        TextDelta("a"),
        TextDelta("b"),
        TextDelta(""),
        TextDelta("", True, "ab"),
    ]


def test_without_stops_every_delta_leaves_at_once():
    assert texts_of(["a", "bc", " d"], ()) == ["a", "bc", " d", ""]
