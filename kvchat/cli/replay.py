"""``kvchat replay``: a recorded run played in the application, without torch and without a model."""

from __future__ import annotations

import sys
from pathlib import Path

from kvchat import paths
from kvchat.cli.chat import start
from kvchat.config import sources
from kvchat.protocol import recording

ENGINE = (sys.executable, "-m", "kvchat.replay.engine")


def replay(file: Path | None, plain: bool) -> int:
    """Play ``file``, or the demonstration that comes with kvchat; the exit code.

    Raises:
        UsageError: the file is no recording, or a setting is wrong.
    """
    chosen = file or paths.bundled_recording()
    recording.read(chosen)  # refused here, not behind the screen
    from kvchat.tui.config import AppConfig

    resolved = sources.load()
    config = AppConfig(
        log_file=paths.log_file(),
        theme=resolved.settings.ui.theme,
        theme_dirs=(paths.user_themes_dir(),),
        keys=resolved.settings.keys.given(),
        engine_command=(*ENGINE, str(chosen.absolute())),
        replay=chosen.name,
        resolved=resolved,
    )
    return start(config, plain)
