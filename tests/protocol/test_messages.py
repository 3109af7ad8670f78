from __future__ import annotations

import dataclasses
import io
import json
import struct
import types
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvchat.protocol import messages
from kvchat.protocol.messages import Chat, Failed, Finished, Gpu, Message, Sampling, Snapshot, Stats, Stop, Text, Turn


def sent(*messages: Message) -> io.BytesIO:
    return io.BytesIO(b"".join(map(messages.encode, messages)))


def filled(hint: Any) -> Any:
    """A value of the given type that is not empty where it can be otherwise."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return hint(**{name: filled(h) for name, h in typing.get_type_hints(hint).items()})
    if isinstance(hint, types.UnionType):
        return filled(typing.get_args(hint)[0])
    if typing.get_origin(hint) is tuple:
        return (filled(typing.get_args(hint)[0]),) * 2
    if typing.get_origin(hint) is dict:
        return {"budget": 512, "tau": 0.5, "list": [1]}
    return {int: 7, float: 0.5, str: "ü", bool: True}[hint]


@pytest.mark.parametrize("cls", messages.TYPES.values(), ids=messages.TYPES)
def test_every_message_comes_back_as_it_was(cls: type) -> None:
    message = filled(cls)
    assert messages.read(sent(message)) == message


@given(st.text(), st.integers())
def test_any_text_and_number_comes_back(text: str, tokens: int) -> None:
    clean = text.encode("utf-8", "replace").decode()  # lone surrogates cannot be UTF-8
    assert messages.read(sent(Text(text, tokens))) == Text(clean, tokens)


def test_messages_follow_each_other_until_the_end() -> None:
    stream = sent(Stop(), Chat((Turn("user", "x"),), Sampling(stop=("a", "b"))))
    assert messages.read(stream) == Stop()
    assert messages.read(stream) == Chat((Turn("user", "x"),), Sampling(stop=("a", "b")))
    assert messages.read(stream) is None


@pytest.mark.parametrize("cut", [1, 4, 9])
def test_a_message_cut_short_is_the_end(cut: int) -> None:
    assert messages.read(io.BytesIO(messages.encode(Stop())[:cut])) is None


def test_missing_fields_take_their_defaults_and_none_stays_none() -> None:
    body = json.dumps({"type": "Failed", "title": "T"}).encode()
    assert messages.decode(body) == Failed("T", kind="EngineError")
    snapshot = Snapshot("full", {}, 1.0, 2, 3, 4, 5, gpu=Gpu("H200"))
    assert messages.read(sent(snapshot)) == snapshot
    assert messages.read(sent(Finished("eos", "", Stats()))) == Finished("eos", "", Stats())


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"{}",
        b"not json",
        b'{"type": "Nothing"}',
        b'{"type": "Stop", "now": 1}',
        b'{"type": "Peek", "start": 1}',
        b"\xff",
    ],
)
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # json's, unicode's and our own are all meant
        messages.decode(body)


def test_a_stream_that_speaks_something_else_is_refused_before_it_is_read() -> None:
    with pytest.raises(ValueError, match="does not speak"):
        messages.read(io.BytesIO(b"HTTP/1.1 200 OK"))
    assert messages.parse_length(struct.pack(">I", messages.MAX_MESSAGE_BYTES)) == messages.MAX_MESSAGE_BYTES
