"""Details are asked of the engine only as long as a screen shows them or they are recorded; else they cost nothing."""

from __future__ import annotations

from kvchat.protocol.messages import Watch
from kvchat.tui.client import EngineClient

RECORDING = "recording"


class DetailsWatch:
    """Knows by name who shows details; where ``is_recorded`` they come always, so that a replay can show them."""

    def __init__(self, client: EngineClient, is_recorded: bool = False) -> None:
        self._client = client
        self._watching = {RECORDING} if is_recorded else set[str]()

    def begin(self, who: str) -> None:
        """``who`` shows details from now on, and wants them at once."""
        self._watching.add(who)
        self._client.send(Watch(True))

    def end(self, who: str) -> None:
        """``who`` shows them no longer."""
        if who in self._watching:
            self._watching.remove(who)
            if not self._watching:
                self._client.send(Watch(False))

    def renew(self) -> None:
        """Ask an engine that has just loaded a model: it may be a new process."""
        if self._watching:
            self._client.send(Watch(True))
