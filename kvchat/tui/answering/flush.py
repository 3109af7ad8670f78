"""When and how much of a growing Markdown text is parsed: the cost of ``Markdown.append`` decides.

Textual re-parses the last block on every append: 5 ms in prose, but 49 ms in a fence of 300 tokens and 141 ms in a
table of 60 rows. So an open fence or table stays plain text until it closes.
"""

from __future__ import annotations

SHORTEST_S = 0.05
LONGEST_S = 0.4


def interval(cost_s: float) -> float:
    """Seconds until the next flush after one that took ``cost_s``: at most a fifth of the time is spent parsing."""
    return min(max(4 * cost_s, SHORTEST_S), LONGEST_S)


class OpenBlock:
    """Splits a growing text into what may be parsed and the fence or table still open at its end."""

    def __init__(self) -> None:
        self.tail = ""
        self._inside_line = False

    def feed(self, text: str) -> str:
        """Take more text and give what is closed by now; the rest is ``tail``."""
        self.tail += text
        end = _closed_end(self.tail, self._inside_line)
        closed, self.tail = self.tail[:end], self.tail[end:]
        if closed:
            self._inside_line = not closed.endswith("\n")
        return closed


def _closed_end(text: str, inside_line: bool) -> int:
    """Index after the last line of ``text`` outside an open fence or table."""
    end = position = 0
    fence = ""
    for line in _lines(text):
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
        elif word.startswith("|") or (not complete and word in ("", "`", "``", "~", "~~")):
            continue
        end = position
    return end


def _lines(text: str) -> list[str]:
    """Lines with their newline, split at newlines only (``splitlines`` knows eight more separators)."""
    lines = [line + "\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    return [line for line in lines if line]
