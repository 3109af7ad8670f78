"""kvchat without anything Linux-specific; these tests have never run on a Mac."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import run_in_sequence

STUB = Path(__file__).parent / "support" / "macos"
ASKED = ["ask", "My cat is called Biscuit. What is my cat called?", "--temperature", "0", "--max-new-tokens", "20"]


def test_the_stub_hides_what_only_linux_has():
    code = "import os, sys; assert sys.platform == 'darwin'; os.listdir('/proc')"
    path = os.environ | {"PYTHONPATH": str(STUB)}
    ended = subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True, check=False)
    assert "FileNotFoundError" in ended.stderr


@pytest.mark.slow("a process imports torch and answers twice")
def test_ask_models_plan_and_doctor_work_without_linux():
    path = os.pathsep.join([str(STUB), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    asked = [[*ASKED, "--mode", mode] for mode in ("full", "speculative")]
    inspecting = [["models"], ["plan", "bundled"], ["doctor"]]
    done = run_in_sequence([*asked, *inspecting], os.environ | {"PYTHONPATH": path})
    assert [one.code for one in done] == [0] * 5, [one.err for one in done]
    assert all("Biscuit" in one.out for one in done[:2])
    assert not [one.out for one in done[2:] if "could not be read" in one.out]
