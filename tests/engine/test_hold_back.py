"""Text is held back as long as it may be withdrawn."""

from __future__ import annotations

from kvchat.engine.detokenizer import hold_back
from kvchat.protocol.messages import Finished, Text, Withdrawn


def test_text_is_held_back_as_long_as_it_may_be_withdrawn():
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
