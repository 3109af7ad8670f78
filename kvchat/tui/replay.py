"""The pace of a recording, and details, which the engine computes only while they are shown."""

from __future__ import annotations

from dataclasses import dataclass

from kvchat.errors import UsageError
from kvchat.protocol.client import EngineClient
from kvchat.protocol.messages import MAX_PACE, Pace, Watch
from kvchat.tui.view import ChatView

SLOWEST = 1 / 8


@dataclass(eq=False)
class Replay:
    """The pace of the recording ``name``, which is empty for a real engine.

    ``is_real_time`` is False once the pace has been changed, because speeds measured on the screen are then wrong.
    ``is_over`` says that it was played to its end.
    """

    name: str
    client: EngineClient
    view: ChatView
    speed: float = 1.0
    is_paused: bool = False
    is_over: bool = False
    is_real_time: bool = True

    def pause(self) -> None:
        """Pause or resume."""
        self._set(self.speed, not self.is_paused)

    def refuse_question(self) -> None:
        if self.name:
            raise UsageError("This is a recording: there is no model to answer.", hint="`kvchat` alone starts a chat.")

    def change(self, factor: float) -> None:
        """Multiply the speed, and resume if paused."""
        self._set(min(max(self.speed * factor, SLOWEST), MAX_PACE), is_paused=False)

    def set_speed(self, speed: float) -> None:
        """Play ``speed`` times as fast as recorded, and resume if paused."""
        if not SLOWEST <= speed <= MAX_PACE:
            raise UsageError(f"The speed {speed:g} is not valid.", hint=f"Use {SLOWEST:g} to {MAX_PACE:g}.")
        self._set(speed, is_paused=False)

    def begin(self) -> None:
        """Set the pace of an engine that has just started to play."""
        self.is_real_time, self.is_over = self._pace == 1, False
        if self.name and not self.is_real_time:
            self.client.send(Pace(self._pace))

    @property
    def _pace(self) -> float:
        return 0.0 if self.is_paused else self.speed

    def _set(self, speed: float, is_paused: bool) -> None:
        if not self.name:
            raise UsageError("Nothing is being replayed.", hint="`kvchat replay` plays a recording.")
        self.is_real_time = False
        self.speed, self.is_paused = speed, is_paused
        self.client.send(Pace(self._pace))
        self.view.toast("Paused." if is_paused else f"{speed:g} times the speed of the recording.", title="Replay")


class DetailsWatch:
    """Requests details while anything shows them, or always if ``is_recorded``, so that a replay can show them."""

    def __init__(self, client: EngineClient, is_recorded: bool = False) -> None:
        self._client = client
        self._watching = {"recording"} if is_recorded else set[str]()

    def begin(self, who: str) -> None:
        """Request details for ``who``; the first ones come at once."""
        if who not in self._watching:
            self._watching.add(who)
            self._client.send(Watch(True))

    def end(self, who: str) -> None:
        """End the request of ``who``."""
        if who in self._watching:
            self._watching.remove(who)
            if not self._watching:
                self._client.send(Watch(False))

    def renew(self) -> None:
        """Request details again after a model was loaded, perhaps by a new process."""
        if self._watching:
            self._client.send(Watch(True))
