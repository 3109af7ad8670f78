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

from kvchat.protocol import wire
from kvchat.protocol.figures import Gpu, Snapshot, Stats
from kvchat.protocol.messages import Chat, Failed, Finished, Load, Sampling, Stop, Switch, Text, Turn


def decode(body: bytes) -> wire.Message:
    """Decode like the side that receives such a message."""
    is_event = any(name.encode() in body[:24] for name in wire.EVENTS)
    return (wire.decode_event if is_event else wire.decode_command)(body)


def read(stream: io.BytesIO) -> wire.Message | None:
    body = wire.read(stream)
    return None if body is None else decode(body)


def sent(*messages: wire.Message) -> io.BytesIO:
    return io.BytesIO(b"".join(map(wire.encode, messages)))


def filled(hint: Any) -> Any:
    """A value of the given type, not empty if possible."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return hint(**{name: filled(h) for name, h in typing.get_type_hints(hint).items()})
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return filled(typing.get_args(hint)[0])
    if typing.get_origin(hint) is tuple:
        parts = typing.get_args(hint)
        return (filled(parts[0]),) * 2 if parts[-1] is ... else tuple(map(filled, parts))
    if typing.get_origin(hint) is dict:
        _, values = typing.get_args(hint)
        return {"budget": 512, "tau": 0.5, "list": [1]} if values is Any else {"full": filled(values)}
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)[-1]
    return {int: 7, float: 0.5, str: "ü", bool: True}[hint]


@pytest.mark.parametrize("cls", [*wire.COMMANDS.values(), *wire.EVENTS.values()])
def test_every_message_round_trips(cls):
    message = filled(cls)
    assert read(sent(message)) == message


@given(st.text(), st.integers(0, 2**63 - 1))
def test_any_text_and_number_round_trip(text, tokens):
    clean = text.encode("utf-8", "replace").decode()  # lone surrogates cannot be UTF-8
    assert read(sent(Text(text, tokens))) == Text(clean, tokens)


def test_messages_are_read_in_order_until_the_end():
    stream = sent(Stop(), Chat((Turn("user", "x"),), Sampling(stop=("a", "b"))))
    assert read(stream) == Stop()
    assert read(stream) == Chat((Turn("user", "x"),), Sampling(stop=("a", "b")))
    assert read(stream) is None
    for cut in (1, 4, 9):
        assert read(io.BytesIO(wire.encode(Stop())[:cut])) is None


def test_missing_fields_get_their_defaults_and_none_is_kept():
    body = json.dumps({"type": "Failed", "title": "T"}).encode()
    assert decode(body) == Failed("T", kind="EngineError")
    snapshot = Snapshot("full", {}, 1.0, 2, 3, 4, 5, gpu=Gpu("H200"))
    assert read(sent(snapshot)) == snapshot
    assert read(sent(Finished("eos", "", Stats()))) == Finished("eos", "", Stats())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b"not json",
        b'{"type": "Nothing"}',
        b'{"type": []}',
        b'{"type": "Peek", "start": 1}',
        b'{"type": "Peek", "start": 1, "end": "2"}',
        b'{"type": "Peek", "start": -1, "end": 2}',
        b'{"type": "Chat", "turns": ["x"]}',
        b'{"type": "Text", "text": null, "tokens": 1}',
        b"[" * 100_000,
    ],
)
def test_invalid_messages_are_refused(body):
    with pytest.raises(ValueError, match="protocol"):
        decode(body)


def test_values_that_json_cannot_hold_are_refused_before_sending():
    for value in ({1, 2}, object(), float, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="Switch cannot be sent"):
            wire.encode(Switch("full", {"budget": value}))
    params: dict[str, Any] = {}
    params["params"] = params
    with pytest.raises(ValueError):  # noqa: PT011  # json's message
        wire.encode(Load(given={"full": params}))


def test_streams_of_another_protocol_are_refused():
    with pytest.raises(ValueError, match="does not speak"):
        wire.read(io.BytesIO(b"HTTP/1.1 200 OK"))
    assert wire.parse_length(struct.pack(">I", wire.MAX_MESSAGE_BYTES)) == wire.MAX_MESSAGE_BYTES
