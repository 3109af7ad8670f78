"""Tells how many bytes of a checkpoint are read while transformers loads it, tensor by tensor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout
from typing import Any

from kvchat.engine.model import each_weight
from kvchat.engine.model.byte_progress import ByteProgress


@contextmanager
def reported(
    sizes: Mapping[str, int], stage: str, progress: Callable[[str], None], cores: AbstractContextManager[None]
) -> Iterator[None]:
    """While a model is read ``progress`` is called with ``stage`` and the share of the files' bytes.

    Each weight is taken in on the ``cores`` that are free. What makes it names the tensors, whose ``sizes`` are known.
    """
    words = ByteProgress(_heard(progress), f"{stage} ·")
    with each_weight.passed_through(lambda items: _counted(items, sizes, words, cores)):
        yield


def _heard(progress: Callable[[str], None]) -> Callable[[str], None]:
    """``progress``, which may print, also where what libraries print goes nowhere."""
    out, err = sys.stdout, sys.stderr

    def tell(stage: str) -> None:
        with redirect_stdout(out), redirect_stderr(err):
            progress(stage)

    return tell


def _counted(
    items: list[Any], sizes: Mapping[str, int], words: ByteProgress, cores: AbstractContextManager[None]
) -> Iterator[Any]:
    nbytes = [sum(sizes.get(name, 0) for names in read.layer_targets.values() for name in names) for _, read in items]
    done, total = 0, sum(nbytes)
    for item, size in zip(items, nbytes, strict=True):
        with cores:
            yield item
        done += size
        words.tell(done, total)
