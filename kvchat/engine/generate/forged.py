"""Names the message of a conversation, and the text in it, of which a chat template makes a control token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import count

from kvchat.engine.generate.escaping import ESCAPE
from kvchat.engine.generate.stand_ins import StandIns
from kvchat.errors import UsageError
from kvchat.foreign_text import visible

EXCERPT = 40  # characters
NAMES = {"user": "question", "assistant": "answer"}

Write = Callable[[str], str]


def refusal(roles: Sequence[str], texts: Sequence[str], forges: Callable[[Write], bool], is_folded: bool) -> UsageError:
    """The refusal of a conversation of which a template makes control tokens.

    ``forges`` tells that of what ``write`` makes of the texts, each given to it once, in their order. It is asked as
    often as ``texts`` and one of them can be halved. With ``is_folded`` the first question begins with the system text.
    """
    turn = bisect_left(range(len(texts) - 1), True, key=lambda turn: forges(_begun(turn, len(texts[turn]))))
    text = texts[turn]
    end = bisect_left(range(len(text)), True, key=lambda end: forges(_begun(turn, end)))
    said, place = _excerpt(text[:end]), _place(roles, turn, is_folded)
    return UsageError(
        f"The model's chat template would make a control token of what {place} says.",
        f"It changes messages (their case, their spaces), and this is then spelled like one: {said}",
        f"Edit or delete {place}, or choose another model.",
    )


def _begun(turn: int, end: int) -> Write:
    """Writes what comes before ``end`` in the text number ``turn`` as it is, and stand-ins for all that follows."""
    numbers, stand_ins = count(), StandIns()

    def write(text: str) -> str:
        number = next(numbers)
        kept = len(text) if number < turn else end if number == turn else 0
        return text[:kept] + stand_ins.put(text[kept:])

    return write


def _place(roles: Sequence[str], turn: int, is_folded: bool) -> str:
    """Such as "question 2": people count what they ask and what is answered."""
    role = roles[turn]
    if role == "system":
        return "the system prompt"
    name = f"{NAMES[role]} {roles[: turn + 1].count(role)}"
    return f"the system prompt or {name}" if is_folded and name == "question 1" else name


def _excerpt(text: str) -> str:
    """The end of a text, on one line."""
    line = " ".join(visible(text.replace(ESCAPE, "")).split())
    return f"“{'…' if len(line) > EXCERPT else ''}{line[-EXCERPT:]}”."
