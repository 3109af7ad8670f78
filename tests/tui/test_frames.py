"""How many frames a second the application draws at most."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PRINTING = "import kvchat.tui.app; from textual import constants; print(constants.MAX_FPS)"


@pytest.mark.parametrize(("chosen", "frames"), [({}, "120"), ({"TEXTUAL_FPS": "30"}, "30")])
def test_a_key_need_not_wait_for_a_slow_frame_unless_somebody_chose_it(chosen: dict[str, str], frames: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TEXTUAL_FPS"} | chosen
    command = [sys.executable, "-c", PRINTING]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.split() == [frames]
