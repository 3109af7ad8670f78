"""What passes between the application and the terminal: any bytes come in, no control character of a text goes out."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable
from functools import partial

from rich.segment import Segment
from textual.color import Color
from textual.driver import Driver
from textual.filter import LineFilter

from kvchat.foreign_text import visible


class VisibleText(LineFilter):
    """Control characters of a drawn line become visible marks, whichever widget drew it.

    The widgets make texts ``visible`` before they lay them out; a mark made here may push the rest of its line aside.
    """

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Return the segments with marks."""
        return [Segment(visible(text), style, control) for text, style, control in segments]


def decode_leniently(driver: type[Driver]) -> type[Driver]:
    """Return ``driver``; bytes that are not UTF-8 become U+FFFD, where Textual's own decoder would end the application.

    The driver makes its decoder inside the loop that reads the terminal, by a name of its module.
    """
    module = sys.modules[driver.__module__]
    if hasattr(module, "getincrementaldecoder"):  # a driver without a terminal decodes nothing
        vars(module)["getincrementaldecoder"] = _lenient_decoder
    return driver


def _lenient_decoder(encoding: str) -> Callable[[], codecs.IncrementalDecoder]:
    return partial(codecs.getincrementaldecoder(encoding), errors="replace")
