import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.environment import environ
from support.patience import PATIENCE_S, wait_until

from kvchat import process
from kvchat import process as process_module
from kvchat.cli import chat
from kvchat.protocol import wire
from kvchat.protocol.client import ENGINE
from kvchat.protocol.messages import Load
from kvchat.tui import models

# Prints the child's process id once the child has called die_with_parent; the child never reads its stdin.
START = """
import subprocess, sys, time
from kvchat.process import die_with_parent
if sys.argv[1:]:
    die_with_parent()
    print("ready", flush=True)
    time.sleep(3600)
process = subprocess.Popen([*sys.orig_argv, "child"], stdout=subprocess.PIPE)
process.stdout.readline()
print(process.pid, flush=True)
time.sleep(3600)
"""


def state(pid: int) -> str:
    """The process state as a letter of ps; empty if the process is gone."""
    command = ["ps", "-o", "stat=", "-p", str(pid)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()[:1]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
@pytest.mark.parametrize(("ending", "stopped"), [(signal.SIGKILL, True), (signal.SIGTERM, False)])
def test_a_child_exits_with_its_parent(stopped, ending):
    with subprocess.Popen([sys.executable, "-c", START], stdout=subprocess.PIPE, env=environ()) as process:
        assert process.stdout
        child = int(process.stdout.readline())
        if stopped:
            os.kill(child, signal.SIGSTOP)
        process.send_signal(ending)
        process.wait(PATIENCE_S)
        wait_until(lambda: state(child) in ("", "Z"))


# The child calls die_with_parent only when its parent is gone, which the end of its stdin tells it.
TOO_LATE = """
import os, subprocess, sys
from kvchat.process import die_with_parent
if sys.argv[1:]:
    sys.stdin.read()
    die_with_parent(int(sys.argv[1]))
    print("it goes on")
else:
    subprocess.Popen([*sys.orig_argv, str(os.getpid())], stdin=subprocess.PIPE)
    os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_a_child_exits_if_its_parent_is_already_gone():
    command = [sys.executable, "-c", TOO_LATE]
    assert subprocess.run(command, capture_output=True, env=environ(), timeout=PATIENCE_S, check=True).stdout == b""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
@pytest.mark.parametrize("load", [b"", wire.encode(Load())])
def test_an_orphaned_engine_exits_before_importing_torch(load):
    """Killed within 0.2 s of an engine's start, the application was outlived by 1.0 to 1.3 s; with a load, 2 s more."""
    no_parent, pipe = os.getpid() - 1, subprocess.PIPE
    command = [sys.executable, "-X", "importtime", "-m", "kvchat.engine", str(no_parent)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environ()) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdin.write(load)
        process.stdin.flush()  # and left open: the engine does not wait for its end
        assert process.wait(PATIENCE_S) == 0
        imported = {line.split("|")[-1].strip() for line in process.stderr.read().decode().splitlines()}
        assert process.stdout.read() == b""
    assert "kvchat.process" in imported
    assert not imported & {"kvchat.engine.worker", "pydantic", "torch"}


def test_the_engines_command_names_its_parent():
    assert ENGINE[-2:] == ("kvchat.engine", str(os.getpid()))


def test_other_systems_do_nothing(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", None)
    process_module.die_with_parent()


def test_nothing_is_imported_from_the_current_folder(tmp_path):
    """A random.py in the folder where a user started kvchat ended the engine."""
    (tmp_path / "random.py").write_text("raise SystemExit(9)")
    for command in (process_module.python("-c", "import random"), process_module.python("-m", "random")):
        assert subprocess.run(command, cwd=tmp_path, stdout=subprocess.DEVNULL).returncode == 0
    for command in (ENGINE, models.DOWNLOAD, chat.ENGINE):
        assert command[:2] == process_module.python()


# ---- Threads that sleep after a short wait: set before torch is imported, unless the user chose otherwise


SHOWS = (
    "import os, sys; print(os.environ.get('OMP_WAIT_POLICY'), os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
)
ENTRIES = {
    "command line": "import sys; sys.argv = ['kvchat', '--version']\n"
    "from kvchat.cli import main\nmain.app = lambda **kwargs: None\nmain.main()",
    "engine": "import os; os.dup2(os.open(os.devnull, os.O_RDONLY), 0)\n"
    "from kvchat.engine import worker\n"
    "worker.claim_stdio = lambda: (open(os.devnull, 'rb'), open(os.devnull, 'wb'))\n"
    "worker.main()",
    "Python": "import sys, kvchat.engine\nkvchat.engine.session = sys\nsys.load = print\nkvchat.load",
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_threads_sleep_after_a_short_wait(entry):
    unset = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, "-c", f"{ENTRIES[entry]}\n{SHOWS}"]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["PASSIVE", str(process.SPINS), "False"]


@pytest.mark.parametrize("chosen", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "1000"}])
def test_the_users_wait_policy_is_kept(monkeypatch, chosen):
    monkeypatch.setattr(os, "environ", dict(chosen))
    process.spin_briefly()
    assert os.environ == chosen


def test_other_programs_get_the_users_environment(monkeypatch):
    before = {"PATH": "/bin"}
    monkeypatch.setattr(os, "environ", dict(before))
    process.spin_briefly()
    assert os.environ["GOMP_SPINCOUNT"] == str(process.SPINS)
    assert process.as_the_user_left_it() == before
    os.environ["GOMP_SPINCOUNT"] = "7"
    assert process.as_the_user_left_it() == os.environ


NO_LIMIT = "max 100000"
ONE_PER_CORE = ["0", "1", "2", "3", "4", "5", "6", "7"]
TWO_PER_CORE = ["0,4", "1,5", "2,6", "3,7"] * 2


def machine(folder: Path, siblings: list[str]) -> Path:
    """A folder like the system's, in which each processor lists those of its core."""
    for number, of_core in enumerate(siblings):
        (folder / f"cpu{number}" / "topology").mkdir(parents=True)
        (folder / f"cpu{number}" / "topology" / "thread_siblings_list").write_text(f"{of_core}\n")
    return folder


@pytest.mark.parametrize(
    ("quota", "usable", "siblings", "chosen", "expected"),
    [
        ("250000 100000", range(8), ONE_PER_CORE, {}, "2"),
        ("50000 100000", range(8), ONE_PER_CORE, {}, "1"),
        ("250000 100000", range(2), ONE_PER_CORE, {}, None),
        (NO_LIMIT, range(8), ONE_PER_CORE, {}, None),
        ("250000 100000", range(8), ONE_PER_CORE, {"OMP_NUM_THREADS": "6"}, "6"),
        ("250000 100000", range(8), ONE_PER_CORE, {"MKL_NUM_THREADS": "6"}, None),
        (NO_LIMIT, range(8), TWO_PER_CORE, {}, "4"),
        ("600000 100000", range(8), TWO_PER_CORE, {}, "4"),
        ("250000 100000", range(8), TWO_PER_CORE, {}, "2"),
        (NO_LIMIT, (0, 4, 1), TWO_PER_CORE, {}, "2"),
        (NO_LIMIT, range(8), TWO_PER_CORE, {"OMP_NUM_THREADS": "8"}, "8"),
        (NO_LIMIT, range(9), TWO_PER_CORE, {}, None),
        ("600000 100000", range(9), TWO_PER_CORE, {}, "6"),
    ],
)
def test_threads_match_the_cores_and_the_container_quota(
    quota, usable, siblings, chosen, expected, tmp_path, monkeypatch
):
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(usable))
    monkeypatch.setattr(os, "environ", dict(chosen))
    process.use_physical_cores(tmp_path, machine(tmp_path / "cpu", siblings))
    assert os.environ.get("OMP_NUM_THREADS") == expected


def test_torch_chooses_the_threads_on_unknown_systems(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    process.use_physical_cores(tmp_path, tmp_path / "absent")
    assert os.environ == {}


# ---- Times of the processors that this process may use


TICKS = os.sysconf("SC_CLK_TCK")


def test_usable_processors_count_and_guest_time_counts_once(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 10})
    lines = [
        "cpu  9999 9999 9999 9999 9999 9999 9999 9999 9999 9999",
        "cpu0 7777 0 0 0 0 0 0 0 0 0",
        "cpu1 1 2 3 4 5 6 7 8 1 2",
        "cpu10 10 0 0 20 0 0 0 0 10 0",
        "intr 5 5",
    ]
    stat = tmp_path / "stat"
    stat.write_text("\n".join(lines))
    assert process.processor_time(stat) == (pytest.approx(66 / TICKS), pytest.approx(29 / TICKS), 2)


@pytest.mark.parametrize("text", [None, "", "cpu 1 2 3 4 5 6 7 8"])
def test_missing_processor_times_are_none(tmp_path, text):
    stat = tmp_path / "stat"
    if text is not None:
        stat.write_text(text)
    assert process.processor_time(stat) is None


def test_processor_times_of_this_system_are_plausible():
    found = process.processor_time()
    if found is None:
        pytest.skip("this system has no such times")
    assert found.processors == len(os.sched_getaffinity(0))
    assert found.total > found.idle > 0
