"""A hook of the build: wheel and sdist say in ``kvchat/commit.txt`` which commit they are of."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Commit(BuildHookInterface[Any]):
    """Adds the file where there is a checkout; an sdist has it already."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the file outside the tree, so that no checkout says what it was built from once."""
        if version == "editable" or not (Path(self.root) / ".git").exists():
            return
        named = subprocess.run(["git", "-C", self.root, "rev-parse", "HEAD"], capture_output=True, text=True)
        if not named.returncode:
            self._folder = tempfile.TemporaryDirectory()  # removed with the hook
            file = Path(self._folder.name) / "commit.txt"
            file.write_text(named.stdout)
            build_data["force_include"][str(file)] = "kvchat/commit.txt"
