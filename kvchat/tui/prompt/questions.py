"""Turn the text of the prompt into the question that is sent."""

from __future__ import annotations

from collections.abc import Iterable

from kvchat.tui.prompt import mentions
from kvchat.tui.state import ChatState


def compose(parts: Iterable[mentions.Part], state: ChatState) -> str:
    """The question with the files that it mentions; a text in place of an answer is taken as it is.

    Raises:
        KvchatError: a file cannot be sent.
    """
    parts = tuple(parts)
    if state.edits_answer:
        return "".join(part.text for part in parts)
    return mentions.attach(parts, state.file_limit).text
