"""Conversations without a name: found by their prefix, kept when others come in between."""

from dataclasses import replace

import pytest

from kvchat.engine.session import Session
from kvchat.protocol.messages import Finished, Keeping, Load, Resumed, Sampling, Started, Turn, Variant

GREEDY = Sampling(temperature=0, max_new_tokens=8)
SEA = "The sea was calm and the whale went on. " * 12
TITLE = (Turn("user", "Give a title of three words to this talk: " + SEA),)


@pytest.fixture
def session(model):
    opened = Session(model, Load(keeping=Keeping(2**30)))
    yield opened
    opened.close()


def ask(session: Session, *turns: Turn, **options) -> tuple[Started, str, str]:
    """The Started event, where stored tokens came from, and the text of the answer."""
    events = list(session.answer(turns, GREEDY, None, None, **options))
    started = next(event for event in events if isinstance(event, Started))
    where = next((event.where for event in events if isinstance(event, Resumed)), "")
    assert isinstance(events[-1], Finished)
    return started, where, events[-1].text


def converse(session: Session, *questions: str) -> tuple[Turn, ...]:
    """Ask the questions one after the other; return the conversation."""
    turns: tuple[Turn, ...] = ()
    for question in questions:
        turns = (*turns, Turn("user", question))
        turns = (*turns, Turn("assistant", ask(session, *turns)[2]))
    return turns


def new_tokens(session: Session, *turns: Turn) -> int:
    started = ask(session, *turns)[0]
    return started.prompt_tokens - started.reused_tokens


def test_interleaved_conversations_are_reused(session):
    turns = converse(session, SEA)
    stored = session.total
    titled = ask(session, *TITLE)[0]
    started, where, _ = ask(session, *turns, Turn("user", "And then?"))
    assert (started.reused_tokens, where) == (stored, "memory")
    assert ask(session, *TITLE)[0].reused_tokens == titled.prompt_tokens - 1


def test_short_conversations_are_parked_too(session):
    turns = converse(session, SEA[:160])
    stored = session.total
    ask(session, Turn("user", "Give a title."))  # its first tokens are the same
    assert 32 < ask(session, *turns, Turn("user", "And then?"))[0].reused_tokens == stored < 64


def test_both_branches_of_a_conversation_are_reused(session):
    question = Turn("user", SEA)
    turns = converse(session, SEA)
    other = ask(session, question)[0]
    assert other.reused_tokens == other.prompt_tokens - 1
    further = Turn("user", "And then?")
    branch = (question, Turn("assistant", "Quite another answer, of many words that nobody has written."), further)
    ask(session, *branch)
    assert new_tokens(session, *turns, further) <= new_tokens(session, *branch) + 20


def test_longest_stored_prefix_wins(session):
    ask(session, Turn("system", SEA), Turn("user", "Hello!"))
    longer = converse(session, SEA, "And then?")
    ask(session, *TITLE)
    started, where, _ = ask(session, *longer[:3], Turn("assistant", "No."), Turn("user", "Why not?"))
    assert where == "memory"
    assert started.prompt_tokens - started.reused_tokens < 30


def test_omitted_thoughts_do_not_start_a_new_conversation(session):
    question = Turn("user", SEA)
    ask(session, question)
    names = [session._prefix_cache.current]
    ask(session, question, Turn("assistant", "Short."), Turn("user", "And then?"))
    names.append(session._prefix_cache.current)
    assert names[0] == names[1]
    assert session._prefix_cache.parked_bytes == 0


def test_saved_conversations_are_found(model, tmp_path):
    model = replace(model, revision="1")
    load = Load(keeping=Keeping(0, 2**30, str(tmp_path)))
    first = Session(model, load)
    turns = converse(first, SEA)
    stored, name = first.total, first._prefix_cache.current
    first.close(60)
    second = Session(model, load)
    try:
        started, where, _ = ask(second, *turns, Turn("user", "And then?"))
        assert (started.reused_tokens, where) == (stored, "disk")
        assert second._prefix_cache.current == name
    finally:
        second.close()
    assert len(list(tmp_path.iterdir())) == 1


def test_plain_text_is_continued_without_a_template(session):
    text = Turn("text", "Once upon a time, there was a whale")
    started, _, continued = ask(session, text)
    assert session._loop.stored.ids[: started.prompt_tokens] == session.tokenize((text,))
    assert continued
    ids = session._model.tokenizer.encode("Once upon a time, there was a whale", add_special_tokens=True)
    assert session.tokenize((text,)) == ids
    drawn = session.token_ids[0]
    session.truncate(0)
    assert drawn == int(session.prefill(ids).argmax())
    session._loop.encoder.stop = ("\nUser:",)
    assert session._loop.ending((text,), GREEDY).stop == ()
    assert session._loop.ending((Turn("user", "Hello!"),), GREEDY).stop == ("\nUser:",)


def test_text_edited_at_its_end_parks_nothing(session):
    for end in ("went", "went o", "went on"):
        ask(session, Turn("text", SEA + end))
    assert session._prefix_cache.parked_bytes == 0


def test_plain_text_may_contain_control_tokens(session):
    token = next(iter(session._loop.ends))
    spelled = session._model.tokenizer.convert_ids_to_tokens(token)
    assert token in session.tokenize((Turn("text", f"a{spelled}b"),))
    assert session.tokenize((Turn("user", f"a{spelled}b"),)).count(token) < 2


def test_variant_applies_to_its_answer_only(session):
    narrow = Variant("streaming", {"budget": 128})
    ask(session, Turn("user", SEA), variant=narrow)
    assert (session.info.mode, session.info.params["budget"]) == ("streaming", 128)
    ask(session, *TITLE, variant=narrow)
    ask(session, Turn("user", SEA), variant=Variant("streaming"))
    assert session.info.params["budget"] != 128
    ask(session, Turn("user", SEA), variant=Variant("full"))
    assert session.info.mode == "full"
