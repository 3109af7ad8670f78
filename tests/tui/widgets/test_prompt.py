"""Pastes: literal when small, folded when large, whole when sent."""

import time

from support.app_driver import finished, press, prompt
from textual import events

from kvchat.errors import UsageError
from kvchat.tui.state import Phase
from kvchat.tui.widgets.composer import FOLD_CHARACTERS, FOLD_LINES, Prompt


def paste(app, text: str) -> Prompt:
    prompt = app.chat.query_one(Prompt)
    prompt.post_message(events.Paste(text))
    return prompt


async def test_a_multi_line_paste_is_literal_and_not_sent(running):
    async with running() as (app, _pilot, until):
        prompt = paste(app, "one\r\ntwo\rthree\n")
        await until(lambda: prompt.text)
        assert prompt.text == "one\ntwo\nthree\n"
        assert app.controller.state.conversation.turns == []


async def test_what_is_pasted_is_sent_to_the_letter(running):
    pasted = (
        *("// x = 1;\nint y;", "//x", "/usr/bin/python: No module named kvchat", "/mode streaming", "/no-such\n/thing"),
        *("@app.py is what?", "@/no/such/file", r"see \@notes.txt and \_x\_", "/* a */"),
        "a\u200fb \u2067c\u2069 \u202ad\u202c",
    )
    async with running() as (app, _pilot, until):
        for number, text in enumerate(pasted, 1):
            prompt = paste(app, text)
            await until(lambda prompt=prompt: prompt.text)
            press(app, "enter")
            await until(lambda number=number: finished(app, number))
            assert app.controller.state.conversation.turns[-2].content == text
            assert prompt.text == ""


async def test_what_is_typed_beside_a_paste_acts(running, tmp_path):
    (tmp_path / "notes.txt").write_text("a fact")
    async with running() as (app, _pilot, until):
        prompt = paste(app, "@dataclass @/no/such/file")
        await until(lambda: prompt.text)
        prompt.insert(f" and @{tmp_path}/notes.txt")
        press(app, "enter")
        await until(lambda: finished(app))
        sent = app.controller.state.conversation.turns[0].content
        assert "a fact" in sent
        assert sent.endswith(f"@dataclass @/no/such/file and {tmp_path}/notes.txt")


async def test_what_is_typed_again_after_a_paste_was_deleted_is_a_command(running):
    async with running() as (app, _pilot, until):
        prompt = paste(app, "/theme kvchat-light")
        await until(lambda: prompt.text)
        prompt.clear()
        await until(lambda: not prompt._pastes)
        prompt.insert("/theme kvchat-light")
        press(app, "enter")
        await until(lambda: app.theme == "kvchat-light")


async def test_a_refused_command_stays_in_the_prompt(running):
    async with running() as (app, _pilot, until):
        prompt = app.chat.query_one(Prompt)
        for number, refused in enumerate(("/no-such-thing 1", "/budget many", "/mode nothing", "/stop now"), 1):
            prompt.clear()
            prompt.insert(refused)
            press(app, "escape", "enter")
            await until(lambda number=number: len(app._notifications) == number)
            await until(lambda refused=refused: prompt.text == refused)
        assert not app.controller.state.conversation.turns


async def test_a_command_refused_once_the_model_is_loaded_comes_back(running):
    async with running(ready=False) as (app, _pilot, until):
        prompt = app.chat.query_one(Prompt)
        prompt.insert("/regen 3")
        press(app, "escape", "enter")
        await until(lambda: app.controller.state.phase is Phase.READY)
        await until(lambda: prompt.text == "/regen 3")


async def test_five_megabytes_fold_at_once_and_are_sent_whole(running):
    text = "0123456789abcde\n" * 312_500
    async with running() as (app, _pilot, until):
        begun = time.process_time()
        prompt = paste(app, text)
        await until(lambda: prompt.text)
        assert prompt.text == "[pasted 4.8 MiB, 312,501 lines]"
        assert time.process_time() - begun < 5  # of this process: others do not count
        prompt.insert(" what is this?")
        press(app, "enter")
        await until(lambda: finished(app))
        assert app.controller.state.conversation.turns[0].content == text + " what is this?"


async def test_many_lines_fold_although_they_are_few_characters(running):
    async with running() as (app, _pilot, until):
        prompt = paste(app, "x\n" * FOLD_LINES)
        await until(lambda: prompt.text)
        assert prompt.text == "[pasted 48 B, 25 lines]"
        assert prompt.written.text == "x\n" * FOLD_LINES
        prompt.load_text("")
        paste(app, "x\n" * (FOLD_LINES - 1))
        await until(lambda: prompt.text)
        assert prompt.text == "x\n" * (FOLD_LINES - 1)


async def test_two_large_pastes_of_one_size_stay_apart(running):
    async with running() as (app, _pilot, until):
        first, second = "a" * (FOLD_CHARACTERS + 1), "b" * (FOLD_CHARACTERS + 1)
        prompt = paste(app, first)
        await until(lambda: prompt.text)
        paste(app, second)
        await until(lambda: prompt.text.count("[") == 2)
        assert prompt.written.text == first + second


async def test_a_text_given_back_does_not_overwrite_what_was_begun(running):
    async with running() as (app, _pilot, _until):
        prompt = app.chat.query_one(Prompt)
        prompt.restore("question")
        assert prompt.text == "question"
        prompt.restore("another")
        assert prompt.text == "question"


async def test_what_is_typed_ahead_of_enter_belongs_to_the_next_prompt(running):
    async with running() as (app, _pilot, until):
        for key in ("H", "i", "enter", "left", "y", "o"):
            app.post_message(events.Key(key, key if len(key) == 1 else None))
        await until(lambda: finished(app) and prompt(app).text == "yo")
        assert app.controller.state.conversation.turns[0].content == "Hi"
        assert app.chat.query_one(Prompt).prompts.older("") == "Hi"


async def test_a_refused_text_comes_back_before_what_was_typed_since(running, monkeypatch):
    async def refuse(text):
        raise UsageError("Not now.")

    async with running() as (app, _pilot, until):
        monkeypatch.setattr(app.controller, "ask", refuse)
        prompt = paste(app, "a" * (FOLD_CHARACTERS + 1))
        await until(lambda: prompt.text)
        shown, sent = prompt.text, prompt.written.text
        prompt.action_send()
        assert prompt.text == ""
        prompt.insert("more")
        await until(lambda: prompt.text == f"{shown}\nmore")
        assert prompt.written.text == f"{sent}\nmore"


async def test_many_lines_can_be_undone_and_done_again(running):
    async with running() as (app, pilot, until):
        app.post_message(events.Paste("line\n" * 14))
        await until(lambda: prompt(app).document.line_count == 15)
        for _ in range(3):
            for key, lines in (("ctrl+z", 1), ("ctrl+y", 15)):
                press(app, key)
                await until(lambda lines=lines: app._exception or prompt(app).document.line_count == lines)
                await pilot.pause()  # it is drawn
                assert app._exception is None


async def test_newlines_and_history(running):
    async with running() as (app, _pilot, until):
        press(app, "a", "ctrl+j", "b", "enter")
        await until(lambda: finished(app))
        assert app.controller.state.conversation.turns[0].content == "a\nb"
        press(app, "d", "up")
        await until(lambda: prompt(app).text == "a\nb")
        press(app, "down")
        await until(lambda: prompt(app).text == "d")


async def test_a_prompt_that_waits_paints_nothing(running, monkeypatch):
    async with running() as (app, _pilot, until):
        prompt = app.chat.query_one(Prompt)
        await until(lambda: prompt.has_focus)
        painted, looked = [], 0

        def is_calm():
            """Whether nothing was painted for twice as long as a cursor takes to blink."""
            nonlocal looked
            if painted or not looked:
                painted.clear()
                looked = time.monotonic()
            return time.monotonic() - looked > 1.2

        monkeypatch.setattr(prompt, "refresh_lines", lambda *lines: painted.append(lines))
        await until(is_calm)


async def test_a_terminal_without_a_column_for_the_prompt_ends_nothing(running):
    async with running() as (app, pilot, _until):
        await pilot.resize_terminal(3, 10)
        await pilot.pause(0.2)
        assert app._exception is None
