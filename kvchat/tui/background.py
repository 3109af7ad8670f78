"""Work beside a widget's own, ended with it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from textual.dom import DOMNode


def run_beside(
    node: DOMNode, work: Callable[[], Coroutine[Any, Any, object]], group: str = "default", exclusive: bool = False
) -> None:
    """Run a coroutine function as a worker of ``node``; an ``exclusive`` one ends the others of its ``group``.

    A function, because a worker that is ended before its first step would leave a coroutine that is never awaited.
    """
    node.run_worker(work, group=group, exclusive=exclusive)  # type: ignore[arg-type]  # Textual's type is too narrow
