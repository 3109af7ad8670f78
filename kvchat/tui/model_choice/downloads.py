"""A download in a process of its own, so that neither the screen nor an answer waits for it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvchat.errors import EngineError, ModelError
from kvchat.foreign_text import visible

DOWNLOAD = (sys.executable, "-m", "kvchat.models.download", str(os.getpid()))


class Download:
    """At most one at a time; ``command`` gets the model's name as its last word."""

    def __init__(self, command: Sequence[str] | None) -> None:
        self._command = tuple(command or DOWNLOAD)
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopped = False

    async def run(self, name: str, report: Callable[[str], None]) -> bool:
        """Download the model ``name``; ``report`` is called with each stage. False if it was stopped.

        Raises:
            ModelError: it cannot be downloaded; EngineError: the process cannot be started, or ended by itself.
        """
        self._is_stopped = False
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                name,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise EngineError(
                "The download cannot be started.", f"{self._command[0]}: {error.strerror}.", "Repair the installation."
            ) from None
        if self._is_stopped:  # while it was being started
            self.stop()
        try:
            return await self._follow(self._process, name, report)
        finally:
            self.stop()
            await self._process.communicate()  # an unread pipe would outlive the event loop
            self._process = None

    def stop(self) -> None:
        """End the download; what has come stays in the cache."""
        self._is_stopped = True
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()

    async def _follow(self, process: asyncio.subprocess.Process, name: str, report: Callable[[str], None]) -> bool:
        assert process.stdout is not None
        async for line in process.stdout:
            said = json.loads(line)
            if "done" in said:
                return True
            if "error" in said:
                raise ModelError(*map(visible, said["error"]))
            report(visible(said["stage"]))
        if self._is_stopped:
            return False
        raise EngineError(f"The download of {name} ended by itself.", hint=f"/model {name} goes on with it.")
