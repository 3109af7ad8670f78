"""Describes a model before its weights are read: its location, configuration, dtype and quantization."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from logging import CRITICAL, getLogger
from typing import Any

import torch

from kvchat.engine.model import gguf_file, gguf_rope, supported
from kvchat.engine.model.checkpoint import ModelLocation, locate, read_headers, read_json
from kvchat.engine.model.device import resolve_device, resolve_dtype
from kvchat.engine.model.hub import Progress
from kvchat.engine.model.weight_sizes import without_memory
from kvchat.errors import ModelError
from kvchat.stored_tensors import StoredTensor

LOUD = (
    "bitsandbytes",
    "torchao",
    "torch.utils._pytree",
)  # say which kernels they lack, and what they are going to drop
# Layers of the models whose scores are scaled otherwise than by the size of a head; llama.cpp, too, tells them by that.
GEMMA_27B = {"gemma2": 46, "gemma3_text": 62}
INSTALL_GGUF = "pip install 'kvchat[gguf]'"


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
    config = _read_config(location)
    supported.check_quantization(config, location.name)
    model_class, text_config = supported.model_class(config)
    return ModelDescription(location, config, model_class, text_config, on, resolve_dtype(dtype, config, on))


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
        return _gguf_config(location)
    # Its message for a damaged file is better, and transformers builds lists as long as a file says.
    supported.check_counts(read_json(location.folder / "config.json"), location.name)
    try:
        return AutoConfig.from_pretrained(location.folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the hub's checks of a field's type have errors of their own
        raise supported.unreadable(location.name, "its config.json", error) from error


def _gguf_config(location: ModelLocation) -> Any:
    from transformers import AutoConfig

    absent = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if absent:
        raise ModelError(
            f"{location.name} is a GGUF file.", f"What reads it is not installed: {', '.join(absent)}.", INSTALL_GGUF
        )
    header = gguf_file.header(location.folder / location.gguf)
    try:
        config = AutoConfig.from_pretrained(
            location.folder, gguf_file=location.gguf, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the gguf package raises anything for a damaged file
        raise supported.unreadable(location.name, "the GGUF file", error) from error
    config.dtype = config.dtype or torch.bfloat16  # the file's blocks have no such type; they are unpacked to it
    if hasattr(config, "query_pre_attn_scalar"):  # transformers takes 256, that of most
        config.query_pre_attn_scalar = _gemma_scalar(config)
    gguf_rope.apply(header.scaling, config, location.name)
    return config


def _gemma_scalar(config: Any) -> int:
    """The number by whose root a Gemma divides its scores."""
    if GEMMA_27B.get(config.model_type) == config.num_hidden_layers:
        return int(config.hidden_size // config.num_attention_heads)
    return int(config.head_dim)
