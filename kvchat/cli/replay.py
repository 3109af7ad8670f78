"""``kvchat replay``: a recorded run played in the application, without torch and without a model."""

from __future__ import annotations

import sys
from pathlib import Path

from kvchat import paths
from kvchat.protocol import recording

ENGINE = (sys.executable, "-m", "kvchat.replay.engine")


def replay(file: Path | None, theme: str) -> int:
    """Play ``file``, or the demonstration that comes with kvchat; the exit code.

    Raises:
        UsageError: the file is no recording.
    """
    chosen = file or paths.bundled_recording()
    recording.read(chosen)  # refused here, not behind the screen
    from kvchat.tui.app import run
    from kvchat.tui.config import AppConfig

    return run(
        AppConfig(
            log_file=paths.log_file(),
            theme=theme,
            theme_dirs=(paths.user_themes_dir(),),
            engine_command=(*ENGINE, str(chosen.absolute())),
            replay=chosen.name,
        )
    )
