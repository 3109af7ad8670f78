"""Questions that wait for the engine."""

from __future__ import annotations

from kvchat.tui.view import ChatView, QuestionView


class QuestionQueue:
    """Sent one after the other as the engine gets ready; ``is_held`` they wait for the user too.

    A stopped or failed answer holds them: what was queued behind it may not be meant any more.
    """

    def __init__(self, view: ChatView) -> None:
        self._view = view
        self._waiting: list[QuestionView] = []
        self.is_held = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def last(self) -> str:
        """The text of the question queued last, empty if none waits."""
        return self._waiting[-1].text if self._waiting else ""

    def add(self, question: QuestionView) -> None:
        """Let a question wait behind the others."""
        self._waiting.append(question)
        self._show()

    def take_next(self) -> QuestionView | None:
        """Remove the first question; None if none waits or they are held."""
        if self.is_held or not self._waiting:
            return None
        question = self._waiting.pop(0)
        self._show()
        return question

    async def take_back(self) -> str:
        """Remove the last question, also from the transcript, and return its text; empty if none waits."""
        if not self._waiting:
            return ""
        question = self._waiting.pop()
        self._show()
        await question.remove()
        return question.text

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
        texts = "\n\n".join(question.text for question in self._waiting)
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
