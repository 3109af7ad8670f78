"""Turns always alternate along every path, whatever happens to an answer, and nothing said is replaced."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvchat.conversations.conversation import TITLE_CHARACTERS, Conversation
from kvchat.protocol.figures import Stats
from kvchat.protocol.messages import Sampling, Turn


def said(*texts: str) -> Conversation:
    """A conversation of questions and answers in turn."""
    conversation = Conversation()
    for number, text in enumerate(texts):
        conversation.answer(text, "eos") if number % 2 else conversation.ask(text)
    return conversation


def texts(conversation: Conversation) -> list[str]:
    return [turn.content for turn in conversation.turns]


def test_a_command_carries_the_path():
    conversation = Conversation("be brief")
    conversation.ask("hi")
    assert conversation.command(Sampling()).turns == (Turn("system", "be brief"), Turn("user", "hi"))
    assert Conversation().command(Sampling()).turns == ()


def test_a_question_without_an_answer_is_withdrawn():
    conversation = said("one", "1")
    assert conversation.withdraw() == ""
    conversation.ask("two")
    assert conversation.withdraw() == "two"
    assert texts(conversation) == ["one", "1"]


def test_a_question_with_an_earlier_answer_is_not_withdrawn():
    conversation = said("one", "1")
    conversation.go_to(conversation.leaf.parent)
    assert conversation.withdraw() == ""
    assert texts(conversation) == ["one", "1"]


def test_an_unanswered_question_gives_way_to_the_next_and_stays():
    conversation = said("one", "1", "two")
    conversation.ask("three")
    assert texts(conversation) == ["one", "1", "three"]
    assert [message.text for message in conversation.siblings(conversation.leaf.id)] == ["two", "three"]


def test_an_answer_grows_and_ends_in_place():
    conversation = said("one")
    begun = conversation.answer("1")
    ended = conversation.answer("1.", "eos", "2 tok", Stats(generated_tokens=2))
    assert (begun.id, begun.ending, ended.receipt) == (ended.id, "", "2 tok")
    assert texts(conversation) == ["one", "1."]
    assert conversation.last_text() == "1."
    assert conversation.stats == [Stats(generated_tokens=2)]


def test_answering_again_adds_a_sibling():
    conversation = said("one", "1", "two", "2")
    conversation.go_to(conversation.leaf.parent)
    conversation.answer("zwei", "eos")
    assert texts(conversation)[-1] == "zwei"
    first, second = conversation.siblings(conversation.leaf.id)
    assert (first.text, second.text) == ("2", "zwei")
    conversation.select(first.id)
    assert texts(conversation) == ["one", "1", "two", "2"]


def test_selecting_leads_to_the_newest_message_below():
    conversation = said("one", "1", "two", "2")
    question = conversation.path[0]
    conversation.go_to(None)
    conversation.ask("other")
    conversation.select(question.id)
    assert texts(conversation) == ["one", "1", "two", "2"]


def test_a_fork_is_a_copy_up_to_a_message():
    conversation = said("one", "1", "two", "2")
    fork = conversation.fork(conversation.path[1].id)
    assert texts(fork) == ["one", "1"]
    assert not set(fork.messages) & set(conversation.messages)
    assert fork.id != conversation.id
    assert len(fork.changes().changed) == 2


def test_the_title_is_the_first_question_shortened():
    conversation = said("What  is\na cat?", "1", "and more")
    assert conversation.title == "What is a cat?"
    conversation.rename("x " * 100)
    assert len(conversation.title) <= TITLE_CHARACTERS
    assert conversation.title.endswith("…")


def test_changes_are_there_until_they_are_marked_as_saved():
    conversation = Conversation("system")
    assert conversation.changes() is None
    question = conversation.ask("one")
    conversation.answer("1")
    changes = conversation.changes()
    assert [message.text for message in changes.changed] == ["one", "1"]
    header = changes.header
    assert (header.leaf, header.system, header.title) == (conversation.leaf.id, "system", "one")
    assert conversation.changes() == changes
    conversation.answer("1!", "eos")
    conversation.mark_saved(changes)
    assert [message.text for message in conversation.changes().changed] == ["1!"]
    conversation.mark_saved(conversation.changes())
    assert conversation.changes() is None
    conversation.go_to(question.id)
    assert conversation.changes().changed == []


def test_a_withdrawn_question_is_removed_from_disk_too():
    conversation = said("one")
    question = conversation.leaf.id
    conversation.mark_saved(conversation.changes())
    conversation.withdraw()
    changes = conversation.changes()
    assert (changes.removed, changes.changed) == ([question], [])
    conversation.mark_saved(changes)
    assert conversation.changes() is None


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ask", "answer", "end", "withdraw", "again", "before", "select", "go_to"]), st.integers()
        )
    )
)
def test_any_order_of_operations_alternates_and_loses_no_answer(steps):
    conversation, ended = Conversation(), set()
    for number, (step, choice) in enumerate(steps):
        messages = list(conversation.messages)
        message = messages[choice % len(messages)] if messages else None
        match step:
            case "ask":
                conversation.ask(f"q{number}")
            case "answer" | "end" if conversation.leaf and conversation.leaf.role == "user":
                ended.add(conversation.answer(f"a{number}", "eos").id)
            case "withdraw":
                conversation.withdraw()
            case "again" if conversation.leaf and conversation.leaf.role == "assistant":
                conversation.go_to(conversation.leaf.parent)
            case "before" if conversation.leaf and conversation.leaf.role == "user":
                conversation.go_to(conversation.leaf.parent)
            case "select" | "go_to" if message:
                getattr(conversation, step)(message)
        roles = [turn.role for turn in conversation.turns]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"] * (len(roles) % 2)
        assert ended <= set(conversation.messages)
        for one in conversation.messages.values():
            family = [other for other in conversation.messages.values() if other.parent == one.parent]
            assert conversation.siblings(one.id) == family


class Counting(dict):
    """How many messages were looked at."""

    looked = 0

    def __getitem__(self, id):
        self.looked += 1
        return super().__getitem__(id)

    def values(self):
        self.looked += len(self)
        return super().values()


def test_finding_siblings_takes_no_longer_in_a_long_conversation():
    conversation = said(*map(str, range(2000)))
    conversation.messages = Counting(conversation.messages)
    for message in conversation.path:
        assert conversation.siblings(message.id) == [message]
    assert conversation.messages.looked <= 5 * 2000
