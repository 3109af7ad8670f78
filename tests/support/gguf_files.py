"""GGUF files: the beginning of one, written by hand, and the bundled model as one."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from kvchat.bench import gguf_copy
from kvchat.engine.model.load import LoadedModel
from kvchat.paths import bundled_model_dir


def gguf_header(*tensors: tuple[str, tuple[int, ...], int]) -> bytes:
    """A header with a value of every form and ``tensors``: name, shape and number of the type."""
    values = [
        _text("general.architecture") + struct.pack("<I", 8) + _text("llama"),
        _text("llama.context_length") + struct.pack("<II", 4, 4096),
        _text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + _text("a") + _text("b"),
        _text("tokenizer.ggml.scores") + struct.pack("<IIQ2f", 9, 6, 2, 0.0, 1.0),
    ]
    infos = [
        _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, 0) for name, shape, kind in tensors
    ]
    return struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(values)) + b"".join(values + infos)


def write_model(path: Path, model: LoadedModel, kind: str = "Q8_0", table_kind: str = "") -> None:
    """The bundled model as a GGUF file, its matrices of the type ``kind``, the vocabulary's of ``table_kind``."""
    import gguf

    config = model.model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("bundled")
    gguf_copy.describe(writer, config)
    tokenizer = json.loads((bundled_model_dir() / "tokenizer.json").read_text())
    ids = {**tokenizer["model"]["vocab"], **{token["content"]: token["id"] for token in tokenizer["added_tokens"]}}
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(ids, key=ids.get)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, parameter in model.model.named_parameters():
        tensor = gguf_copy.rotated_in_pairs(name, parameter.detach(), config)
        theirs = names.get_name(name, try_suffixes=(".weight",))
        if tensor.dim() == 1:
            writer.add_tensor(theirs, tensor.numpy())
        else:
            its_kind = gguf.GGMLQuantizationType[kind if theirs.startswith("blk.") else table_kind or kind]
            packed = gguf.quantize(tensor.contiguous().numpy(), its_kind)
            writer.add_tensor(theirs, packed, raw_dtype=its_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()
