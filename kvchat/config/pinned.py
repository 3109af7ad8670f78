"""The limit of what is pinned; known to the engine and to the chat, which refuses before it asks the engine."""

from __future__ import annotations

from kvchat.errors import TooMuchPinnedError

SHARE = 2  # of the model's context at most one part in so many is pinned


def refuse_too_much(model: str, context: int, messages: int, system: int = 0) -> None:
    """Refuse to pin so many tokens of ``messages`` and of the ``system`` prompt beside each other.

    Raises:
        TooMuchPinnedError: they leave the model too little of its context for the rest.
    """
    if messages + system <= context // SHARE:
        return
    parts = (("the system prompt", system), ("the pinned messages", messages))
    pinned = " and ".join(f"{name} {tokens:,}" for name, tokens in parts if tokens)
    raise TooMuchPinnedError(
        "Too much is pinned.",
        f"In tokens: {pinned}; of the {context:,} that {model} can read at once at most {context // SHARE:,} may be "
        "pinned, so that room is left for what a mode keeps.",
        "Pin less: /pin on a pinned message unpins it, /pin system the system prompt, /pin none all.",
    )
