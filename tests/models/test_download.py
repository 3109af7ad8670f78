"""The download's process: it does not outlive the application."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.environment import environ
from support.patience import PATIENCE_S

from kvchat.tui.models import DOWNLOAD


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_a_download_whose_application_is_gone_ends_before_it_looks_for_anything() -> None:
    no_parent = str(os.getpid() - 1)
    command = [sys.executable, "-X", "importtime", "-m", "kvchat.models.download", no_parent, "bundled"]
    result = subprocess.run(command, capture_output=True, env=environ(), timeout=PATIENCE_S, check=True)
    imported = {line.split("|")[-1].strip() for line in result.stderr.decode().splitlines()}
    assert result.stdout == b""
    assert "kvchat.process" in imported
    assert "kvchat.models.checkpoint" not in imported


def test_the_application_starts_a_download_that_ends_with_it() -> None:
    assert DOWNLOAD[-2:] == ("kvchat.models.download", str(os.getpid()))
    command = [*DOWNLOAD, "bundled"]
    said = subprocess.run(command, capture_output=True, env=environ(), timeout=PATIENCE_S, check=True).stdout
    assert said.splitlines()[-1] == b'{"done": "bundled"}'
