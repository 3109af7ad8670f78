"""Drawing what comes faster than a screen is drawn, as text that streams.

A key that is typed meanwhile waits for what is being drawn. So most of the time nothing is: with 500 messages a layout
and its drawing take tens of milliseconds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from time import thread_time

from textual.message_pump import MessagePump

from kvchat.tui.timers import unskipped

SHORTEST_S = 0.05
LONGEST_S = 0.4


def interval(cost_s: float) -> float:
    """Seconds after a drawing that computed for ``cost_s``: at most a fifth of the time is spent drawing."""
    return min(max(4 * cost_s, SHORTEST_S), LONGEST_S)


class Paced:
    """Has ``draw`` called for all that was asked for since the last time, with rests between."""

    def __init__(self, pump: MessagePump, draw: Callable[[], Awaitable[None]]) -> None:
        self._pump, self._draw = pump, draw
        self._is_asked = self._is_at_work = False

    def ask(self) -> None:
        """Draw soon."""
        self._is_asked = True
        if not self._is_at_work:
            self._is_at_work = True
            self._after(SHORTEST_S, self._work)

    async def _work(self) -> None:
        self._is_at_work = self._is_asked
        if self._is_asked:
            self._is_asked, begun = False, thread_time()
            await self._draw()
            # A layout and its drawing, which are done by then, cost more than what asked for them.
            self._after(SHORTEST_S, partial(self._rest, begun))

    def _rest(self, begun: float) -> None:
        rest = interval(thread_time() - begun) - SHORTEST_S
        self._after(max(rest, 0.001), self._work)

    def _after(self, seconds: float, work: Callable[[], Awaitable[None] | None]) -> None:
        unskipped(self._pump.set_timer(seconds, work))
