"""Messages and the tokens that stand for them: what is read of each."""

from __future__ import annotations

from kvchat.conversations.conversation import Conversation
from kvchat.protocol.figures import Snapshot, Stats
from kvchat.tui.state import UNFINISHED, Mark, mark, message_at, message_ranges


def talk() -> Conversation:
    conversation = Conversation("be brief")
    for text, begin, end in (("one", 20, 64), ("two", 90, 320)):
        conversation.ask(text)
        conversation.answer("answer", "eos", "", Stats(prompt_tokens=begin, total_tokens=end))
    return conversation


def snapshot(ribbon: str, attended: str, total: int) -> Snapshot:
    return Snapshot("streaming", {}, 1.0, total, 4096, 0, 0, ribbon=ribbon, attended=attended)


def test_ranges_follow_the_counts_of_the_answers():
    conversation = talk()
    one, first, two, second = (message.id for message in conversation.path)
    expected = {one: (0, 20), first: (20, 64), two: (64, 90), second: (90, 320)}
    assert message_ranges(conversation.path, None, 400) == expected
    three = conversation.ask("three").id
    assert message_ranges(conversation.path, None, 400) == expected
    running = message_ranges(conversation.path, 350, 400)
    assert running == {**expected, three: (320, 350), UNFINISHED: (350, 400)}
    reading = message_ranges(conversation.path, 350, 330)
    assert reading[three] == (320, 330)
    conversation.answer("cut off", "cut off")
    assert message_ranges(conversation.path, None, 400) == expected


def test_the_message_of_a_token():
    conversation = talk()
    ranges = message_ranges(conversation.path, None, 400)
    one, first, two, second = ranges
    assert [message_at(ranges, token) for token in (0, 20, 63, 64, 319, 320)] == [one, first, first, two, second, None]


def test_marks_tell_state_and_share():
    conversation = talk()
    one, first, two, second = (message.id for message in conversation.path)
    ranges, read = message_ranges(conversation.path, None, 320), snapshot("SXXXXXWWWW", "9000009999", 320)
    assert {id: mark(*tokens, read) for id, tokens in ranges.items()} == {
        one: Mark("S", 1.0),
        first: Mark("S", 0.5),
        two: Mark("X", 0.0),
        second: Mark("X", 0.5),
    }
    assert mark(*ranges[first], read, pinned=True) == Mark("P", 0.5)
    stored = snapshot("SX", "90", 64)
    marked = [mark(*tokens, stored) is not None for tokens in message_ranges(conversation.path, None, 64).values()]
    assert marked == [True, True, False, False], "what is not stored has no mark"
    assert mark(0, 64, snapshot("", "", 64)) is None
