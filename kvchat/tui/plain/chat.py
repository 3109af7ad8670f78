"""``kvchat chat --plain``: questions and commands are read line by line."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial

from kvchat.config.modes import choosable
from kvchat.config.sources import KEYS, dotted
from kvchat.errors import KvchatError, UsageError
from kvchat.protocol.client import EngineClient
from kvchat.protocol.figures import Snapshot
from kvchat.protocol.messages import Details
from kvchat.tui import panel_rows
from kvchat.tui.actions import COMMANDS, is_command, parse_command
from kvchat.tui.controller import ChatController
from kvchat.tui.plain.view import CUT_BYTES, YOU, LineReader, LineWriter, PlainView
from kvchat.tui.prompt import arguments, external_editor
from kvchat.tui.prompt.mentions import Part
from kvchat.tui.screens.choosing import describe_age
from kvchat.tui.settings import SettingsEditor
from kvchat.tui.state import AppConfig, Moment, Phase
from kvchat.tui.widgets.charts import bin_label, occupied_bins
from kvchat.units import count, figure, size

PROMPT = "> "
NO_LINES = "Start kvchat in a terminal without --plain."
WELCOME = "kvchat, line by line. /help lists the commands, Ctrl+C stops an answer, Ctrl+D quits."
INTERRUPTED = 130
DETAILS = "lines"  # its name for ``DetailsWatch``
CUT = UsageError(
    "This line is too long to be typed.",
    f"The terminal passes on {count(CUT_BYTES, 'byte')} of a line and drops the rest, so it was not sent.",
    "Save the text in a file and attach it: /file PATH, or @PATH in a question.",
)
REFUSED = {
    "theme": ("Line mode has no colors.", NO_LINES),
    "panels": ("Line mode has no panels.", "/details prints their figures."),
    "newest": ("Line mode does not scroll.", "The newest line is the last one printed."),
}
"""By the id of an action: why line mode refuses it, and what to do."""


def run(config: AppConfig) -> int:
    """Chat on stdin and stdout until stdin ends and return the exit code; no engine outlives it."""
    return asyncio.run(_run(config))


async def _run(config: AppConfig) -> int:
    is_typed = sys.stdin is not None and sys.stdin.isatty() and not (config.replay and not sys.stdout.isatty())
    lines = LineWriter(sys.stdout, sys.stderr, PROMPT if is_typed else "")
    client = EngineClient(config.engine_command, config.log_file, config.recorder)
    if config.recorder:
        config.recorder.report = lines.problem
    chat = PlainChat(config, client, lines, is_typed)
    try:
        return await chat.run(LineReader(0 if sys.stdin is None else sys.stdin.fileno(), lines.entered))
    finally:
        client.kill()
        if config.recorder:
            config.recorder.close()


class PlainChat:
    """Conversations in line mode; lines that are not ``is_typed`` at a terminal are piped in.

    A piped line waits for the previous answer, and the exit code is 1 after any error.
    """

    def __init__(self, config: AppConfig, client: EngineClient, lines: LineWriter, is_typed: bool) -> None:
        self.view = PlainView(lines, echoes=not is_typed or bool(config.replay))
        self.chat = ChatController(config, client, self.view)
        self._config = config
        self._client = client
        self._lines = lines
        self._is_typed = is_typed
        self._settings = SettingsEditor(config, self.chat, None)
        self._left = asyncio.Event()
        self._is_executing = self._is_quit_armed = False
        self._exit_code: int | None = None
        self._own: Mapping[str, Callable[[str], Awaitable[None]]] = {
            "help": self._help,
            "settings": self._list_settings,
            "conversations": self._list_conversations,
            "details": self._show_details,
            "editor": self._edit,
            "thinking": self._fold_thoughts,
            "stop": self._stop,
        }
        self._editor: external_editor.Editor | None = None
        self._release: Callable[[], None] = lambda: None

    async def run(self, reader: LineReader) -> int:
        """Chat until the lines end or the user leaves, and return the exit code."""
        self._release = reader.release
        if self._is_typed:
            self._lines.line(WELCOME)
        for problem in self._config.problems:
            self._lines.problem(problem)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._leave, 128 + number)
        await self.chat.open_archive(self._config.resume)
        background = [asyncio.create_task(self.chat.listen()), asyncio.create_task(self.chat.keep())]
        await self.chat.start()
        tasks = [asyncio.create_task(self._read(reader)), asyncio.create_task(self._left.wait()), *background]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        reader.release()  # what is typed from now on is the shell's
        for task in tasks:
            task.cancel()  # first, so that nothing is printed that is not saved
        await self.chat.close()
        self._lines.end()
        await self._client.close()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
        if self._exit_code is not None:
            return self._exit_code
        return 0 if self._is_typed else min(self.view.problems, 1)

    async def _read(self, reader: LineReader) -> None:
        asking = asyncio.create_task(self._ask_when_idle()) if self._is_typed else None

        async def play() -> None:  # until the recording ends: nobody is at the keys to play it again
            await self._until(lambda: self.chat.replay.is_over or self.chat.state.phase is Phase.DOWN)
            self._left.set()

        is_played = bool(self.chat.replay.name) and not self._is_typed
        playing = asyncio.create_task(play()) if is_played else None
        waits = not self._is_typed and playing is None  # a recording has its own questions
        try:
            async for line, piped in self._lines_of(reader):
                if waits:
                    await self._until(self._is_settled)
                self._is_executing, self._is_quit_armed = True, False
                if reader.is_cut:
                    self.view.add_error(CUT)
                else:
                    await self._execute(line, piped, reader.is_pasted)
                self._is_executing = False
                self._lines.changed.set()
                if self._left.is_set():
                    return
                if waits:
                    await self._until(self._is_settled)
            if playing:
                await playing
        finally:
            for task in filter(None, (asking, playing)):
                task.cancel()

    async def _lines_of(self, reader: LineReader) -> AsyncIterator[tuple[str, str]]:
        """Yield the command line's question with the text piped in for it, then the lines typed or piped in."""
        if self._config.prompt:
            yield self._config.prompt, self._config.piped
        while True:
            async for line in reader:
                yield line, ""
            if self._may_leave():
                return  # otherwise read on after Ctrl+D

    async def _execute(self, line: str, piped: str = "", is_pasted: bool = False, is_its_turn: bool = False) -> None:
        """Run a command, or ask a question about the ``piped`` text; show errors.

        A command waits behind queued questions, unless ``is_its_turn``.
        """
        if not line.strip():
            return
        try:
            if is_command(line) and not is_pasted:
                await self._run_command(line.strip(), is_its_turn)
            elif not self._is_typed and self.chat.state.info is None:
                self._lines.problem("Not asked: there is no model.")  # the reason was shown; loading would fail again
                self._left.set()
            else:
                asked = Part(line, is_typed=not is_pasted)  # piped or pasted text is literal
                parts = (Part(f"{piped}\n\n", is_typed=False), asked) if piped else (asked,)
                await self.chat.ask(arguments.compose(parts, self.chat.state))
        except KvchatError as error:
            self.view.add_error(error)

    async def _run_command(self, line: str, is_its_turn: bool) -> None:
        action, argument = parse_command(line)
        state, done = self.chat.state, self.view.switches
        if self.chat.has_to_wait(action.needs_model(argument), not is_its_turn and action.keeps_turn(argument)):
            await self.chat.defer(line, partial(self._execute, line, is_its_turn=True))
            return
        before = deepcopy((state.wanted, state.pending))
        if action.run:
            await action.run(self.chat, argument)
        elif action.id == "quit":
            if self._may_leave():
                self._left.set()
        elif action.id in self._own:
            await self._own[action.id](argument)
        else:
            title, hint = REFUSED[action.id]
            raise UsageError(title, hint=hint)
        if not self._is_typed and (state.wanted, state.pending) != before:
            await self._until(lambda: self.view.switches > done or state.phase is Phase.DOWN)

    def _is_idle(self) -> bool:
        return self.chat.state.phase in (Phase.READY, Phase.DOWN) and not self.chat.answers.queue.is_active

    def _is_settled(self) -> bool:
        is_switching = self.chat.mode_of_conversation.is_due and self.chat.state.phase is not Phase.DOWN
        return self._is_idle() and not self.chat.models.is_working and not is_switching

    async def _ask_when_idle(self) -> None:
        """Show the prompt whenever no answer is in progress."""
        while True:
            if self._is_idle() and not self._is_executing:
                self._lines.ask()
            await self._change()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._change()

    async def _change(self) -> None:
        self._lines.changed.clear()
        await self._lines.changed.wait()

    def _interrupt(self) -> None:
        """Stop the answer, or else quit, at a terminal only if pressed twice; an editor handles Ctrl+C itself."""
        if self._editor is not None:
            return
        if self.chat.state.phase.busy and not self.chat.replay.name:
            self.chat.stop()
        elif self._is_typed and not self._is_quit_armed:
            self._is_quit_armed = True
            self._lines.line("Press Ctrl+C again to quit.")
        elif self._may_leave():
            self._leave(0 if self._is_typed else INTERRUPTED)

    def _may_leave(self) -> bool:
        """Return whether to quit; False the first time that a person would lose unsaved text."""
        return not self._is_typed or self.chat.may_leave()

    def _leave(self, code: int) -> None:
        self._exit_code = code
        self._left.set()
        if self._editor is not None:
            self._editor.terminate()

    # ---- commands that are different on the screen ---------------------------------------------

    async def _help(self, argument: str) -> None:
        actions = [action for action in COMMANDS.values() if action.id not in REFUSED]
        self._say(f"{action.line}: {action.doc}" for action in actions)
        self._say(f"{mode.name} mode: {mode.title}" for mode in choosable().values())

    async def _list_settings(self, argument: str) -> None:
        shown = [one for one in self._settings.settings() if one.key[0] != KEYS]
        self._say(f"{dotted(one.key)} = {one.shown} ({one.origin}): {one.doc}" for one in shown)

    async def _list_conversations(self, argument: str) -> None:
        found = await self.chat.archive.search(argument)
        places = {one.id: place for place, one in enumerate(await self.chat.archive.all(), 1)}
        rows = [
            f"{places[one.id]}. {one.title or 'no title'}, {describe_age(time.time() - one.updated)},"
            f" {count(one.messages, 'message')}"
            for one in found
        ]
        self._say([*rows, "/open NUMBER continues one." if rows else "No conversation was found."])

    async def _show_details(self, argument: str) -> None:
        """Request the details of layers and heads, and print them with the panels' figures."""
        if self.chat.state.snapshot is None or not self.chat.state.is_stored:
            raise UsageError("Nothing is stored yet.", hint="Ask something first.")
        self.view.take_details = self._print_details
        self.chat.details.begin(DETAILS)
        if not self._is_typed:
            await self._until(lambda: self.view.take_details is None or self.chat.state.phase is Phase.DOWN)

    def _print_details(self, details: Details) -> None:
        self.view.take_details = None
        self.chat.details.end(DETAILS)
        state = self.chat.state
        if state.snapshot is not None:
            link = self.chat.models.in_use.link_bytes_per_s
            self._say(figure_lines(state.snapshot, details, state.gpu_history.moments, link))

    async def _fold_thoughts(self, argument: str) -> None:
        self.view.folds_thoughts = not self.view.folds_thoughts
        how = "no longer printed, except for their length" if self.view.folds_thoughts else "printed from now on"
        self._lines.line(f"Thoughts are {how}.")

    async def _edit(self, argument: str) -> None:
        """Send what the user writes in an editor, which has the terminal meanwhile."""
        if not self._is_typed:
            raise UsageError("stdin is not a terminal.", hint="Send the question as a line.")
        if self.chat.state.phase.busy:
            raise UsageError("An answer is in progress.", hint="Wait for it to end, or /stop it.")

        def begun(editor: external_editor.Editor) -> None:
            self._editor = editor

        self._release()
        try:
            text = await asyncio.to_thread(external_editor.edit, "", begun)
        finally:
            self._editor = None
        if text.strip() and not self._left.is_set():
            self._lines.text(f"{YOU}{text}\n")
            await self._execute(text)

    async def _stop(self, argument: str) -> None:
        self.chat.stop()
        self.chat.branches.stop_editing()

    def _say(self, lines: Iterable[str]) -> None:
        self._lines.line("\n".join(lines))


def figure_lines(s: Snapshot, details: Details, moments: Sequence[Moment], link_bytes_per_s: float | None) -> list[str]:
    """Return the panels' figures, one line per row, then details by layer, fetch times and the GPU's last minutes."""
    shown = panel_rows.blocks(s, link_bytes_per_s)
    times = [
        (bin_label(index).replace("–", " to "), count(details.recall[index].steps, "token"))
        for index in occupied_bins(details.recall)
    ]
    title, rows = shown["mode"]
    shown["mode"] = (title if s.server else f"{title} mode", [*rows, *panel_rows.extra_rows(s.extras)])
    return [
        *(line for title, rows in shown.values() for line in _block(title, rows)),
        *_block(f"{panel_rows.READ_BY_HEAD}, of {count(details.total)}", _by_layer(details.read)),
        *_block(f"{panel_rows.HELD_BY_HEAD}, of {count(details.total)}", _by_layer(details.held)),
        *_block(panel_rows.FETCH_TIMES, times),
        *_block("GPU in the last minutes", _gpu_rows(moments, details)),
    ]


def _block(title: str, rows: panel_rows.Rows) -> Iterator[str]:
    if rows:
        yield f"{title}:"
        yield from (f"  {label} {value}".rstrip() for label, value in rows)


def _by_layer(counts: Sequence[Sequence[int]]) -> panel_rows.Rows:
    """Return a row per layer with the tokens of each KV head; one number if all are equal."""
    return [
        (f"layer {layer}", f"{count(heads[0])} in each head" if len(set(heads)) == 1 else ", ".join(map(count, heads)))
        for layer, heads in enumerate(counts)
        if heads
    ]


def _gpu_rows(moments: Iterable[Moment], details: Details) -> panel_rows.Rows:
    """Return the range of load and power, and the current PCIe traffic."""
    readings = list(moments)
    load = [one.utilization for one in readings if one.utilization is not None]
    power = [one.power for one in readings if one.power is not None]
    rows = [
        (name, f"{figure(min(values))} to {figure(max(values), unit)}")
        for name, values, unit in (("load", load, "%"), ("power", power, "W"))
        if values
    ]
    links = {"PCIe to the device": details.pcie_to_device, "PCIe to the host": details.pcie_to_host}
    return [*rows, *((name, f"{size(rate)}/s") for name, rate in links.items() if rate is not None)]
