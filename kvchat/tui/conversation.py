"""The conversation: what every ``Chat`` command carries. It survives a crash of the engine."""

from __future__ import annotations

from kvchat.protocol.messages import Chat, Sampling, Turn


class Conversation:
    """Turns in order, user and assistant alternating, with an optional system text before them."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.turns: list[Turn] = []

    def ask(self, text: str) -> None:
        """Add the user's turn."""
        self.turns.append(Turn("user", text))

    def answer(self, text: str) -> None:
        """Add the model's turn, whole or partial."""
        self.turns.append(Turn("assistant", text))

    def withdraw(self) -> str:
        """Take back a question that got no answer and give its text, so that the turns alternate again."""
        return self.turns.pop().content if self._ends_with("user") else ""

    def reopen(self) -> bool:
        """Drop the last answer so that its question can be asked again; False where there is none."""
        if self._ends_with("assistant"):
            self.turns.pop()
        return self._ends_with("user")

    def last_answer(self) -> str:
        """The text of the latest answer, empty before the first."""
        return next((turn.content for turn in reversed(self.turns) if turn.role == "assistant"), "")

    def clear(self) -> None:
        """Forget all turns; the system text stays."""
        self.turns.clear()

    def command(self, sampling: Sampling) -> Chat:
        """The whole conversation as a command to answer its last turn."""
        system = (Turn("system", self.system),) if self.system else ()
        return Chat((*system, *self.turns), sampling)

    def _ends_with(self, role: str) -> bool:
        return bool(self.turns) and self.turns[-1].role == role
