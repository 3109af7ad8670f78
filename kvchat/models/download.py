"""Download a model in a separate process, so that a chat can continue.

``python -m kvchat.models.download PID NAME`` ends when the process PID that started it ends; like the engine, it sets
that up before it imports anything else.

Each line on stdout is a JSON object: ``{"stage": TEXT}`` while it works, finally ``{"done": NAME}`` or
``{"error": [TITLE, DETAIL, HINT]}``. If it is killed, the next download resumes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from kvchat.errors import KvchatError
from kvchat.process import die_with_parent


def download(name: str, progress: Callable[[str], None]) -> None:
    """Download the model ``name`` unless its configuration shows that kvchat cannot run it.

    Raises:
        ModelError: there is no such model, it is gated, it cannot be run, or the hub cannot be reached.
    """
    from kvchat.models.checkpoint import complete, locate

    location = locate(name, progress)  # refuses a wrong name before torch is imported
    progress("Checking the model")
    from kvchat.models.description import describe, quiet

    if not location.gguf:
        with quiet():
            describe(name, "cpu", "auto", lambda stage: None)
    complete(location, progress)


def main(name: str) -> None:
    try:
        download(name, lambda stage: _say(stage=stage))
        _say(done=name)
    except KvchatError as error:
        _say(error=[error.title, error.detail, error.hint])


def _say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    main(sys.argv[2])
