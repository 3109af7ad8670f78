"""Slash commands and their arguments."""

import re
import time

import pytest
from support.app_driver import ask, notes, press, prompt, submit, texts, toasts

from kvchat.config.modes import registered
from kvchat.errors import UsageError
from kvchat.protocol.messages import MAX_NEEDLE_TOKENS, Switch, Switched, Turn
from kvchat.tui.commands.chat import (
    MIN_NEEDLE_TOKENS,
    code_blocks,
    search_needle,
    set_draft,
    set_tokens,
    set_value,
    switch_mode,
)
from kvchat.tui.widgets.bars import ModeBar
from kvchat.tui.widgets.messages import Note, Problem, SwitchNote
from kvchat.tui.widgets.panels import KvColumn


async def test_the_mode_command_switches_and_marks_the_mode(running):
    async with running() as (app, _pilot, until):
        for mode, parameters in [(mode, registered()[mode]) for mode in ("freeze", "quest")]:
            submit(app, f"/mode {mode}")
            await until(lambda mode=mode: app.controller.state.mode == mode)
            submit(app, "/mode")
            shown = f"● {mode} ", parameters.title
            await until(lambda shown=shown: any(all(part in text for part in shown) for text in notes(app)))
        assert app.chat.query(SwitchNote)


async def test_commands_set_mode_parameters(running):
    async with running() as (app, _pilot, until):
        submit(app, "/mo spec ta=0.7")
        await until(lambda: app.controller.state.params.get("tau") == 0.7)
        submit(app, "/budget 1024")
        await until(lambda: app.controller.state.params["budget"] == 1024)
        submit(app, "/sink 32")
        await until(lambda: app.controller.state.params["sink"] == 32)
        submit(app, "/window 128")
        await until(lambda: app.controller.state.params["window"] == 128)
        submit(app, "/set tau 0.9")
        await until(lambda: app.controller.state.params["tau"] == 0.9)
        await until(lambda: app.chat.query_one(ModeBar).params["budget"] == 1024)


async def test_commands_accept_auto_values(chat):
    await chat.load()
    await set_value(chat.controller, "resident=auto")
    await switch_mode(chat.controller, "full resident=auto")
    await set_tokens("budget")(chat.controller, "auto")
    await switch_mode(chat.controller, "streaming")
    sent = [command for command in chat.client.sent if isinstance(command, Switch)]
    assert sent == [
        Switch("", {"resident": "auto"}),
        Switch("full", {"resident": "auto"}),
        Switch("streaming", {"budget": "auto"}),
    ]


async def test_drafts_apply_now_or_in_the_next_supporting_mode(chat):
    await chat.load()
    await set_draft(chat.controller, "lookup")
    await switch_mode(chat.controller, "speculative")
    await chat.controller.handle(Switched("full", "speculative", {"budget": 512}, 0, 0, 0.1))
    await set_draft(chat.controller, "auto")
    await switch_mode(chat.controller, "full")
    with pytest.raises(UsageError, match="lookup"):
        await set_draft(chat.controller, "sparse")
    sent = [command for command in chat.client.sent if isinstance(command, Switch)]
    assert sent == [Switch("", {"draft": "lookup"}), Switch("speculative", {}), Switch("full", {"draft": "auto"})]


def test_code_blocks_are_found_in_linear_time():
    assert code_blocks("```py\none\n```\n~~~~\ntwo\n~~~\n~~~~\n````\nthree") == ["one\n", "two\n~~~\n", "three"]
    begun = time.process_time()
    code_blocks("````\n" + "```x\n~~~\n" * 100_000)
    code_blocks("```" * 300_000)
    assert time.process_time() - begun < 5


async def test_commands_set_sampling_values(running):
    async with running() as (app, _pilot, until):
        submit(app, "/set temperature 0.2")
        await until(lambda: app.controller.state.sampling.temperature == 0.2)
        submit(app, "/set stop a=b")
        await until(lambda: app.controller.state.sampling.stop == ("a=b",))
        submit(app, "/set temprature 1")
        await until(lambda: 'Did you mean "temperature"?' in toasts(app))
        submit(app, "/set")
        await until(lambda: any(re.search("temperature +0.2 +a number from 0", note) for note in notes(app)))
        submit(app, "/set temp")
        await until(lambda: "temperature is 0.2. It takes a number from 0 to 100." in toasts(app))
        assert not app.chat.query(Problem)


async def test_system_copy_stats_theme_and_panels_commands_work(running):
    async with running() as (app, _pilot, until):
        submit(app, "/system be brief")
        await until(lambda: app.controller.state.conversation.system == "be brief")
        await ask(app, "hello")
        assert app.controller.state.conversation.command(app.controller.state.sampling).turns[0] == Turn(
            "system", "be brief"
        )
        submit(app, "/copy")
        await until(lambda: app.clipboard.startswith("Section 3"))
        submit(app, "/stats")
        await until(lambda: any("generated" in text for text in texts(app.chat.query(Note))))
        submit(app, "/theme kvchat-light")
        await until(lambda: app.theme == "kvchat-light" and app.chat.query_one(KvColumn).display)
        submit(app, "/panels")
        await until(lambda: app.chat.has_class("panels-on"))  # all figures
        submit(app, "/panels")
        await until(lambda: not app.chat.query_one(KvColumn).display)
        press(app, "f7")
        await until(lambda: app.chat.query_one(KvColumn).display)


async def test_the_file_command_starts_a_prompt(running, tmp_path):
    path = tmp_path / "a file.txt"
    async with running() as (app, _pilot, until):
        submit(app, f"/file {path}")
        await until(lambda: f"{path} cannot be read. No such file" in toasts(app))
        path.write_text("of words")
        submit(app, f"/file {path}")
        await until(lambda: prompt(app).text == f'@"{path}" ')


# ---- The arguments of /needle


@pytest.mark.parametrize("length", ["many", "-3", str(MIN_NEEDLE_TOKENS - 1), str(MAX_NEEDLE_TOKENS + 1), "9" * 30])
async def test_invalid_needle_lengths_are_rejected(chat, length):
    with pytest.raises(UsageError, match=f"{MIN_NEEDLE_TOKENS:,}.*{MAX_NEEDLE_TOKENS:,}"):
        await search_needle(chat.controller, length)
