"""Thoughts before an answer: what a reasoning model writes between ``<think>`` and ``</think>``.

Some templates write the first tag into the prompt: then everything before a lone ``</think>`` is the thought.
"""

from __future__ import annotations

BEGIN, END = "<think>", "</think>"


def split(text: str) -> tuple[str, str]:
    """Split a text into the thought, empty without one, and the answer. A thought that is not over is all there is."""
    begun = text.lstrip()
    thought, end, answer = begun.removeprefix(BEGIN).partition(END)
    if end and (begun.startswith(BEGIN) or BEGIN not in thought):
        return thought.strip(), answer.lstrip("\n")
    if begun.startswith(BEGIN) or (begun and BEGIN.startswith(begun)):
        return begun.removeprefix(BEGIN).strip() if begun.startswith(BEGIN) else "", ""
    return "", text


def summarize(thought: str, is_open: bool) -> str:
    """The line of a folded thought."""
    words = len(thought.split())
    return f"▸ thinking … {words:,} words" if is_open else f"▸ thought, {words:,} words"
