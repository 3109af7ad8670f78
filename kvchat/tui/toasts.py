"""Toasts that go, on a busy machine too."""

from __future__ import annotations

from textual.notifications import Notification

LEAST_S = 0.1


class Notice(Notification):
    """The text of a toast, which has time left while it is made.

    Textual makes a toast for each screen that opens and asks the time twice: where the notification expires in between,
    its timer has a negative length and turns without end, before anything else gets its turn. A timer shorter than the
    process stands still may be left out, and the toast stays.
    """

    @property
    def time_left(self) -> float:
        """The time in seconds until it expires, or a little."""
        return max(super().time_left, LEAST_S)

    @property
    def has_expired(self) -> bool:
        """It is to be shown no more."""
        return super().time_left <= 0
