"""The weights of a checkpoint one by one as transformers reads them: it asks for a bar over them, which can be another.

Each item of the bar is the name of a weight and the object that makes it of the tensors in the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

READING = "Loading weights"  # transformers' name of the bar


@contextmanager
def passed_through(change: Callable[[list[Any]], Iterable[Any]]) -> Iterator[None]:
    """Meanwhile the items of the bar are those that ``change`` gives for them, after those of a context inside it."""
    from transformers.utils import logging

    def bar(factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if options.get("desc") == READING:
            items = change(list(args[0]))
            return outer(factory, (items, *args[1:]), options) if outer else items
        return outer(factory, args, options) if outer else factory(*args, **options)

    outer = logging.set_tqdm_hook(bar)
    try:
        yield
    finally:
        logging.set_tqdm_hook(outer)
