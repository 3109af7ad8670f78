from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvchat import paths
from kvchat.engine.generate.detokenizer import Detokenizer, StopBuffer


@cache
def fast() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(paths.bundled_model_dir())


def slow() -> SimpleNamespace:
    """A tokenizer without ``tokenizers`` behind it."""
    return SimpleNamespace(is_fast=False, decode=fast().decode)


def pieces(tokenizer: object, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*map(detokenizer.step, ids), detokenizer.flush()]


# Half of the ids are those of single bytes, most of which are no whole character.
random_ids = st.lists(st.one_of(st.integers(0, 8191), st.integers(0, 300)), max_size=40)


@pytest.mark.parametrize("tokenizer", [fast, slow])
@given(ids=random_ids)
def test_the_pieces_joined_are_the_decoded_text(tokenizer, ids):
    assert "".join(pieces(tokenizer(), ids)) == fast().decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("tokenizer", [fast, slow])
@given(text=st.text())
def test_text_survives_and_no_piece_holds_half_a_character(tokenizer, text):
    text = text.replace("\ufffd", "")
    ids = [i for character in text for i in fast().encode(character, add_special_tokens=False)]
    made = pieces(tokenizer(), ids)
    assert "".join(made) == text
    assert not any("\ufffd" in piece for piece in made)


def test_a_character_appears_when_its_last_byte_does():
    ids = fast().encode("☕")
    assert len(ids) > 1
    assert pieces(fast(), ids) == [""] * (len(ids) - 1) + ["☕", ""]


def test_an_incomplete_character_at_the_end_is_marked_by_flush():
    ids = fast().encode("a☕")[:-1]
    assert pieces(fast(), ids)[-1] == "\ufffd"


@pytest.mark.parametrize("is_fast", [True, False])
def test_spaces_between_words_survive_a_decoder_that_strips_the_first(is_fast):
    backend = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "▁three": 2}))
    backend.decoder = decoders.Metaspace()
    whole = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer = SimpleNamespace(is_fast=is_fast, decode=whole.decode, backend_tokenizer=backend)
    assert pieces(tokenizer, [0, 1, 2]) == ["one", " two", " three", ""]


def test_control_tokens_have_no_text():
    assert pieces(fast(), [2, *fast().encode("Hi"), 4]) == ["", *map(fast().decode, fast().encode("Hi")), "", ""]


def run(stop: list[str], parts: list[str]) -> tuple[str, str]:
    buffer, shown = StopBuffer(stop), ""
    for part in parts:
        shown += buffer.feed(part)
        if buffer.found:
            return shown, buffer.found
    return shown + buffer.flush(), buffer.found


letters = st.text("abc", max_size=12)


@given(stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), parts=st.lists(letters, max_size=8))
def test_the_result_does_not_depend_on_the_pieces(stop, parts):
    text = "".join(parts)
    assert run(stop, parts) == run(stop, [text]) == run(stop, list(text))
    shown, found = run(stop, parts)
    assert not any(word in shown for word in stop)
    assert text.startswith(shown + found)
    assert found or shown == text


def test_only_what_may_begin_a_stop_string_is_held_back():
    buffer = StopBuffer(["\nUser:", "STOP"])
    assert [buffer.feed(piece) for piece in ["Hello\n", "Us", "ers \nU", "ser", ": x"]] == [
        "Hello",
        "",
        "\nUsers ",
        "",
        "",
    ]
    assert buffer.found == "\nUser:"
    assert buffer.flush() == ""


def test_the_stop_string_that_is_complete_first_cuts():
    assert run(["abcd", "bc"], ["abcd"]) == ("a", "bc")
    assert run([], ["abc"]) == ("abc", "")
