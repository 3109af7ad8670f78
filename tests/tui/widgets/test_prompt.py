"""The prompt: pastes are literal if small, folded if large, and sent in full; commands, history, repainting."""

import shlex
import time

from support.app_driver import is_finished, press, prompt, submit, wait_for
from support.message import lacks
from textual import events

from kvchat.errors import UsageError
from kvchat.tui.widgets.composer import FOLD_CHARACTERS, FOLD_LINES, Prompt


async def paste(app, text: str) -> Prompt:
    """Paste a text into the empty prompt."""
    prompt(app).load_text("")
    prompt(app).post_message(events.Paste(text))
    await wait_for(lambda: prompt(app).text)
    return prompt(app)


async def test_pastes_are_literal_folded_if_large_and_undoable(running):
    async with running() as (app, pilot, until):
        assert (await paste(app, "one\r\ntwo\rthree\n")).text == "one\ntwo\nthree\n"
        field = await paste(app, "x\n" * FOLD_LINES)
        assert (field.text, field.written.text) == ("[pasted 48 B, 25 lines]", "x\n" * FOLD_LINES)
        assert (await paste(app, "x\n" * (FOLD_LINES - 1))).text == "x\n" * (FOLD_LINES - 1)
        first, second = "a" * (FOLD_CHARACTERS + 1), "b" * (FOLD_CHARACTERS + 1)
        await paste(app, first)
        app.post_message(events.Paste(second))  # of the same size
        await until(lambda: field.text.count("[") == 2)
        assert field.written.text == first + second
        await paste(app, "line\n" * 14)
        for _ in range(3):
            for key, lines in (("ctrl+z", 1), ("ctrl+y", 15)):
                press(app, key)
                await until(lambda lines=lines: app._exception or field.document.line_count == lines)
                await pilot.pause()  # until it is drawn
                assert app._exception is None
        assert app.controller.state.conversation.turns == []
        await paste(app, "/theme kvchat-light")
        field.clear()
        await until(lambda: "/theme kvchat-light" not in field._pastes)
        submit(app, "/theme kvchat-light")  # the same text, but typed it is a command
        await until(lambda: app.theme == "kvchat-light")


async def test_pasted_text_is_sent_verbatim(running, monkeypatch):
    pasted = [
        *("// x = 1;\nint y;", "//x", "/usr/bin/python: No module named kvchat", "/mode streaming", "/no-such\n/thing"),
        *("@app.py is what?", "@/no/such/file", r"see \@notes.txt and \_x\_", "/* a */"),
        "a\u200fb \u2067c\u2069 \u202ad\u202c",
    ]
    sent = []

    async def note(text):
        sent.append(text)

    async def refuse(text):
        raise UsageError("Not now.")

    async with running() as (app, _pilot, until):
        monkeypatch.setattr(app.controller, "ask", note)
        for number, text in enumerate(pasted, 1):
            await paste(app, text)
            press(app, "enter")
            await until(lambda number=number: len(sent) == number and prompt(app).text == "")
        assert sent == pasted
        monkeypatch.setattr(app.controller, "ask", refuse)
        field = await paste(app, "a" * (FOLD_CHARACTERS + 1))
        shown, whole = field.text, field.written.text
        field.action_send()
        assert field.text == ""
        field.insert("more")
        await until(lambda: field.text == f"{shown}\nmore")  # restored before what was typed since
        assert field.written.text == f"{whole}\nmore"


async def test_mentions_typed_next_to_a_paste_work(running, tmp_path):
    (tmp_path / "notes.txt").write_text("a fact")
    async with running() as (app, _pilot, until):
        (await paste(app, "@dataclass @/no/such/file")).insert(f" and @{tmp_path}/notes.txt")
        press(app, "enter")
        await until(lambda: is_finished(app))
        sent = app.controller.state.conversation.turns[0].content
        assert "a fact" in sent
        assert sent.endswith(f"@dataclass @/no/such/file and {tmp_path}/notes.txt")
        press(app, "up", "enter")
        await until(lambda: is_finished(app, 2))
        assert app.controller.state.conversation.turns[2].content == sent
        (await paste(app, f"{tmp_path}/notes.txt")).insert("@", (0, 0))  # first dropped, then attached
        press(app, "enter")
        await until(lambda: is_finished(app, 3))
        assert "a fact" in app.controller.state.conversation.turns[4].content


async def test_all_files_dropped_behind_an_at_sign_are_attached(running, tmp_path):
    names = ["first.txt", "the second.txt", "Bob's.txt"]
    for name in names:
        (tmp_path / name).write_text(f"fact {name}")
    async with running() as (app, _pilot, until):
        prompt(app).insert("Compare @")
        app.post_message(events.Paste(shlex.join(str(tmp_path / name) for name in names) + " "))
        await until(lambda: "Bob" in prompt(app).text)
        press(app, "enter")
        await until(lambda: is_finished(app))
        sent = app.controller.state.conversation.turns[0].content
        assert not lacks(sent, *(f"fact {name}" for name in names))


async def test_long_editor_text_attaches_files_unless_it_had_pastes(running, tmp_path):
    (tmp_path / "notes.txt").write_text("a fact")
    written = "a line\n" * FOLD_LINES + f"about @{tmp_path}/notes.txt"
    async with running() as (app, _pilot, until):
        field, conversation = prompt(app), app.controller.state.conversation
        await paste(app, "x" * (FOLD_CHARACTERS + 1))
        field.load_text("")
        for answers, is_attached in ((1, True), (2, False)):
            field.replace_all(written)
            field.replace_all(field.written.text)  # opened in the editor again
            assert len(field.text) < len(written)
            press(app, "enter")
            await until(lambda answers=answers: is_finished(app, answers))
            assert ("a fact" in conversation.turns[-2].content) == is_attached
            await paste(app, "@dataclass")


async def test_typing_after_a_refused_command_starts_fresh(running):
    async with running() as (app, _pilot, until):
        field = prompt(app)
        for number, refused in enumerate(("/no-such-thing 1", "/budget many", "/mode nothing", "/stop now"), 1):
            field.insert(refused)
            press(app, "escape", "enter", "o", "k")
            await until(lambda number=number: len(app._notifications) == number)
            await until(lambda: field.text == "ok")
            field.action_cursor_up()
            assert field.text == refused
            field.load_text("")
        assert not app.controller.state.conversation.turns
        field.restore("question")
        field.restore("another")
        assert field.text == "question"


async def test_five_megabytes_fold_quickly_and_are_sent_whole(running):
    text = "0123456789abcde\n" * 312_500
    async with running() as (app, _pilot, until):
        begun = time.process_time()
        field = await paste(app, text)
        assert field.text == "[pasted 4.8 MiB, 312,501 lines]"
        assert time.process_time() - begun < 5  # the CPU time of this process only
        field.insert(" what is this?")
        press(app, "enter")
        await until(lambda: is_finished(app))
        assert app.controller.state.conversation.turns[0].content == text + " what is this?"


async def test_newlines_history_and_typing_ahead(running):
    async with running() as (app, _pilot, until):
        press(app, "a", "ctrl+j", "b", "enter", "left", "y", "o")
        await until(lambda: is_finished(app) and prompt(app).text == "yo")
        assert app.controller.state.conversation.turns[0].content == "a\nb"
        prompt(app).load_text("")
        press(app, "d", "up")
        await until(lambda: prompt(app).text == "a\nb")
        press(app, "down")
        await until(lambda: prompt(app).text == "d")


async def test_an_idle_prompt_repaints_nothing(running, monkeypatch):
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
