"""Details are asked of the engine only as long as a screen shows them; otherwise they cost nothing."""

from __future__ import annotations

from kvchat.protocol.details import Watch
from kvchat.tui.client import EngineClient


class DetailsWatch:
    """Knows by name who shows details."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._watching: set[str] = set()

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
