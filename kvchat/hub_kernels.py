"""Compiled code from a hub: where the package ``kernels`` is installed, other packages download and run it unasked."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

TRANSFORMERS = "USE_HUB_KERNELS"  # transformers reads it when it is imported
BITSANDBYTES_LOG = "bitsandbytes.backends.cpu.ops"


def refuse_in_transformers() -> None:
    """Let transformers take no kernels, as for mixtures of experts, from a hub, unless the environment says so."""
    os.environ.setdefault(TRANSFORMERS, "NO")


def import_bitsandbytes(load: Callable[[str], Any] = importlib.import_module) -> Any:
    """Import bitsandbytes, which on a CPU that multiplies bfloat16 takes a kernel from a hub meanwhile, or warns.

    Raises:
        ImportError: it is not installed.
    """
    log = logging.getLogger(BITSANDBYTES_LOG)
    level, before = log.level, {name: sys.modules[name] for name in ("kernels",) if name in sys.modules}
    sys.modules["kernels"] = None  # type: ignore[assignment]  # an import of it fails
    log.setLevel(logging.ERROR)
    try:
        return load("bitsandbytes")
    finally:
        log.setLevel(level)
        del sys.modules["kernels"]
        sys.modules.update(before)
