"""The engine client: coalescing, crashes, restarts, no orphans, a log that cannot be written."""

import asyncio
import errno
import os
import signal
import sys
from pathlib import Path
from types import UnionType

import pytest
from support import start_app
from support.environment import PYTHONPATH
from support.hostile_engine import ANSWER
from support.patience import PATIENCE_S

from kvchat.errors import EngineError
from kvchat.protocol import client as client_module
from kvchat.protocol.client import Crashed, EngineClient, Report, coalesce
from kvchat.protocol.figures import Snapshot
from kvchat.protocol.messages import Chat, Finished, Load, Loaded, Prefilled, Rebuild, Sampling, Stop, Text, Turn

HOSTILE_ENGINE = Path(__file__).parents[1] / "support" / "hostile_engine.py"
FAKE_ENGINE = (sys.executable, str(start_app.FAKE_ENGINE))


def snapshot(total: int) -> Snapshot:
    return Snapshot("full", {}, total, total, 1024, 0, 0)


async def received(client: EngineClient, kind: type | UnionType) -> Report:
    """The next report of a kind."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for report in await client.receive():
                if isinstance(report, kind):
                    return report


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture
async def client(tmp_path):
    client = EngineClient(FAKE_ENGINE, tmp_path / "log" / "kvchat.log")
    yield client
    await client.close()


def test_coalescing_merges_text_and_keeps_the_latest_figures():
    reports = [snapshot(1), Text("a", 1), Prefilled(1, 9), Prefilled(2, 9), Text("b", 1), snapshot(2), Text("c", 2)]
    assert coalesce(reports) == [Text("a", 1), Prefilled(2, 9), Text("b", 1), snapshot(2), Text("c", 2)]
    assert coalesce([Text("a", 1), Text("b", 1)]) == [Text("ab", 2)]
    assert coalesce([snapshot(1), Text("a", 1), snapshot(2), Text("b", 1), snapshot(3)])[-1] == snapshot(3)
    assert coalesce([]) == []


async def test_the_engine_answers_with_a_private_log_and_exits(client, monkeypatch):
    monkeypatch.setattr(client_module, "GRACE_S", PATIENCE_S)
    await client.start()
    assert (client.log_file.stat().st_mode & 0o777, client.log_file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    client.send(Load())
    loaded = await received(client, Loaded)
    assert loaded.model == "kvchat-pocket"
    client.send(Chat((Turn("user", "hello"),), Sampling()))
    assert (await received(client, Text)).text.startswith("Section")
    process = client._process
    await client.close()
    assert process.returncode == 0, "it exits by itself when its stdin closes"


async def test_reports_of_the_engine_are_sanitized_except_the_answer(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    client = EngineClient((sys.executable, str(HOSTILE_ENGINE)), tmp_path / "log")
    await client.start()
    client.send(Load())
    assert "␛]52" in (await received(client, Loaded)).notes[0]
    client.send(Chat((Turn("user", "hello"),), Sampling()))
    assert (await received(client, Finished)).text == ANSWER
    client.send(Chat((Turn("user", "crash"),), Sampling()))
    assert "␛]52" in "".join((await received(client, Crashed)).log)
    await client.close()


async def test_a_crash_reports_exit_code_and_log_of_this_run(client):
    client.log_file.parent.mkdir()
    client.log_file.write_text("an older run\n")
    await client.start()
    client.send(Chat((Turn("user", "crash"),), Sampling()))
    crashed = await received(client, Crashed)
    assert crashed == Crashed(3, ("RuntimeError: the fake engine was told to crash",))
    assert not client.alive
    client.send(Stop())


async def test_a_crash_reports_the_lines_before_the_stack_dump(client):
    await client.start()
    dump = ["Fatal Python error: Aborted", "", "Current thread (most recent call first):", *["  File"] * 900]
    client.log_file.write_text("\n".join([client.log_file.read_text(), "memory allocation of 7 bytes failed", *dump]))
    os.kill(client.pid, signal.SIGABRT)
    crashed = await received(client, Crashed)
    assert crashed == Crashed(-6, ("memory allocation of 7 bytes failed", "Fatal Python error: Aborted"))
    assert crashed.lacked_memory


async def test_a_killed_engine_is_a_crash_and_can_be_restarted(client):
    await client.start()
    pid = client.pid
    os.kill(pid, signal.SIGKILL)
    assert (await received(client, Crashed)).code == -signal.SIGKILL
    await client.restart()
    assert client.pid != pid
    client.send(Load())
    assert await received(client, Loaded)


async def test_restarting_a_live_engine_is_not_a_crash(client):
    await client.start()
    pid = client.pid
    await client.restart()
    assert gone(pid)
    client.send(Load())
    assert isinstance(await received(client, Loaded | Crashed), Loaded)


async def test_a_forgotten_engine_reports_nothing(client):
    await client.start()
    client.send(Load())
    await received(client, Loaded)
    client.send(Rebuild())
    async with asyncio.timeout(PATIENCE_S):
        while not client._inbox:
            await asyncio.sleep(0.01)
    client.forget()
    client.send(Rebuild())
    client.kill()
    await client._process.wait()
    await asyncio.wait([client._reader])
    assert not client._inbox
    await client.restart()
    client.send(Load())
    await received(client, Loaded)


async def test_concurrent_restarts_leave_one_engine(client, monkeypatch):
    started, start = [], asyncio.create_subprocess_exec

    async def recording(*command, **streams):
        started.append(await start(*command, **streams))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", recording)
    await client.start()
    await asyncio.gather(client.restart(), client.restart(), client.close(), client.restart())
    assert [process.returncode is None for process in started] == [False, False, False, True]
    assert client.pid == started[-1].pid


async def test_the_engine_is_killed_if_closing_is_cancelled(tmp_path):
    deaf = "import sys, time; sys.stdin.read(); time.sleep(3600)"
    client = EngineClient((sys.executable, "-c", deaf), tmp_path / "log")
    await client.start()
    process = client._process
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    closing.cancel()
    async with asyncio.timeout(PATIENCE_S):
        assert await process.wait() == -signal.SIGKILL


async def test_closing_leaves_no_orphan_of_a_hung_engine(tmp_path, monkeypatch):
    monkeypatch.setattr(client_module, "GRACE_S", 0.1)
    deaf = "import sys, time; sys.stdout.write('x'); sys.stdin.read(); time.sleep(3600)"
    client = EngineClient((sys.executable, "-c", deaf), tmp_path / "log")
    await client.start()
    pid = client.pid
    await client.close()
    assert gone(pid)


async def test_other_output_on_stdout_is_a_crash(tmp_path):
    babble = "import time; print('hello, I am no engine', flush=True); time.sleep(3600)"
    client = EngineClient((sys.executable, "-c", babble), tmp_path / "log")
    await client.start()
    crashed = await received(client, Crashed)
    assert "protocol" in crashed.log[-1]
    await client.close()


@pytest.mark.parametrize("log", ["/dev/full", "/proc/nowhere/kvchat.log"])
async def test_an_unwritable_log_is_reported_and_not_needed(log):
    client = EngineClient(FAKE_ENGINE, Path(log))
    await client.start()
    assert log in client.log_problem
    client.send(Chat((Turn("user", "crash"),), Sampling()))
    assert await received(client, Crashed) == Crashed(3, ())
    await client.close()


async def test_a_command_that_cannot_start_is_reported(tmp_path, monkeypatch):
    with pytest.raises(EngineError, match="cannot start"):
        await EngineClient(("/nonexistent/engine",), tmp_path / "log").start()

    async def start(*command, **streams):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    with pytest.raises(EngineError, match=f"{os.strerror(errno.EMFILE)}.*limit of open files"):
        await EngineClient(FAKE_ENGINE, tmp_path / "log").start()
