"""``.ci/long_chat.py`` measures the application that there is today, and its result has a table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.environment import environ

from kvchat.bench.report import rendered

SCRIPT = Path(__file__).parents[1] / ".ci" / "long_chat.py"
SMALL = "--messages 30 --tokens 3000 --rounds 1 --keys 3 --sizes 80x24"


@pytest.mark.slow("the application is started, and each screen waited for until it stands still")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
def test_every_time_is_taken(tmp_path):
    file = tmp_path / "result.json"
    command = [sys.executable, str(SCRIPT), *SMALL.split(), "--out", str(file)]
    ended = subprocess.run(command, env=environ(), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(file.read_text(encoding="utf-8"))
    times = {row["action"]: row["times"] for row in result["summary"]}
    named = {"a key": 3, "a key during an answer": 3, "a page up": 4, "/find": 1, "another width": 2, "opened": 1}
    assert times == named
    assert all(row["computed"] > 0 and 0 < row["p50"] <= row["p95"] <= row["longest"] for row in result["summary"])
    table = rendered([result])
    assert "| a key during an answer | 80x24 | 3 |" in table
    assert "textual" in table
