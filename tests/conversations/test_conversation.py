"""Turns alternate along every path, whatever happens to an answer, and no text is replaced."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.message import lacks

from kvchat.conversations import attachments, comparison
from kvchat.conversations.comparison import COLUMNS, Comparison, first_difference, rows, verdicts
from kvchat.conversations.conversation import TITLE_CHARACTERS, Conversation
from kvchat.errors import UsageError
from kvchat.protocol.figures import Agreement, Run, Stats
from kvchat.protocol.messages import Sampling, Turn, Variant


def dialogue(*texts: str) -> Conversation:
    """A conversation of alternating questions and answers."""
    conversation = Conversation()
    for number, text in enumerate(texts):
        conversation.answer(text, "eos") if number % 2 else conversation.ask(text)
    return conversation


def texts(conversation: Conversation) -> list[str]:
    return [turn.content for turn in conversation.turns]


def test_a_command_contains_the_current_path():
    conversation = Conversation("be brief")
    conversation.ask("hi")
    assert conversation.command(Sampling()).turns == (Turn("system", "be brief"), Turn("user", "hi"))
    assert Conversation().command(Sampling()).turns == ()


def test_only_an_unanswered_question_is_withdrawn():
    conversation = dialogue("one", "1")
    assert conversation.withdraw() == ""
    conversation.ask("two")
    assert conversation.withdraw() == "two"
    assert texts(conversation) == ["one", "1"]
    conversation.go_to(conversation.leaf.parent)
    assert conversation.withdraw() == "", "it has an answer"
    assert texts(conversation) == ["one", "1"]


def test_a_second_question_becomes_a_sibling_of_an_unanswered_one():
    conversation = dialogue("one", "1", "two")
    conversation.ask("three")
    assert texts(conversation) == ["one", "1", "three"]
    assert [message.text for message in conversation.siblings(conversation.leaf.id)] == ["two", "three"]


def test_an_answer_grows_in_place():
    conversation = dialogue("one")
    begun = conversation.answer("1")
    ended = conversation.answer("1.", "eos", "2 tok", Stats(generated_tokens=2))
    assert (begun.id, begun.ending, ended.receipt) == (ended.id, "", "2 tok")
    assert texts(conversation) == ["one", "1."]
    assert conversation.last_text() == "1."
    assert conversation.stats == [Stats(generated_tokens=2)]


def test_answering_again_adds_a_sibling():
    conversation = dialogue("one", "1", "two", "2")
    conversation.go_to(conversation.leaf.parent)
    conversation.answer("zwei", "eos")
    assert texts(conversation)[-1] == "zwei"
    first, second = conversation.siblings(conversation.leaf.id)
    assert (first.text, second.text) == ("2", "zwei")
    conversation.select(first.id)
    assert texts(conversation) == ["one", "1", "two", "2"]


def test_selecting_a_message_leads_to_its_newest_descendant():
    conversation = dialogue("one", "1", "two", "2")
    question = conversation.path[0]
    conversation.go_to(None)
    conversation.ask("other")
    conversation.select(question.id)
    assert texts(conversation) == ["one", "1", "two", "2"]


def test_a_fork_is_a_copy_up_to_a_message():
    conversation = dialogue("one", "1", "two", "2")
    fork = conversation.fork(conversation.path[1].id)
    assert texts(fork) == ["one", "1"]
    assert not set(fork.messages) & set(conversation.messages)
    assert fork.id != conversation.id
    assert len(fork.changes().changed) == 2


def test_the_title_is_the_shortened_first_question():
    conversation = dialogue("What  is\na cat?", "1", "and more")
    assert conversation.title == "What is a cat?"
    conversation.rename("x " * 100)
    assert len(conversation.title) <= TITLE_CHARACTERS
    assert conversation.title.endswith("…")


def test_changes_remain_until_marked_as_saved():
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


def test_changes_include_a_withdrawn_question():
    conversation = dialogue("one")
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
def test_turns_alternate_and_answers_survive_any_operations(steps):
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
    """Counts the messages that are looked up."""

    lookups = 0

    def __getitem__(self, id):
        self.lookups += 1
        return super().__getitem__(id)

    def values(self):
        self.lookups += len(self)
        return super().values()


def test_finding_siblings_takes_few_lookups_per_message():
    conversation = dialogue(*map(str, range(2000)))
    conversation.messages = Counting(conversation.messages)
    for message in conversation.path:
        assert conversation.siblings(message.id) == [message]
    assert conversation.messages.lookups <= 5 * 2000


# ---- Comparisons as tables, verdicts and files


STATS = Stats(decode_tokens_per_s=41.25, read_share=0.125, recalled_bytes=3 * 2**20, recall_hit_rate=0.9)
VARIANTS = (Variant("full"), Variant("speculative", {"budget": 256}), Variant("sync"), Variant("freeze"))
RUNS = (
    Run("full", {}, ("A", " b"), "eos", Stats(read_share=1.0)),
    Run("speculative", {"budget": 256}, ("A", " c"), "eos", STATS, Agreement(1, 1000, 0.875, 0.04, 1.5)),
    Run("sync", {"budget": None}, ("A", " b"), "eos", Stats(read_share=1.0), Agreement(None, 9, 1.0, None, None)),
    Run("freeze", {}, refusal="It does not fit."),
)
DONE = Comparison("What?", "bundled", Sampling(seed=3), 1234, VARIANTS, RUNS)


def test_the_table_shows_a_dash_for_missing_figures():
    assert rows(DONE) == [
        ("full", "n/a", "100 %", "0 B", "–", "–", "–", "–"),
        ("speculative budget=256", "41.2", "12 %", "3.0 MiB", "90 %", "1", "88 %", "0.040"),
        ("sync", "n/a", "100 %", "0 B", "–", "all", "100 %", "n/a"),
        ("freeze", "refused", "–", "–", "–", "–", "–", "–"),
    ]
    assert all(len(row) == len(COLUMNS) for row in rows(DONE))


def test_verdicts_say_where_and_how_far_runs_diverge():
    speculative, sync, freeze = verdicts(DONE)
    assert not lacks(speculative, "speculative budget=256", "token 2", "88 % of 1,000", "KL 0.040", "1.500")
    assert not lacks(sync, "sync draws the same tokens as full", "a smaller budget")
    full = Run("full", {"resident": 128}, ("A", " b"), "eos", Stats(read_share=1.0), Agreement(None, 9, 1.0, 0.0, 0.0))
    again = replace(DONE, variants=(Variant("full"), Variant("full", {"resident": 128})), runs=(RUNS[0], full))
    assert verdicts(again)[0].endswith("at worst)."), "no advice where there is no budget"
    assert "It does not fit." in freeze
    assert first_difference(RUNS) == 1
    assert first_difference(RUNS[:1]) is None


def test_files_contain_every_figure_and_are_never_overwritten(tmp_path):
    comparison.write(DONE, tmp_path / "one.md")
    text = (tmp_path / "one.md").read_text()
    assert "| speculative budget=256 | 41.2 |" in text
    assert "1,234 prompt tokens" in text
    comparison.write(DONE, tmp_path / "one.json")
    data = json.loads((tmp_path / "one.json").read_text())
    assert (data["format"], data["version"]) == ("kvchat-comparison", 1)
    assert data["runs"][1]["agreement"]["kl_max"] == 1.5
    for name in ("one.md", "one.txt"):
        with pytest.raises(UsageError):
            comparison.write(DONE, tmp_path / name)


# ---- Files in a question: fenced so that they can be found again


@pytest.mark.parametrize("text", ["", "a", "a\n", "```py\nx\n```\n", "``````\n", "File b:\n```\nx\n```", "\n\n", "é‮\n"])
def test_fenced_files_and_the_text_around_them_are_found(text):
    block = attachments.fenced("notes.md", text)
    found = list(attachments.pieces(f"{block}\n\nWhat is it?"))
    assert [(piece.text, piece.name) for piece in found] == [(block, "notes.md"), ("\n\nWhat is it?", "")]
    assert text in block


def test_an_unclosed_fence_is_text_and_hides_no_later_file():
    block = attachments.fenced("b", "text")
    found = list(attachments.pieces(f"File a:\n`````\nx\n\n{block}\nand"))
    assert [piece.name for piece in found] == ["", "b", ""]
    assert found[1].label == "[b · 5 B]"


def test_attached_files_are_folded_to_labels():
    question = f"{attachments.fenced('a.txt', 'x' * 2048)}\n\n{attachments.fenced('b', 'y')}\n\nCompare them"
    assert attachments.folded(question) == "[a.txt · 2.0 KiB]\n[b · 2 B]\nCompare them"
    assert attachments.folded("\nno file\n") == "\nno file\n"
    conversation = Conversation()
    conversation.ask(question)
    assert (conversation.title, conversation.last_text()) == ("Compare them", question)
    assert "a.txt" in dialogue(attachments.fenced("a.txt", "words")).title
