"""Describes a model before its weights are read: its location, configuration, dtype and quantization."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from logging import CRITICAL, getLogger
from typing import Any

import torch

from kvchat.engine.model import gguf_config, gguf_weights, supported
from kvchat.engine.model.checkpoint import ModelLocation, locate, read_gguf, read_headers, read_json
from kvchat.engine.model.device import resolve_device, resolve_dtype
from kvchat.engine.model.hub import Progress
from kvchat.engine.model.weight_sizes import without_memory
from kvchat.errors import KvchatError
from kvchat.gguf_file import GgufFile
from kvchat.stored_tensors import StoredTensor

LOUD = (
    "bitsandbytes",
    "torchao",
    "torch.utils._pytree",
)  # say which kernels they lack, and what they are going to drop


@dataclass(frozen=True, eq=False)
class ModelDescription:
    """A model that kvchat can run, and how: transformers' class for its text, device and dtype.

    ``config`` is that of the whole checkpoint, ``text_config`` the one to build the class with.
    """

    location: ModelLocation
    config: Any
    model_class: Any
    text_config: Any
    device: torch.device
    dtype: torch.dtype

    @cached_property
    def shapes(self) -> Any:
        """The model without memory for its weights."""
        return without_memory(self.model_class, self.text_config, self.dtype)

    @cached_property
    def gguf(self) -> GgufFile:
        """The header of a model that is a GGUF file."""
        return read_gguf(self.location.folder / self.location.gguf)

    @cached_property
    def gguf_weights(self) -> dict[str, gguf_weights.Unpacked]:
        """The weights of a model that is a GGUF file, by transformers' names."""
        return gguf_weights.weights(self.gguf, self.shapes)

    @cached_property
    def stored(self) -> list[StoredTensor]:
        """The tensors in safetensors files; for weights that are not downloaded the hub is asked, file by file."""
        return read_headers(self.location)


def describe(name: str, device: str, dtype: str, progress: Progress) -> ModelDescription:
    """Locate the model ``name`` and read its configuration, of a hub repository without its weights.

    Raises:
        ModelError: it cannot be found or read, or kvchat cannot run it; UsageError: no such device or dtype.
    """
    on = resolve_device(device)
    location = locate(name, progress)
    try:
        config = _read_config(location)
        supported.check_quantization(config, location.name)
        model_class, text_config = supported.model_class(config)
        resolved = resolve_dtype(dtype, config, on)
    except KvchatError:
        raise
    except Exception as error:  # whatever its configuration leads to
        raise supported.unreadable(location.name, "its configuration", error) from error
    return ModelDescription(location, config, model_class, text_config, on, resolved)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """transformers neither logs nor draws bars inside this block: the screen belongs to the application."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    loggers = [getLogger(name) for name in LOUD]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(CRITICAL)
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        for logger, before in zip(loggers, levels, strict=True):
            logger.setLevel(before)
        if bars:
            logging.enable_progress_bar()


def _read_config(location: ModelLocation) -> Any:
    from transformers import AutoConfig

    if location.gguf:
        return gguf_config.of_file(location.folder / location.gguf, location.name)
    # Its message for a damaged file is better, and transformers builds lists as long as a file says.
    supported.check_counts(read_json(location.folder / "config.json"), location.name)
    try:
        return AutoConfig.from_pretrained(location.folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the hub's checks of a field's type have errors of their own
        raise supported.unreadable(location.name, "its config.json", error) from error
