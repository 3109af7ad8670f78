"""A GGUF file is read or refused immediately, whatever its header contains."""

import struct
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.frames import fuzzed
from support.gguf_files import gguf_header, number, text, write_norms
from support.progress import silent
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvchat.errors import ModelError
from kvchat.models import catalog, gguf_file
from kvchat.models.description import describe

HEADER = gguf_header(("output_norm", (64,), 0), ("blk.0", (64, 32), 0)) + bytes(800)
EXTREMES = [0, 1, 2, 8, 9, 13, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**60, 2**63 - 1, 2**63, 2**64 - 1]


def with_value(place: bytes, value: int, before: bytes) -> bytes:
    """The header with ``value`` in the eight bytes after ``place``, which were ``before``."""
    assert HEADER.count(place + before) == 1
    return HEADER.replace(place + before, place + struct.pack("<Q", value))


SCORES, TOKENS = struct.pack("<II", 9, 6), struct.pack("<II", 9, 8)
TWO = struct.pack("<Q", 2)
CORRUPT = {
    "a list of 2**60 numbers": with_value(SCORES, 2**60, TWO),
    "a list of 2**60 strings": with_value(TOKENS, 2**60, TWO),
    "2**60 tensors": with_value(b"GGUF" + struct.pack("<I", 3), 2**60, TWO),
    "a string of length 2**64 - 1": HEADER.replace(struct.pack("<Q", 20), struct.pack("<Q", 2**64 - 1)),
    "2**32 - 1 dimensions": HEADER.replace(b"blk.0" + struct.pack("<I", 2), b"blk.0" + struct.pack("<I", 2**32 - 1)),
    "a tensor larger than the file": HEADER.replace(struct.pack("<IQ", 2, 64), struct.pack("<IQ", 2, 2**50)),
    "an unknown type": HEADER.replace(SCORES, struct.pack("<II", 99, 6)),
    "another byte order": b"GGUF" + struct.pack(">I", 3) + HEADER[8:],
    "an old version": b"GGUF" + struct.pack("<I", 1) + HEADER[8:],
    "not a GGUF file": b"not at all",
    "empty": b"",
}  # fmt: skip


@pytest.mark.parametrize("content", CORRUPT.values(), ids=CORRUPT)
def test_corrupt_headers_are_refused(tmp_path, content):
    assert content != HEADER
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=r"\w"):
        gguf_file.read(tmp_path / "x.gguf")


def test_values_and_tensors_are_read(tmp_path):
    (tmp_path / "x").write_bytes(HEADER)
    found = gguf_file.read(tmp_path / "x")
    assert found.values == {
        "general.architecture": "llama",
        "llama.context_length": 4096,
        "tokenizer.ggml.tokens": (b"a", b"b"),
        "tokenizer.ggml.scores": (0.0, 1.0),
    }
    begin = len(HEADER) - 800 - 64 * 4 - 64 * 32 * 4
    norm, table = found.tensors
    assert (norm.name, norm.kind, norm.shape, norm.start, norm.nbytes) == ("output_norm", 0, (64,), begin, 256)
    assert (table.shape, table.start, table.nbytes) == ((32, 64), begin + 256, 64 * 32 * 4)
    assert (found.architecture, found.no_model) == ("llama", "")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([text("general.type", "adapter"), text("adapter.type", "lora")], "adapter"),
        ([text("general.type", "mmproj")], "projector"),
        ([text("general.type", "imatrix")], "importance"),
        ([number("llama.pooling_type", 3)], "embedding"),
        (None, "no weights"),  # a vocabulary alone
    ],
)
def test_files_that_are_not_language_models_are_named(tmp_path, values, says):
    (tmp_path / "x.gguf").write_bytes(gguf_header() if values is None else gguf_header(("a", (4,), 0), values=values))
    assert says in gguf_file.read(tmp_path / "x.gguf").no_model


def test_parts_of_a_split_model_are_read_as_one(tmp_path):
    count = [number("split.count", 2), number("split.tensors.count", 3)]
    first, second = (tmp_path / f"m-0000{part}-of-00002.gguf" for part in (1, 2))
    first.write_bytes(gguf_header(("a", (4,), 0), values=count))
    with pytest.raises(ValueError, match=r"1 of its 2 parts.*00002-of-00002"):
        gguf_file.read(first)
    second.write_bytes(gguf_header(("b", (8,), 0), ("c", (8,), 0), values=count))
    for part in (first, second):
        found = gguf_file.read(part)
        assert [(one.name, one.path) for one in found.tensors] == [("a", first), ("b", second), ("c", second)]
        assert found.paths == (first, second)


def test_any_header_is_read_or_refused(tmp_path):
    path = tmp_path / "x.gguf"
    accepted = []

    @fuzzed
    @example([])
    @given(
        st.lists(
            st.tuples(st.integers(0, len(HEADER) - 8), st.sampled_from(EXTREMES), st.sampled_from("IQ")), max_size=3
        )
    )
    def mutate(changes):
        content = bytearray(HEADER)
        for at, value, form in changes:
            struct.pack_into(f"<{form}", content, at, value % 256 ** struct.calcsize(form))
        path.write_bytes(content)
        try:
            found = gguf_file.read(path)
        except ValueError:
            return
        assert found.layer_bits >= 0
        assert isinstance(found.no_model, str)
        accepted.append(tuple(changes))

    mutate()
    assert () in accepted


def test_types_match_the_gguf_package():
    gguf = pytest.importorskip("gguf")
    sizes = {kind: gguf.GGML_QUANT_SIZES[kind] for kind in gguf.GGMLQuantizationType}
    assert {int(kind): (kind.name, *size) for kind, size in sizes.items()} == gguf_file.TYPES
    for kind, (_, nbytes) in sizes.items():
        stored = np.zeros((1, 1), np.float32) if kind.name in ("F32", "F16") else np.zeros((1, nbytes), np.uint8)
        with nullcontext() if kind.name in gguf_file.UNPACKED else pytest.raises(NotImplementedError):
            gguf.dequantize(stored, kind)


@pytest.mark.parametrize("kind", [24, 41])
def test_types_that_cannot_be_unpacked_are_refused_and_listed(tmp_path, kind):
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_header(("blk.0.ffn_up.weight", (256, 32), kind)))
    with pytest.raises(ModelError, match=gguf_file.TYPES[kind][0]):
        gguf_file.read_model(path)
    assert gguf_file.TYPES[kind][0] in catalog.at(path).problem


# ---- RoPE scaling in GGUF files, which transformers does not read


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 32.0, "rope_theta": 500000.0, **LLAMA3}


def divisors():
    """The divisors that llama.cpp's converter writes for Llama 3.2, for a head of 32."""
    config = LlamaConfig(hidden_size=128, num_attention_heads=4, rope_parameters=dict(LLAMA3_ROPE))
    plain = 500000.0 ** (-torch.arange(16) / 16)
    return (plain / LlamaRotaryEmbedding(config).inv_freq).numpy()


def rope_of(path, kind="llama", kv=None, tensors=None):
    """``rope_parameters`` of the model that is loaded from a file with these keys and tensors."""
    rope = {"dimension_count": 32, "freq_base": 500000.0, **(kv or {})}
    write_norms(path / "model.gguf", kind, 6, 128, rope, tensors)
    return describe(str(path), "cpu", "float32", silent).text_config.rope_parameters


def test_llama_3_divisors_become_rope_parameters(tmp_path):
    assert rope_of(tmp_path, tensors={"rope_freqs.weight": divisors()}) == LLAMA3_ROPE


@pytest.mark.parametrize(
    ("kv", "scaling"),
    [
        ({}, {"rope_type": "default"}),
        ({"scaling.type": "none", "scaling.factor": 4.0}, {"rope_type": "default"}),
        ({"scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 1024.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        ),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.attn_factor": 0.5},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 4096,
                "attention_factor": pytest.approx(0.5 * 1.1386294),
            },
        ),
    ],
)
def test_scaling_keys_become_rope_parameters(tmp_path, kv, scaling):
    assert rope_of(tmp_path, kv=kv) == {"rope_theta": 500000.0, **scaling}


def test_sliding_layers_of_gemma_are_not_scaled(tmp_path):
    rope = rope_of(tmp_path, "gemma3", {"scaling.type": "linear", "scaling.factor": 8.0})
    assert rope["full_attention"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 500000.0}
    assert rope["sliding_attention"]["rope_type"] == "default"


@pytest.mark.parametrize(
    ("kv", "tensors", "reason"),
    [
        ({}, {"rope_freqs.weight": np.full(16, 3, np.float32)}, "by divisors that are not Llama 3's"),
        ({"scaling.type": "longrope"}, {}, "by longrope without its divisors"),
    ],
)
def test_scaling_that_transformers_lacks_is_refused(tmp_path, kv, tensors, reason):
    with pytest.raises(ModelError, match=reason):
        rope_of(tmp_path, kv=kv, tensors=tensors)


def test_phi_divisors_become_longrope_factors(tmp_path):
    """As in files of Phi-3-mini-128k and Phi-4-mini; logits then equal those of llama.cpp within 0.001."""
    tensors = {
        f"rope_factors_{name}.weight": np.full(16, value, np.float32) for name, value in [("long", 3), ("short", 2)]
    }
    kv = {"scaling.original_context_length": 1024, "scaling.attn_factor": 1.25}
    assert rope_of(tmp_path, "phi3", kv, tensors) == {
        "rope_type": "longrope",
        "rope_theta": 500000.0,
        "partial_rotary_factor": 1.0,
        "long_factor": [3.0] * 16,
        "short_factor": [2.0] * 16,
        "attention_factor": 1.25,
        "original_max_position_embeddings": 1024,
    }
