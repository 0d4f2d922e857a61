"""Stop strings across tokens, incremental decoding (S14)."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from twinkle_research.errors import UserError
from twinkle_research.model.prepare import prepare
from twinkle_research.sampler.stops import Stops, TextStream, decode, unescape


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(prepare("tiny"))


@pytest.fixture(scope="module")
def words():
    """Whole pieces of text as tokens."""
    pieces = ["Hel", "lo", "\n", "Us", "er:", "a", "b", "ab", "<end>"]
    backend = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="a"))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


def test_stop_string_across_tokens_s14(words):
    stream = TextStream(words, ("\nUser:",))
    assert [stream.push(token) for token in range(5)] == [False, False, False, False, True]
    assert stream.close() == "Hello"


def test_nothing_that_may_become_a_stop_string_is_shown(words):
    stream = TextStream(words, ("\nUser:", "zz"))
    shown = []
    for token in (0, 1, 2, 3, 5):  # "Hello\nUs" turns out not to be a stop
        stream.push(token)
        shown.append(stream.take())
    assert shown == ["Hel", "lo", "", "", "\nUsa"]
    stream.push(2)
    assert (stream.take(), stream.take(final=True)) == ("", "\n")


def test_the_earliest_of_several_stop_strings_counts(words):
    stream = TextStream(words, ("b", "ab"))
    assert stream.push(7)
    assert stream.close() == ""


@pytest.mark.parametrize("text", ["plain", "é漢🙂 and 12", "🙂🙂", "a\n\n b  c", "�", "x�"])
def test_stream_equals_decoding_at_once(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    stream = TextStream(tokenizer)
    pieces = []
    for token in ids:
        stream.push(token)
        pieces.append(stream.take())
    assert stream.close() == text
    assert "".join(pieces) + stream.take(final=True) == text
    if "�" not in text:
        assert not any("�" in piece for piece in pieces), "an incomplete character was shown"


def test_stream_equals_decoding_of_any_tokens(tokenizer):
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(512) for _ in range(rng.randrange(1, 30))]
        stream = TextStream(tokenizer)
        for token in ids:
            stream.push(token)
        assert stream.close() == decode(tokenizer, ids)


def test_a_stop_string_inside_multibyte_text(tokenizer):
    stream = TextStream(tokenizer, ("漢",))
    ids = iter(tokenizer("é漢字")["input_ids"])
    assert [stream.push(next(ids)) for _ in range(5)] == [False] * 4 + [True]  # two bytes of é, three of 漢
    assert stream.close() == "é"


def test_stops_of_a_request(tokenizer):
    assert Stops.build(None, {2}, tokenizer) == Stops(frozenset({2}), ())
    assert Stops.build("###", {2}, tokenizer).strings == ("###",)
    assert Stops.build([7, 8], {2}, None).ids == {2, 7, 8}
    assert Stops.build(["<|endoftext|>", "x"], {2}, tokenizer) == Stops(frozenset({0, 2}), ("x",))


@pytest.mark.parametrize("stop", [[""], [None], [True], [1.5]])
def test_impossible_stops_are_refused(tokenizer, stop):
    with pytest.raises(UserError, match="neither a token id nor a non-empty string"):
        Stops.build(stop, set(), tokenizer)


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(UserError, match="needs a template"):
        Stops.build(["x"], set(), None)


def test_escapes_of_a_command_line_s14c():
    cases = {r"\n": "\n", r"\nUser:": "\nUser:", r"\\n": r"\n", r"\alpha": r"\alpha", "a\tb": "a\tb"}
    assert {typed: unescape(typed) for typed in cases} == cases
