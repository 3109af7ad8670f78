import time
from functools import cache
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.byte_tokenizer import byte_level
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvchat import paths, thoughts
from kvchat.engine.detokenizer import AnswerText, Detokenizer, StopBuffer, hold_back
from kvchat.protocol.messages import Finished, Text, Withdrawn


@cache
def fast() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(paths.bundled_model_dir())


def as_kind(whole: PreTrainedTokenizerBase, is_fast: bool) -> SimpleNamespace:
    """A tokenizer with or without ``tokenizers`` behind it."""
    return SimpleNamespace(
        is_fast=is_fast,
        decode=whole.decode,
        backend_tokenizer=whole.backend_tokenizer,
        convert_ids_to_tokens=whole.convert_ids_to_tokens,
        encode=whole.encode,
    )


def slow() -> SimpleNamespace:
    return as_kind(fast(), is_fast=False)


def pieces(tokenizer: object, ids: list[int], continues: bool = False) -> list[str]:
    detokenizer = Detokenizer(tokenizer, continues)
    return [*map(detokenizer.step, ids), detokenizer.flush()]


# Half of the ids are single bytes, most of which are not whole characters.
FEW = settings(max_examples=30)
random_ids = st.lists(st.one_of(st.integers(0, 8191), st.integers(0, 300)), max_size=40)


@pytest.mark.parametrize("tokenizer", [fast, slow])
@FEW
@given(ids=random_ids)
def test_joined_pieces_are_the_decoded_text(tokenizer, ids):
    assert "".join(pieces(tokenizer(), ids)) == fast().decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("tokenizer", [fast, slow])
@FEW
@given(text=st.text())
def test_pieces_hold_whole_characters_only(tokenizer, text):
    text = text.replace("\ufffd", "")
    ids = [i for character in text for i in fast().encode(character, add_special_tokens=False)]
    made = pieces(tokenizer(), ids)
    assert "".join(made) == text
    assert not any("\ufffd" in piece for piece in made)


def test_character_appears_with_its_last_byte():
    ids = fast().encode("☕")
    assert len(ids) > 1
    assert pieces(fast(), ids) == [""] * (len(ids) - 1) + ["☕", ""]
    assert pieces(fast(), ids[:-1])[-1] == "\ufffd"


@pytest.mark.parametrize("is_fast", [True, False])
def test_spaces_between_words_survive_a_decoder_that_strips_the_first(is_fast):
    backend = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "▁three": 2, "a": 3}))
    backend.decoder = decoders.Metaspace()
    tokenizer = as_kind(PreTrainedTokenizerFast(tokenizer_object=backend), is_fast)
    assert pieces(tokenizer, [0, 1, 2]) == ["one", " two", " three", ""]
    assert pieces(tokenizer, [0, 1, 2], continues=True) == [" one", " two", " three", ""]


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_fallback() -> PreTrainedTokenizerBase:
    """A tokenizer with byte fallback, like Gemma's and Llama's; the id of the byte 0xC3 is 0xC3."""
    words = ["a", "b", "▁c", "<end>", "[THINK]", "[/THINK]"]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(BYTES + words)}))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_special_tokens({"additional_special_tokens": words[3:]})
    return tokenizer


A, B, C, END, THINK, THOUGHT = range(256, 262)


@pytest.mark.parametrize("is_fast", [True, False])
@given(ids=st.lists(st.one_of(st.sampled_from([0xC3, 0xA9, 0xE2, 0x98, 0x95]), st.integers(0, C)), max_size=30))
def test_invalid_bytes_come_as_they_are_decoded(is_fast, ids):
    whole = byte_fallback()
    assert "".join(pieces(as_kind(whole, is_fast), ids)) == whole.decode(ids, skip_special_tokens=True)


def test_text_continues_after_an_invalid_byte():
    wrong = "\ufffd" * 3
    assert pieces(byte_fallback(), [0xC3, 0xA9, 0xA9, A, 0xC3, 0xA9, B]) == ["", "", "", f"{wrong}a", "", "", "éb", ""]


def test_many_invalid_bytes_take_little_time():
    begun = time.process_time()
    for tokenizer, wrong in ((byte_fallback(), 0xFF), (fast(), fast().convert_tokens_to_ids("ÿ"))):
        assert "".join(pieces(tokenizer, [wrong] * 20_000)).count("\ufffd") == 20_000
    assert time.process_time() - begun < 10


def run_answer(stop: list[str], ids: list[int]) -> tuple[str, str, int]:
    """The shown text of an answer, its decoded text, and the number of its ids."""
    text = AnswerText(byte_fallback(), stop)
    shown = ""
    for number, token in enumerate(ids):
        shown += text.add(token)
        if text.stopped:
            return shown, text.decoded, number + 1
    shown += text.finish()
    assert shown == text.shown
    return shown, text.decoded, len(ids)


@pytest.mark.parametrize(
    ("stop", "shown", "ids"),
    [
        (["<end>"], "ab", 3),
        (["b<end> c"], "a", 4),
        (["<end>a"], "ab cb", 6),
        (["<end><end>"], "ab cb", 6),
        (["[THINK]"], "ab cb", 6),
        ([], "ab cb", 6),
    ],
)
def test_stop_strings_may_contain_control_tokens(stop, shown, ids):
    assert run_answer(stop, [A, B, END, C, B, END]) == (shown, "ab cb"[: {3: 2, 4: 4}.get(ids, 5)], ids)


def test_control_tokens_around_a_thought_are_text():
    ids = [THINK, A, THOUGHT, B, END]
    assert run_answer([], ids)[:2] == ("[THINK]a[/THINK]b",) * 2
    assert run_answer(["[/THINK]"], ids) == ("[THINK]a", "[THINK]a[/THINK]", 3)


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
def test_stop_strings_are_found_across_pieces(stop, parts):
    text = "".join(parts)
    assert run(stop, parts) == run(stop, [text]) == run(stop, list(text))
    shown, found = run(stop, parts)
    assert not any(word in shown for word in stop)
    assert text.startswith(shown + found)
    assert found or shown == text


def test_only_the_start_of_a_stop_string_is_held_back():
    buffer = StopBuffer(["\nUser:", "STOP"])
    shown = [buffer.feed(piece) for piece in ["Hello\n", "Us", "ers \nU", "ser", ": x"]]
    assert shown == ["Hello", "", "\nUsers ", "", ""]
    assert buffer.found == "\nUser:"
    assert buffer.flush() == ""


def test_first_complete_stop_string_ends_the_text():
    assert run(["abcd", "bc"], ["abcd"]) == ("a", "bc")
    assert run([], ["abc"]) == ("abc", "")


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (
            "<|channel|>analysis<|message|>Say é.<|end|><|start|>assistant<|channel|>final<|message|>Hello.",
            "<think>Say é.</think>\n\nHello.",
        ),
        ("<|channel|>final<|message|>Hello.", "Hello."),
        ("Hello.", "Hello."),
        ("<|channel|>analysis<|message|>Say", "<think>Say"),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|> Hello.",
            "I look. Hello.",
        ),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b", "<think>ab"),
        ("<|message|>Hello.", "Hello."),
        ("<|channel|>fin", ""),
    ],
)
def test_parts_of_an_answer_become_thought_and_reply(written, shown):
    tokenizer = byte_level(markers=thoughts.PARTS)
    text = AnswerText(tokenizer, ())
    ids = tokenizer.encode(written, add_special_tokens=False)
    pieces = [text.add(token) for token in ids]
    pieces.append(text.finish())
    assert "".join(pieces) == text.shown == shown
    assert text.decoded == tokenizer.decode(ids, skip_special_tokens=True)


def test_continued_answer_ends_its_unfinished_thought():
    tokenizer = byte_level(markers=thoughts.PARTS)
    text = AnswerText(tokenizer, (), in_thought=True)
    written = "more<|end|><|start|>assistant<|channel|>final<|message|>Hello."
    for token in tokenizer.encode(written, add_special_tokens=False):
        text.add(token)
    text.finish()
    assert thoughts.split(f"<think>hm {text.shown}") == ("hm more", "Hello.")
    begun = "<|start|>user<|message|>Hi.<|end|><|start|>assistant"
    assert [thoughts.goes_on(begun + more) for more in ("", f"{thoughts.THOUGHT}hm", f"{thoughts.FINAL}Hel")] == [
        *(False, True, False)
    ]


# ---- Text that may be withdrawn is held back


def test_revocable_text_is_held_back():
    def events():
        for i in range(20):
            yield Text(f"{i},", 1)
        yield Withdrawn(6, 2)
        yield Text("end", 1)
        yield Finished("eos", "", None)

    shown = list(hold_back(events(), lambda: 16))
    assert "".join(e.text for e in shown if isinstance(e, Text)) == "".join(f"{i}," for i in range(18)) + "end"
    assert not any(isinstance(event, Withdrawn) for event in shown)


def test_without_recovery_nothing_is_held_back():
    def events():
        yield Text("a", 1)
        assert shown == ["a"]
        yield Text("b", 1)

    shown = []
    for event in hold_back(events(), lambda: 0):
        shown.append(event.text)
    assert shown == ["a", "b"]
