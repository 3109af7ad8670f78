"""kvchat replay."""

from __future__ import annotations

import pytest

from kvchat.cli.chat import replay
from kvchat.errors import UsageError


def test_a_file_that_is_no_recording_is_refused_before_the_screen(tmp_path):
    (tmp_path / "notes.txt").write_text("hello\n")
    with pytest.raises(UsageError, match="no recording"):
        replay(tmp_path / "notes.txt", plain=True)
