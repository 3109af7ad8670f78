"""transformers' configuration of the model in a GGUF file, made of what was read of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from kvchat import gguf_file
from kvchat.engine.model import gguf_rope
from kvchat.engine.model.checkpoint import read_gguf
from kvchat.engine.model.supported import unreadable
from kvchat.errors import ModelError
from kvchat.gguf_file import EMBEDDINGS, GgufFile

# Layers of the models whose scores are scaled otherwise than by the size of a head; llama.cpp, too, tells them by that.
GEMMA_27B = {"gemma2": 46, "gemma3_text": 62}
LISTS = "tokenizer.ggml."  # of which transformers is given no list: it would look at each entry
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")  # tokens that end an answer


def of_file(path: Path, name: str) -> Any:
    """The configuration of the model ``name`` in the file ``path``.

    Raises:
        ModelError: it is damaged, no language model, or of an architecture that transformers does not read.
    """
    file = read_gguf(path)
    try:
        found = _by_transformers(file)
        from transformers import CONFIG_MAPPING

        if rows := [one.shape[0] for one in file.tensors if one.name == EMBEDDINGS]:
            found["vocab_size"] = rows[0]
        ends = [id for key in ENDS if (id := file.number(f"tokenizer.ggml.{key}")) is not None]
        if len(set(ends)) > 1 and not isinstance(found.get("eos_token_id"), list):
            found["eos_token_id"] = list(dict.fromkeys(ends))
        config = CONFIG_MAPPING[found["model_type"]].from_dict(found)
    except ModelError:
        raise
    except Exception as error:  # whatever a damaged file or an unknown architecture leads to
        raise unreadable(name, "the GGUF file", error) from error
    config.dtype = config.dtype or torch.bfloat16  # the file's blocks have no such type; they are unpacked to it
    if hasattr(config, "query_pre_attn_scalar"):  # transformers takes 256, that of most
        config.query_pre_attn_scalar = _gemma_scalar(config)
    gguf_rope.apply(gguf_rope.read(file), config, name)
    return config


@contextlib.contextmanager
def fed(file: GgufFile) -> Iterator[None]:
    """Meanwhile transformers gets what was read of ``file``, and the table of tensors' names is made once."""
    import gguf

    own = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = lambda path: _Reader(file), lru_cache(own[1])
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = own


def _by_transformers(file: GgufFile) -> dict[str, Any]:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, get_gguf_config
    except ImportError:  # before 5.23
        GGUF_CONFIG_ARCHS = {}
    if file.architecture in GGUF_CONFIG_ARCHS:
        texts = {key: len(value) for key, value in file.values.items() if _is_list_of_texts(value)}
        numbers = {key: list(value) for key, value in file.values.items() if isinstance(value, tuple)}
        return dict(get_gguf_config({**file.values, **numbers, **texts}, tuple(one.name for one in file.tensors)))
    with fed(file):
        return dict(load_gguf_checkpoint(str(file.path), return_tensors=False)["config"])


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and isinstance(value[0], bytes)


class _Named(NamedTuple):
    name: str


class _Field(NamedTuple):
    """A value as the gguf package gives it."""

    parts: list[Any]
    types: list[int]

    @property
    def data(self) -> range:
        return range(len(self.parts))


class _Reader:
    """What transformers asks of the gguf package's reader."""

    def __init__(self, file: GgufFile) -> None:
        kept = (pair for pair in file.values.items() if not (pair[0].startswith(LISTS) and isinstance(pair[1], tuple)))
        self.fields = {key: _field(value) for key, value in kept}
        self.tensors = [_Named(one.name) for one in file.tensors]


def _field(value: Any) -> _Field:
    if isinstance(value, tuple):
        fields = [_field(one) for one in value]
        return _Field([field.parts[0] for field in fields], [gguf_file.LIST, *(fields[0].types if fields else [4])])
    if isinstance(value, str | bytes):
        encoded = value.encode() if isinstance(value, str) else value
        return _Field([np.frombuffer(encoded, np.uint8)], [gguf_file.TEXT])
    kind = {bool: 7, int: 11, float: 12}[type(value)]
    return _Field([np.array([value])], [kind])


def _gemma_scalar(config: Any) -> int:
    """The number by whose root a Gemma divides its scores."""
    if GEMMA_27B.get(config.model_type) == config.num_hidden_layers:
        return int(config.hidden_size // config.num_attention_heads)
    return int(config.head_dim)
