"""The list of conversations, driven by keys."""

from dataclasses import replace

import pytest
from support.app_driver import choices, is_open, press, texts
from support.keeping import save_changes
from textual.widgets import Input, OptionList

from kvchat.conversations.conversation import Conversation
from kvchat.conversations.store import MARK, ConversationStore, Summary
from kvchat.tui.screens.choosing import ConversationsScreen, describe_age, describe_saved
from kvchat.tui.widgets.bars import KeyHints
from kvchat.tui.widgets.messages import Question
from kvchat.tui.widgets.welcome import ConversationColumn


@pytest.fixture
def config(config, tmp_path):
    path = tmp_path / "data" / "chats.db"
    store = ConversationStore(path)
    for question in ("My cat is called Biscuit.", "My dog is called Rex."):
        conversation = Conversation()
        conversation.ask(question)
        conversation.answer(f"Yes: {question}", "eos")
        save_changes(store, conversation)
    store.close()
    return replace(config, database=path)


def shown(app):
    return is_open(app, ConversationsScreen) and app.screen.query(OptionList)


async def test_a_conversation_is_found_and_opened(running, config):
    async with running(config, size=(80, 24)) as (app, _pilot, until):
        await until(lambda: app.controller.archive._store)
        press(app, "f9")
        await until(lambda: shown(app) and len(choices(app)) == 2)
        assert choices(app)[0].startswith("My dog is called Rex.   just now · 2 messages")
        press(app, *"bisc")
        await until(lambda: len(choices(app)) == 1 and "called Biscuit.\n" in f"{choices(app)[0]}\n")
        press(app, "enter")
        await until(lambda: app.screen is app.chat)
        await until(lambda: texts(app.chat.query(Question)) == ["My cat is called Biscuit."])
        await app.chat.run_command("/chats rex")
        await until(lambda: shown(app) and len(choices(app)) == 1)
        assert app.screen.query_one(Input).value == "rex"


@pytest.mark.parametrize(("width", "is_shown"), [(200, True), (160, False)])
async def test_a_click_in_the_column_opens_a_conversation(running, config, width, is_shown):
    async with running(config, size=(width, 60)) as (app, pilot, until):
        column = app.chat.query_one(ConversationColumn)
        await until(lambda: app.controller._listed if is_shown else app.controller.archive._store)
        await until(lambda: column.option_count == 2 * is_shown)
        assert bool(column.display) == is_shown
        if is_shown:
            await pilot.click(column, offset=(3, 2))
            await until(lambda: texts(app.chat.query(Question)) == ["My cat is called Biscuit."])
            await until(lambda: column.highlighted == 1)
            press(app, "f7", "f7")  # all figures, then none
            await until(lambda: not column.display)


async def test_a_conversation_is_renamed_in_the_list(running, config):
    async with running(config) as (app, _pilot, until):
        await until(lambda: app.controller.archive._store)
        press(app, "f9")
        await until(lambda: shown(app) and len(choices(app)) == 2)
        await until(lambda: "^R rename" in app.screen.query_one(KeyHints).render().plain)
        press(app, "down", "ctrl+r", "end", "!", "enter", "ctrl+r", "x", "escape")
        await until(lambda: [row.partition("   ")[0] for row in choices(app)] == [REX, "My cat is called Biscuit.!"])
        await until(lambda: "⏎ open" in app.screen.query_one(KeyHints).render().plain)
        assert app.screen.highlighted.title == "My cat is called Biscuit.!"
        press(app, "ctrl+r", "ctrl+u", "enter", "enter")
        await until(lambda: app.screen is app.chat)
        await until(lambda: app.controller.state.conversation.title == "My cat is called Biscuit.!")
        await app.controller.rename("Present", app.controller.state.conversation.id)
        assert app.controller.state.conversation.title == "Present"


REX = "My dog is called Rex."
KEYS = {
    "down down down up ctrl+d up": ["cat"],
    "pagedown delete": ["dog"],
    "c a t ctrl+d": ["dog"],
    "down ctrl+d ctrl+z ctrl+d": ["cat"],
}


@pytest.mark.parametrize("keys", KEYS)
async def test_keys_pressed_at_once_keep_their_order(running, config, keys):
    async with running(config) as (app, _pilot, until):
        await until(lambda: app.controller.archive._store)
        press(app, "f9")
        await until(lambda: shown(app) and len(choices(app)) == 2)
        press(app, *keys.split(), "escape")
        await until(lambda: app.screen is app.chat)
        remaining = await app.controller.archive.search("")
        assert [summary.title.split()[1] for summary in remaining] == KEYS[keys]


def test_a_row_shows_title_age_size_and_excerpt():
    summary = Summary(id="1", title="a\x1bb", updated=0.0, messages=3, excerpt=f"the {MARK[0]}cat{MARK[1]}\nsat")
    line = describe_saved(summary, 7300.0, 80)
    assert str(line) == "a␛b   2 h ago · 3 messages\n  the cat sat"
    assert any("bold" in str(span.style) for span in line.spans)


def test_excerpts_have_no_code_fences():
    cut_off = f"use:\n```python\n{MARK[0]}print{MARK[1]}(1)\n```\nor ~~~ so … ```js"
    line = describe_saved(Summary(id="1", title="t", updated=0.0, messages=1, excerpt=cut_off), 0.0, 80)
    assert str(line).split("\n")[1] == "  use: print(1) or so … js"


@pytest.mark.parametrize(
    ("age", "words"), [(0, "just now"), (59, "just now"), (60, "1 min ago"), (86400 * 3, "3 d ago")]
)
def test_ages_are_described(age, words):
    assert describe_age(age) == words
