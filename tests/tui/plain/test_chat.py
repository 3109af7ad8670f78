"""Line mode with a fake engine: lines from a pipe or a person, and the output."""

import asyncio
import io
import os
import re
import select
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.app_driver import wait_for
from support.full_disk import full_disk
from support.message import lacks
from support.patience import PATIENCE_S

from kvchat.cli.chat import ENGINE
from kvchat.conversations.conversation import Conversation, Message
from kvchat.conversations.store import LISTED, ConversationStore
from kvchat.errors import UsageError
from kvchat.foreign_text import visible
from kvchat.protocol.client import EngineClient
from kvchat.protocol.figures import Snapshot, Stats
from kvchat.protocol.messages import Asked, Finished, Loaded, Started, Switched, Text
from kvchat.protocol.recording import Recorder
from kvchat.tui.actions import COMMANDS
from kvchat.tui.plain import view
from kvchat.tui.plain.chat import INTERRUPTED, PROMPT, REFUSED, PlainChat
from kvchat.tui.plain.view import AT_ONCE_S, LineReader, LineWriter, PlainAnswer, PlainView, spoken
from kvchat.tui.state import Phase


class Session:
    """A chat that reads a pipe; its output and errors are captured."""

    def __init__(self, config, is_typed=False):
        self.out, self.errors = io.StringIO(), io.StringIO()
        self._receiving, self._sending = os.pipe()
        lines = LineWriter(self.out, self.errors, PROMPT if is_typed else "")
        self.plain = PlainChat(config, EngineClient(config.engine_command, config.log_file), lines, is_typed)
        self._entered = lines.entered

    @property
    def text(self):
        return self.out.getvalue()

    @property
    def phase(self):
        return self.plain.chat.state.phase

    def send(self, text):
        os.write(self._sending, text.encode())

    def close(self):
        if self._sending:
            os.close(self._sending)
            self._sending = 0

    async def run(self):
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self.plain.run(LineReader(self._receiving, self._entered))
        finally:
            self.close()
            os.close(self._receiving)


async def piped(config, text):
    session = Session(config)
    session.send(text)
    session.close()
    return await session.run(), session


@pytest.fixture
def config(config, tmp_path):
    return replace(config, database=tmp_path / "chats.db")


async def test_piped_lines_ask_and_switch(config):
    code, session = await piped(config, "hello\n/mode speculative\nagain\\\nand more\n/stats\n/budget 128\n")
    assert (code, session.errors.getvalue()) == (0, "")
    order = [
        "you: hello\n",
        "model: Section 3",
        "[full to speculative, budget 512",
        "you: again\nand more\n",
        "model: S",
    ]
    order += ["speculative, read", "answers                    2", "[speculative, budget 128"]
    assert re.search(".*".join(map(re.escape, order)), session.text, re.DOTALL), session.text
    assert visible(session.text) == session.text


@pytest.mark.parametrize("asked", ["", "hello\n"])
async def test_piped_switches_back_and_forth_are_all_printed(config, asked):
    lines = "/mode streaming budget=128\n/mode full\n/mode freeze\n/mode full\nagain\n"
    code, session = await piped(config, asked + lines)
    assert (code, session.errors.getvalue()) == (0, "")
    switches = re.findall(r"^\[(\w+) to (\w+)", session.text, re.MULTILINE)
    assert switches == [("full", "streaming"), ("streaming", "full"), ("full", "freeze"), ("freeze", "full")]
    assert session.text.index("[freeze to full") < session.text.index("you: again\nmodel: ")


async def test_a_saved_conversation_is_listed_and_resumed(config):
    await piped(config, "My cat is Biscuit.\n/new\nMy dog is Rex.\n")
    _, session = await piped(config, "/chats\n/open 2\n/open dog\n/title\n/open whale\n")
    assert re.search(r"^1\. My dog is Rex\..*\n2\. My cat is Biscuit\.", session.text, re.MULTILINE)
    assert session.text.index("you: My cat is Biscuit.\nmodel: Section 3") < session.text.index("you: My dog is Rex.")
    assert session.text.endswith("My dog is Rex.\n")
    assert '"whale"' in session.errors.getvalue()
    _, session = await piped(replace(config, resume=True), "/title\n")
    assert "you: My dog is Rex." in session.text


async def test_one_of_many_conversations_is_found_and_opened(config):
    store = ConversationStore(config.database)
    for number in range(LISTED + 1):
        (conversation := Conversation()).ask(f"cat {number}" if number else "whale")
        store.save(conversation.changes())
    store.close()
    _, session = await piped(config, f"/chats whale\n/open {LISTED + 1}\n/title\n/chats dog\n")
    assert f"\n{LISTED + 1}. whale, " in session.text
    assert "Title: whale\nNo conversation was found.\n" in session.text


async def test_an_edited_question_replaces_the_last(config, tmp_path):
    _, session = await piped(config, f"one\ntwo\n/edit due\n/edit @{tmp_path}\nthree\n/new foo\n")
    turns = session.plain.chat.state.conversation.turns
    assert [turn.content for turn in turns if turn.role == "user"] == ["one", "due", "three"]
    assert "you: due\nmodel: " in session.text
    assert not lacks(session.errors.getvalue(), str(tmp_path), '/new "foo"')


async def test_the_command_line_question_comes_before_piped_lines(config):
    await piped(config, "My cat is Biscuit.\n")
    _, session = await piped(replace(config, prompt="What is its name?", resume=True), "And its age?\n")
    questions = [line for line in session.text.splitlines() if line.startswith("you: ")]
    assert questions == ["you: My cat is Biscuit.", "you: What is its name?", "you: And its age?"]


async def test_piped_text_is_attached_verbatim_to_the_question(config):
    piped_in = "File stdin:\n```\n/new\n@nothing\n```"
    code, session = await piped(replace(config, prompt="Sum up", piped=piped_in), "")
    assert (code, session.errors.getvalue()) == (0, "")
    assert session.text.startswith("kvchat-pocket, float32 on cpu")
    assert "you: [stdin · 14 B]\nSum up\nmodel: " in session.text
    assert session.plain.chat.state.conversation.turns[0].content == f"{piped_in}\n\nSum up"


async def test_refusals_go_to_stderr_and_set_the_exit_code(config):
    code, session = await piped(config, "/details\n/mode nothing\n/panels\n/mode sync budget=64\nfail\n//x\n")
    assert code == 1
    assert session.errors.getvalue().startswith("Error: "), "there are no details before the first answer"
    assert not lacks(session.errors.getvalue(), '"nothing"', "panels", "/details", "stays full")
    assert "you: //x\nmodel: Section 3" in session.text


async def test_every_command_is_listed_or_refused(config):
    _, session = await piped(config, "/help\n/settings\n/settings\n/thinking\n/thinking\n")
    assert re.search("no longer printed.*\n.*printed", session.text)
    assert re.search(r"^/mode NAME key=value\.\.\.: ", session.text, re.MULTILINE)
    assert re.search(r"sampling\.temperature = auto.*0\.7", session.text)
    listed = set(re.findall(r"^/(\w+)", session.text, re.MULTILINE))
    own = (*session.plain._own, "quit")
    assert listed == {name for name, action in COMMANDS.items() if action.run or action.id in own}
    assert {action.id for name, action in COMMANDS.items() if name not in listed} == set(REFUSED)


async def test_details_are_printed_as_lines(config, monkeypatch):
    monkeypatch.setenv("FAKE_GPU", "1")
    code, session = await piped(config, "/mode speculative\nhello\n/details\n/title\n")
    assert (code, session.errors.getvalue()) == (0, "")
    for line in (
        "this answer:\n  reads 59 of 59, 100 %",
        "speculative mode:\n  budget 512 tokens a head",
        "memory:\n  GPU ",
        "read by layer and head, of 59:\n  layer 0 59 in each head\n  layer 1 14, 29, 44, 59\n",
        "  0.5 to 1 ms 90 tokens\n",
        "  PCIe to the device 10.4 GiB/s",
    ):
        assert line in session.text, session.text
    assert session.text.endswith("Title: hello\n")  # printed after the details


@pytest.mark.parametrize("after", ["", "/quit\n", "hello\n"])
async def test_the_chat_waits_for_a_plan(config, after):
    code, session = await piped(config, f"/plan\n{after}")
    assert code == 1
    assert not lacks(session.errors.getvalue(), "bundled", "It has no weights.")


async def test_the_chat_waits_for_a_download(config):
    code = """import time; time.sleep(0.5); print('{"error": ["org/gone is gated.", "", ""]}')"""
    _, session = await piped(replace(config, download_command=(sys.executable, "-c", code)), "/model org/gone\n")
    assert "org/gone is gated." in session.errors.getvalue()


async def test_only_new_conversations_are_announced(config):
    _, session = await piped(config, "one\n/edit due\n/undo\n")
    assert "new conversation" not in session.text
    _, session = await piped(config, "one\n/new\ntwo\n")
    assert session.text.count("new conversation") == 1


async def test_a_question_can_be_written_in_an_editor(config, monkeypatch, tmp_path):
    code = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('from the\\neditor\\n')"
    monkeypatch.setenv("VISUAL", f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}")
    session = Session(config, is_typed=True)
    running = asyncio.create_task(session.run())
    await wait_for(lambda: session.phase is Phase.READY)
    session.send("/editor\n")
    await wait_for(lambda: "you: from the\neditor\nmodel: Section 3" in session.text)
    await wait_for(lambda: session.text.endswith(PROMPT))
    session.close()
    assert await running == 0
    code, session = await piped(config, "/editor\n")
    assert code == 1
    assert "terminal" in session.errors.getvalue()


async def test_ctrl_c_is_left_to_the_running_editor(config, monkeypatch, tmp_path):
    begun = tmp_path / "begun"
    code = f"import pathlib, time; pathlib.Path({str(begun)!r}).touch(); time.sleep(600)"
    monkeypatch.setenv("VISUAL", f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}")
    session = Session(config, is_typed=True)
    running = asyncio.create_task(session.run())
    await wait_for(lambda: session.phase is Phase.READY)
    session.send("/editor\n")
    await wait_for(begun.exists)
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(0.2)
    assert not running.done()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 128 + signal.SIGTERM


async def test_a_pipe_reports_a_missing_model_once(config, monkeypatch):
    monkeypatch.setenv("FAKE_LOAD", "refuse")
    code, session = await piped(config, "/mode\nhello\nagain\n")
    assert code == 1
    assert session.errors.getvalue().count("There is no such model.") == 1
    assert session.errors.getvalue().splitlines()[-1] not in session.errors.getvalue().splitlines()[:-1]
    assert "speculative" in session.text
    assert "hello" not in session.text


async def test_withdrawn_text_and_a_crash_are_reported(config):
    code, session = await piped(config, "waver\ncrash\nhello\n")
    assert code == 1
    assert "withdrawn by recovery: " in session.text
    assert "exit code 3" in session.errors.getvalue()
    assert session.text.count("model: ") >= 2


async def test_ctrl_c_stops_then_quits_when_pressed_twice(config):
    session = Session(config, is_typed=True)
    running = asyncio.create_task(session.run())
    await wait_for(lambda: session.text.endswith(PROMPT))
    session.send("hold\n")
    await wait_for(lambda: session.phase is Phase.ANSWERING)
    os.kill(os.getpid(), signal.SIGINT)
    await wait_for(lambda: "stopped]" in session.text)
    for word in ("/stop\n", ""):  # a line in between resets the count
        await wait_for(lambda: session.text.endswith(PROMPT))
        length = len(session.text)
        os.kill(os.getpid(), signal.SIGINT)
        await wait_for(lambda length=length: "again" in session.text[length:] and session.text.endswith(PROMPT))
        session.send(word)
    os.kill(os.getpid(), signal.SIGINT)
    assert await running == 0
    assert "you: " not in session.text


async def test_a_typed_switch_works_during_an_answer(config, monkeypatch):
    monkeypatch.setenv("FAKE_WORDS", "200")
    session = Session(config, is_typed=True)
    running = asyncio.create_task(session.run())
    session.send("slow\n")
    await wait_for(lambda: session.phase is Phase.ANSWERING)
    session.send("/mode streaming\n")
    await wait_for(lambda: "[full to streaming" in session.text)
    session.close()
    assert await running == 0
    assert session.plain.chat.state.conversation.last_text()


@pytest.fixture
async def unsaved(config):
    """A session whose question does not fit on the disk, and its task."""
    session = Session(config, is_typed=True)
    running = asyncio.create_task(session.run())
    await wait_for(lambda: session.text.endswith(PROMPT))
    with full_disk():
        session.send("hello\n")
        await wait_for(lambda: session.plain.chat.archive.problem)
        yield session, running


async def test_quitting_with_unsaved_text_takes_two_requests(unsaved):
    session, running = unsaved
    session.send("/quit\n")
    await wait_for(lambda: "/quit again" in session.text + session.errors.getvalue())
    session.send("/quit\n")
    assert await running == 0


async def test_end_of_input_warns_about_unsaved_text(unsaved):
    session, running = unsaved
    session.close()  # a pipe, unlike a terminal, ends again at once
    assert await running == 0
    assert "/quit again" in session.text + session.errors.getvalue()


async def test_end_of_input_saves_the_printed_text(config):
    session = Session(config, is_typed=True)
    session.send("slow\n")
    running = asyncio.create_task(session.run())
    await wait_for(lambda: "older pages" in session.text)
    session.close()
    await running
    store = ConversationStore(config.database)
    answer = store.load(store.latest().id).leaf.text
    store.close()
    assert session.text.endswith(f"model: {answer}\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, 128 + signal.SIGTERM)])
async def test_a_signal_sets_the_exit_code(config, number, code):
    session = Session(config)
    running = asyncio.create_task(session.run())
    await wait_for(lambda: session.phase is Phase.READY)
    os.kill(os.getpid(), number)
    assert await running == code


async def test_an_empty_pipe_does_not_wait_for_the_model(config, monkeypatch):
    monkeypatch.setenv("FAKE_LOAD", "wait")
    code, _ = await piped(config, "")
    assert code == 0


async def test_comparison_and_needle_results_are_lines(config):
    code, session = await piped(config, "hello\n/compare sync full\n/needle 512\n")
    assert code == 0
    assert "full: tok/s 50.0, read 50 %, fetched 0 B, alike 2, agree 75 %, KL 0.050" in session.text
    assert "full: All said by full here." in session.text
    assert re.search("full found.* 50 %", session.text)
    assert "did not find" in session.text


@pytest.mark.parametrize("lines", ["", "/speed 8\n"])
async def test_a_recording_plays_to_the_end_despite_piped_lines(config, tmp_path, lines):
    recording = tmp_path / "demo.jsonl"
    recorder = Recorder(recording, "1")
    loaded = Loaded("bundled", "llama", 43_000_000, "cpu", "float32", 16384, 8, 4, 32, 16384, "full", {})
    events = (Started(3, 0), Text("I am well.", 3), Finished("eos", "I am well.", Stats()))
    for event in (loaded, Asked("How are you?"), *events):
        recorder.note(event)
    recorder.close()
    played = replace(config, replay="demo", engine_command=(*ENGINE, str(recording)), database=None)
    code, session = await piped(played, lines)
    assert (code, session.errors.getvalue()) == (0, "")
    assert "you: How are you?\nmodel: I am well.\n" in session.text
    watched = Session(played, is_typed=True)  # nobody typed the question, so it is printed
    running = asyncio.create_task(watched.run())
    await wait_for(lambda: "you: How are you?\nmodel: I am well." in watched.text)
    watched.close()
    await running


async def test_the_latest_conversation_opens_in_its_own_mode(config):
    await piped(config, "hello\n/mode speculative budget=128\n")
    code, session = await piped(replace(config, resume=True), "/mode\n")
    assert (code, session.errors.getvalue()) == (0, "")
    assert re.search(r"speculative mode, budget 128.*^\* speculative", session.text, re.MULTILINE | re.DOTALL)


# ---- The output of an answer with a thought before it


def message(text):
    return Message(parent=None, role="assistant", text=text)


async def printed(folds, text, withdrawn=0):
    """The lines of an answer that arrives character by character."""
    out = io.StringIO()
    answer = PlainAnswer(LineWriter(out, out), folds)
    for character in text:
        answer.feed(character)
    await answer.withdraw(withdrawn)
    await answer.finish(message(text), "3 tok")
    return out.getvalue()


@pytest.mark.parametrize(
    ("folds", "text", "expected"),
    [
        (False, "<think>one two</think>\n\nfine", "model: <think>one two</think>\n\nfine\n[3 tok]\n"),
        (True, "<think>one two</think>\n\nfine", "[thought, 2 words]\nmodel: fine\n[3 tok]\n"),
        (True, "<think>one two", "[thought, 2 words]\n[3 tok]\n"),
        (True, "<thin ice", "model: <thin ice\n[3 tok]\n"),
        (True, "told</think>fine", "model: told</think>fine\n[3 tok]\n"),
        (True, "fine", "model: fine\n[3 tok]\n"),
    ],
)
async def test_a_folded_thought_is_one_line(folds, text, expected):
    assert await printed(folds, text) == expected


async def test_a_folded_answer_continues_after_withdrawn_text():
    out = io.StringIO()
    answer = PlainAnswer(LineWriter(out, out), folds=True)
    answer.feed("<think>a b</think>one two")
    assert await answer.withdraw(3) == "two"
    answer.feed("three")
    assert out.getvalue() == "[thought, 2 words]\nmodel: one twothree"


async def test_opening_a_conversation_folds_thoughts():
    out = io.StringIO()
    view = PlainView(LineWriter(out, out), echoes=True)
    view.folds_thoughts = True
    await view.show_messages([(message("<think>a b</think>fine"), "")], None)
    assert out.getvalue() == "[thought, 2 words]\nmodel: fine\n"


def test_new_badges_are_printed():
    out = io.StringIO()
    view = PlainView(LineWriter(out, out), echoes=True)
    slow, capped = "slow: by stock operations", "capped: freeze forgets"
    for badges in ((), (slow,), (slow,), (slow, capped), (), (slow,)):
        view.show_snapshot(Snapshot("freeze", {}, 1, 1, 1, 1, 1, badges=badges))
    view.show_snapshot(None)
    assert out.getvalue() == f"[{slow}]\n[{capped}]\n[{slow}]\n"


async def test_a_switch_is_printed_when_it_happens():
    out = io.StringIO()
    view = PlainView(LineWriter(out, out), echoes=False)
    answer = await view.add_answer()
    answer.feed("It was a dark")
    await view.add_switch(Switched("full", "streaming", {}, 10, 0, 0.0), None)
    answer.feed(" night.")
    await answer.finish(message("It was a dark night."), "3 tok")
    assert out.getvalue().splitlines() == [
        "model: It was a dark",
        "[full to streaming, at 10 tok]",
        " night.",
        "[3 tok]",
    ]


# ---- Lines in and out: split and joined as intended, and the output is plain text


class ChunkedReader(LineReader):
    """Bytes that arrive a few at a time."""

    def __init__(self, data: bytes, step: int, entered: Callable[[], None] = lambda: None) -> None:
        super().__init__(-1, entered)
        self._pieces = [data[start : start + step] for start in range(0, len(data), step)]

    async def _read(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""


@pytest.mark.parametrize("step", [1, 2, 3, 1000])
@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"one\ntwo\r\n\nthree", ["one", "two", "", "three"]),
        (b"one\\\nand more\\\nof it\ntwo\n", ["one\nand more\nof it", "two"]),
        (b"one\\\nlast", ["one\nlast"]),
        ("schön ✓\n".encode(), ["schön ✓"]),
        (b"latin \xfc\n", ["latin \ufffd"]),
        (b"\xef\xbb\xbfone\ntwo\n", ["one", "two"]),
    ],
)
async def test_lines_are_split_and_joined(data, lines, step):
    assert [line async for line in ChunkedReader(data, step)] == lines


async def test_consecutive_commands_print_on_separate_lines():
    out = io.StringIO()
    lines = LineWriter(out, out, "> ")
    async for line in ChunkedReader(b"/regen\n/stats\n", 1000, lines.entered):
        (lines.line if line == "/stats" else lines.text)(line)
    assert out.getvalue() == "/regen\n/stats\n"


async def test_a_pipe_is_read_to_its_end():
    receiving, sending = os.pipe()
    os.write(sending, b"one\ntw")
    asyncio.get_running_loop().call_soon(lambda: (os.write(sending, b"o"), os.close(sending)))
    assert [line async for line in LineReader(receiving)] == ["one", "two"]
    os.close(receiving)


@pytest.mark.parametrize(
    ("arriving", "lines"),
    [
        (b"int a; // one \\\n/usr/bin/x\n\nfour\n", [("int a; // one \\\n/usr/bin/x\n\nfour", True)]),
        (b"one\n", [("one", False)]),
        (b"/mode full\n/set\n", [("/mode full", False), ("/set", False)]),
    ],
)
async def test_lines_delivered_at_once_are_one_paste(arriving, lines):
    keyboard, terminal = os.openpty()
    os.write(keyboard, arriving + b"\x04")
    reader = LineReader(terminal)
    assert [(line, reader.is_pasted) async for line in reader] == lines
    os.close(keyboard)
    os.close(terminal)


async def test_lines_typed_during_a_command_are_not_a_paste():
    keyboard, terminal = os.openpty()
    reader, read = LineReader(terminal), []
    os.write(keyboard, b"/models\n")
    async for line in reader:
        read.append((line, reader.is_pasted))
        for typed in (b"one\n", b"two\n") if len(read) == 1 else ():
            os.write(keyboard, typed)
            await asyncio.sleep(3 * AT_ONCE_S)
        if line.endswith("two"):
            break
    assert read == [("/models", False), ("one", False), ("two", False)]
    os.close(keyboard)
    os.close(terminal)


async def test_truncated_terminal_lines_are_not_sent(config):
    keyboard, terminal = os.openpty()
    session = Session(config, is_typed=True)
    os.write(keyboard, b"w " * 3000 + b"\n")
    running = asyncio.create_task(session.plain.run(LineReader(terminal)))
    async with asyncio.timeout(PATIENCE_S):
        while "4,095" not in session.errors.getvalue():
            await asyncio.sleep(AT_ONCE_S)
        os.write(keyboard, b"/quit\n")
        await running
    assert not session.plain.chat.state.conversation.messages
    os.close(keyboard)
    os.close(terminal)


def test_unknown_context_is_not_printed_as_0():
    out = io.StringIO()
    view = PlainView(LineWriter(out, out), echoes=True)
    view.phase = Phase.LOADING
    info = SimpleNamespace(device="a server", context=0)
    conversation = SimpleNamespace(id="a", messages=[])
    state = SimpleNamespace(phase=Phase.READY, info=info, conversation=conversation, model_name="fake", asked="server")
    view.show_state(state)
    assert "fake on a server" in out.getvalue()
    assert "context 0" not in out.getvalue()


async def test_input_after_quit_is_left_to_the_shell(config):
    keyboard, terminal = os.openpty()
    os.write(keyboard, b"/quit\n")
    await Session(config, is_typed=True).plain.run(LineReader(terminal))
    os.write(keyboard, b"ls\n")
    await asyncio.sleep(3 * AT_ONCE_S)
    assert select.select([terminal], [], [], 0)[0]
    os.close(keyboard)
    os.close(terminal)


async def test_a_regular_file_is_read(tmp_path):
    (tmp_path / "lines").write_bytes(b"one\ntwo\n")
    with (tmp_path / "lines").open() as file:
        assert [line async for line in LineReader(file.fileno())] == ["one", "two"]


async def test_an_endless_line_is_refused_without_blocking(monkeypatch):
    monkeypatch.setattr(view, "LONGEST", 2**21)
    turns = 0

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    with open("/dev/zero") as endless, pytest.raises(UsageError, match="stdin"):
        await anext(aiter(LineReader(endless.fileno())))
    counting.cancel()
    assert turns > 10


def test_text_continues_a_line_and_lines_stand_alone():
    out, errors = io.StringIO(), io.StringIO()
    lines = LineWriter(out, errors)
    lines.text("model: a")
    lines.text("b\x1b[31m")
    lines.line("[12 tok · full]")
    lines.text("c\n")
    lines.problem("── wrong: \x9b ──")
    lines.ask()
    assert out.getvalue() == "model: ab␛[31m\n[12 tok, full]\nc\n"
    assert errors.getvalue() == "wrong: ‹U+009B›\n"


def test_output_ends_an_open_prompt():
    out = io.StringIO()
    lines = LineWriter(out, out, "> ")
    lines.ask()
    lines.ask()
    lines.entered()
    lines.text("model: a")
    lines.ask()
    lines.line("[note]")
    assert out.getvalue() == "> model: a\n> \n[note]\n"


def test_symbols_are_spelled_out():
    assert spoken("full → sync · “x” …\nkept") == 'full to sync, "x" ...\nkept'
