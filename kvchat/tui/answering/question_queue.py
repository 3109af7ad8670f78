"""Questions and commands that wait for the engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvchat.tui.view import ChatView, QuestionView


@dataclass(frozen=True)
class Waiting:
    """A question, or a command, as it stands in the transcript; ``run`` sends or does it."""

    view: QuestionView
    run: Callable[[], Awaitable[None]]
    is_question: bool = True


class QuestionQueue:
    """They are sent one after the other as the engine gets ready; ``is_held`` they wait for the user too.

    A stopped or failed answer holds them: what was queued behind it may not be meant any more.
    """

    def __init__(self, view: ChatView) -> None:
        self._view = view
        self._waiting: list[Waiting] = []
        self.is_held = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def has_questions(self) -> bool:
        """True if a question waits, not only commands."""
        return any(one.is_question for one in self._waiting)

    @property
    def goes_on(self) -> bool:
        """True if the first is sent by itself, once the engine is ready."""
        return bool(self._waiting) and not self.is_held

    @property
    def last(self) -> str:
        """The text of what was queued last, empty if nothing waits."""
        return self._waiting[-1].view.text if self._waiting else ""

    def add(self, waiting: Waiting) -> None:
        """Let a question or a command wait behind the others."""
        self._waiting.append(waiting)
        self._show()

    def take_next(self) -> Waiting | None:
        """Remove the first; None if none waits or they are held."""
        if not self.goes_on:
            return None
        waiting = self._waiting.pop(0)
        self._show()
        return waiting

    async def take_back(self) -> str:
        """Remove the last one, also from the transcript, and return its text; empty if none waits."""
        if not self._waiting:
            return ""
        view = self._waiting.pop().view
        self._show()
        await view.remove()
        return view.text

    def hold(self) -> None:
        """Send none of those that wait until they are released."""
        self.is_held = True
        self._show()

    def release(self) -> None:
        """Send them again."""
        self.is_held = False
        self._show()

    def leave(self) -> str:
        """Forget all, whose widgets go with the conversation; their texts."""
        texts = "\n\n".join(one.view.text for one in self._waiting)
        self._waiting.clear()
        self._show()
        return texts

    async def clear(self) -> None:
        """Remove all, also from the transcript."""
        while self._waiting:
            await self.take_back()

    def _show(self) -> None:
        self.is_held = self.is_held and bool(self._waiting)
        self._view.show_queue(len(self._waiting), self.is_held)
