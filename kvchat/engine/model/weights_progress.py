"""Tells how many bytes of a checkpoint are read while transformers loads it, tensor by tensor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout
from typing import Any

from kvchat.engine.model.byte_progress import ByteProgress
from kvchat.engine.model.checkpoint import Checkpoint
from kvchat.engine.model.weight_sizes import stored_sizes

READING = "Loading weights"  # what transformers calls the bar over the weights it reads


@contextmanager
def reported(
    checkpoint: Checkpoint, stage: str, progress: Callable[[str], None], cores: AbstractContextManager[None]
) -> Iterator[None]:
    """While a model is read ``progress`` is called with ``stage`` and the share of the files' bytes.

    Each weight is taken in on the ``cores`` that are free.

    transformers' bar is replaced by one that counts: each item names the tensors of the files that it is made of.
    """
    from transformers.utils import logging

    sizes = stored_sizes(checkpoint)
    words = ByteProgress(_heard(progress), f"{stage} ·")

    def bar(factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if options.get("desc") != READING:
            return factory(*args, **options)
        return _counted(list(args[0]), sizes, words, cores)

    before = logging.set_tqdm_hook(bar)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


def _heard(progress: Callable[[str], None]) -> Callable[[str], None]:
    """``progress``, which may print, also where what libraries print goes nowhere."""
    out, err = sys.stdout, sys.stderr

    def tell(stage: str) -> None:
        with redirect_stdout(out), redirect_stderr(err):
            progress(stage)

    return tell


def _counted(
    items: list[Any], sizes: dict[str, int], words: ByteProgress, cores: AbstractContextManager[None]
) -> Iterator[Any]:
    nbytes = [sum(sizes.get(name, 0) for names in read.layer_targets.values() for name in names) for _, read in items]
    done, total = 0, sum(nbytes)
    for item, size in zip(items, nbytes, strict=True):
        with cores:
            yield item
        done += size
        words.tell(done, total)
