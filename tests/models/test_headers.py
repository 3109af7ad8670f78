"""Headers of weight files, good and damaged."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from support.gguf_files import gguf_header

from kvchat.errors import ModelError
from kvchat.models.stored_tensors import Elements, Weights, read_gguf, read_safetensors
from kvchat.paths import bundled_model_dir


def test_the_bundled_model() -> None:
    found = read_safetensors([bundled_model_dir() / "model.safetensors"])
    assert (found.elements, found.dtype) == (17_308_032, "bfloat16")
    assert found.nbytes == (bundled_model_dir() / "model.safetensors").stat().st_size


def test_a_gguf_file_is_of_the_type_of_most_of_its_elements(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    ffn = ("blk.0.ffn_up.weight", (256, 32), 12)
    path.write_bytes(gguf_header(("output_norm", (64,), 0), ffn, ("token_embd.weight", (256, 8), 14)))
    plain = Elements(linear=256 * 32, embedding=256 * 8)
    expected = Weights(64 + 256 * 40, path.stat().st_size, "Q4_K", plain=plain, mlp=256 * 32, layer_bits=4.5)
    assert read_gguf(path) == expected


def test_the_bits_of_layers_are_those_of_their_matrices(tmp_path: Path) -> None:
    path, names = tmp_path / "x.gguf", ("token_embd.weight", "blk.0.ffn_up.weight", "blk.0.attn_v.weight")
    tensors = [(name, (256, 8), kind) for name, kind in zip(names, (0, 12, 14), strict=True)]
    path.write_bytes(gguf_header(*tensors, ("blk.0.attn_norm.weight", (256,), 0), ("output.weight", (256, 8), 1)))
    assert read_gguf(path).layer_bits == (4.5 + 6.5625) / 2


@pytest.mark.parametrize(
    "content",
    [b"", b"GGUF", b"GGML" + bytes(20), struct.pack("<4sIQQ", b"GGUF", 3, 2**60, 2**60), gguf_header()[:40],
     gguf_header(("a", (4,), 0))[:-20]],
    ids=["empty", "magic only", "another magic", "endless", "cut", "cut tensor"],
)  # fmt: skip
def test_damaged_gguf_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"x\.gguf is damaged"):
        read_gguf(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    "content",
    [b"", struct.pack("<Q", 2**60), struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 7) + b'{"a":1}',
     struct.pack("<Q", 2) + b"{}"],
    ids=["empty", "endless", "a list", "no tensor", "no tensors"],
)  # fmt: skip
def test_damaged_safetensors_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"damaged"):
        read_safetensors([tmp_path / "model.safetensors"])


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.gguf")
    for path in (tmp_path / "x.gguf", Path("/dev/zero"), tmp_path):
        with pytest.raises(ModelError, match="is no file"):
            read_gguf(path)
