"""Choose how much of a growing Markdown text is parsed, by the cost of ``Markdown.append``.

Textual re-parses the last block on every append: 5 ms in prose, but 49 ms in a fence of 300 tokens and 141 ms in a
table of 60 rows. So an open fence or table stays plain text until it closes.
"""

from __future__ import annotations

import re

_BEGINNING = re.compile(r"`{0,2}|~{0,2}|[-*+]|#{1,6}|\d{1,9}[.)]?")


def closed_end(text: str, inside_line: bool) -> int:
    """Index up to which ``text`` may be parsed; a fence or table still open at its end is behind it.

    So is the last line while it may yet begin a fence, an item or a heading. ``inside_line``: it goes on with a line.
    """
    end = position = 0
    fence = ""
    for line in lines(text):
        position += len(line)
        word, complete = line.strip(), line.endswith("\n")
        if inside_line:
            inside_line = False
        elif fence:
            if not (complete and word.startswith(fence) and not word.strip(fence[0])):
                continue
            fence = ""
        elif word.startswith(("```", "~~~")):
            fence = word[: len(word) - len(word.lstrip(word[0]))]
            continue
        elif word.startswith("|") or (not complete and _BEGINNING.fullmatch(word)):
            continue
        end = position
    return end


def lines(text: str) -> list[str]:
    """Lines with their newline, split at newlines only (``splitlines`` knows eight more separators)."""
    found = [line + "\n" for line in text.split("\n")]
    found[-1] = found[-1][:-1]
    return [line for line in found if line]
