"""Random keys, lines, clicks, pastes and sizes: no exception, no process left, memory bounded, all screens seen.

``KVCHAT_TEST_KEYS=1200`` types for 1,200 seconds each with a fake engine, the bundled model and a recording. It runs
only then, as in ``.ci/long``: the effect of a key depends on timing, so a run may find a new fault.
"""

import os
import sys
from pathlib import Path

import pytest
from support import start_app, start_kvchat
from support.environment import environ
from support.random_keys import SCREENS, RandomKeys

SECONDS = float(os.environ.get("KVCHAT_TEST_KEYS", "0"))
SEED = int(os.environ.get("KVCHAT_TEST_SEED", "1"))
MAX_MIB = 400
ENOUGH = 8_000  # keys that reach every screen
KVCHAT = (sys.executable, start_kvchat.__file__)
PROGRAMS = {"fake engine": None, "bundled model": KVCHAT, "recording": (*KVCHAT, "replay")}

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc"),
    pytest.mark.skipif(not SECONDS, reason="KVCHAT_TEST_KEYS is not set"),
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_random_keys_do_not_crash(tmp_path, program, count):
    folder = tmp_path / "working folder"
    folder.mkdir()
    environment = environ(HOME=str(tmp_path), XDG_STATE_HOME=str(tmp_path / "state"), XDG_CACHE_HOME=str(tmp_path))
    typed = RandomKeys(PROGRAMS[program] or start_app.command(tmp_path), environment, folder, SEED)
    typed.press(3, SECONDS)
    count["keys"] += typed.keys
    summary = f"{typed.keys} keys, {typed.runs} runs, {max(typed.memory)} MiB at most, {sorted(typed.seen)}"
    print(f"{program}: {summary}")  # noqa: T201  # what a long run did
    assert max(typed.memory) < MAX_MIB
    assert not [log for log in tmp_path.rglob("*log*") if log.is_file() and "Traceback" in log.read_text()]
    if typed.keys > ENOUGH:
        assert typed.seen == set(SCREENS)
