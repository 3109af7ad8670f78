"""Control characters become visible marks; all other text is unchanged."""

import unicodedata
from typing import get_args

import pytest
from support.hostile import FORBIDDEN, MARKUP, fill

from kvchat.foreign_text import visible, visible_fields
from kvchat.protocol.messages import Event
from kvchat.thoughts import split, summarize

BIDI_CLASSES = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[6n", "␛[6n"),
        ("\x00\x07\x7f", "␀␇␡"),
        ("\x9b31m", "‹U+009B›31m"),
        ("\u202e\u202a\u2066", "‹U+202E›‹U+202A›‹U+2066›"),
        ("a\ud800b", "a\ufffdb"),
        ("one\r\ntwo\rthree\n\tfour", "one\ntwo␍three\n\tfour"),
    ],
)
def test_control_characters_become_marks(text, shown):
    assert visible(text) == shown


@pytest.mark.parametrize(
    "text", ["", "plain\n\ttext", "Grüße 日本語 👩\u200d💻 é\u0301", "مرحبا\u200f \u061cשלום\u200e", MARKUP]
)
def test_other_text_is_unchanged(text):
    assert visible(text) == text


def test_only_control_and_bidi_characters_are_marked():
    for code in range(0x110000):
        character = chr(code)
        is_control = unicodedata.category(character) in ("Cc", "Cs") and character not in "\n\t"
        is_bidi = unicodedata.bidirectional(character) in BIDI_CLASSES
        assert (visible(character) != character) == (is_control or is_bidi), code


@pytest.mark.parametrize("cls", get_args(Event), ids=lambda cls: cls.__name__)
def test_every_field_of_every_event_is_cleaned(cls):
    event = fill(cls)
    shown = visible_fields(event)
    assert type(shown) is cls
    written = strings_of(shown)
    assert not [sequence for sequence in FORBIDDEN if sequence in written]
    assert written.count(MARKUP) == strings_of(event).count(MARKUP)


def strings_of(value: object) -> str:
    """All strings in a value, unescaped."""
    match value:
        case str():
            return value
        case dict():
            return "".join(map(strings_of, [*value, *value.values()]))
        case tuple() | list():
            return "".join(map(strings_of, value))
    return "".join(map(strings_of, vars(value).values())) if hasattr(value, "__dict__") else ""


# ---- Thoughts are separated from answers, also while the text still streams


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("", "", ""),
        ("Hello.", "", "Hello."),
        ("  Hello.", "", "  Hello."),
        ("<th", "", ""),
        ("\n<think>\nWell", "Well", ""),
        ("<think>\nWell.\n\nSo.</think>\n\nHello <b>you</b>.", "Well.\n\nSo.", "Hello <b>you</b>."),
        ("Well, `</think>` ends it.\n```\n</think>\n```", "", "Well, `</think>` ends it.\n```\n</think>\n```"),
        ("[THINK]Well.[/THINK]Hello.", "Well.", "Hello."),
        ("<seed:think>Well.</seed:think>Hello.", "Well.", "Hello."),
        ("<Thinking>Well.</Thinking>Hello.", "Well.", "Hello."),
        ("<reasoning>\nWell.\n</reasoning>\nHello.", "Well.", "Hello."),
        ("<|begin_of_thought|>Well.<|end_of_thought|>Hello.", "Well.", "Hello."),
        ("◁think▷Well.◁/think▷Hello.", "Well.", "Hello."),
        ("<div>", "", "<div>"),
        ("<think></think>\n\nHello.", "", "Hello."),
        ("I write <think> in the middle", "", "I write <think> in the middle"),
        ("I explain <think> and </think>.", "", "I explain <think> and </think>."),
        ("<thinker> is a word", "", "<thinker> is a word"),
    ],
)
def test_thought_and_answer_are_separated(text, thought, answer):
    assert split(text) == (thought, answer)


def test_a_thought_opened_by_the_prompt_ends_at_its_tag():
    assert split("Well.\n</think>\n\nI say </think>.", "</think>") == ("Well.", "I say </think>.")
    assert split("<think>Well.</think>Hello.", "</think>") == ("Well.", "Hello.")
    assert split("Well. </think>", "[/THINK]") == ("Well. </think>", "")
    assert split("<plan>Well.</plan>Hello.", "</plan>") == ("Well.", "Hello.")


def test_an_unclosed_tag_is_text_once_the_answer_ends():
    text = "<think> is a tag."
    assert split(text) == ("is a tag.", "")
    assert split(text, ending="eos") == ("", text)
    assert split(text, ending="length") == ("is a tag.", "")
    assert split("<th", ending="stopped") == ("", "<th")
    assert split("Well.", "</think>", ending="eos") == ("Well.", "")


def test_the_answer_only_grows_while_text_streams():
    text = "<think>one\ntwo</think>\n\nHello there."
    seen = ""
    for end in range(len(text) + 1):
        answer = split(text[:end])[1]
        assert answer.startswith(seen)
        seen = answer
    assert seen == "Hello there."


def test_a_folded_thought_shows_its_word_count():
    assert summarize("one two", is_open=True) == "▸ thinking … 2 words"
    assert summarize("one two", is_open=False) == "▸ thought, 2 words"
