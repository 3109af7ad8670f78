"""Whether weights fit, by bytes, quantization and free memory."""

from __future__ import annotations

import sys

import pytest
from support.fake_nvml import FakeGpu, FakeNvml
from support.weights import linears

from kvchat.config import profiles
from kvchat.models.catalog import FoundModel, Room, dtype_of, fit, room

GiB = 2**30


@pytest.mark.parametrize(
    ("dtype", "room", "expected"),
    [
        ("auto", Room("cpu", 40 * GiB), (32, "none")),
        ("auto", Room("cpu", 20 * GiB), (32, "int8")),
        ("auto", Room("cpu", 7 * GiB), (32, "int4")),
        ("auto", Room("cuda", 20 * GiB), (16, "none")),
        ("auto", Room("cuda", 8 * GiB), (16, "nf4")),
        ("float32", Room("cuda", 4 * GiB), (32, None)),
    ],
)
def test_whether_it_fits(dtype: str, room: Room, expected: tuple[int, str | None]) -> None:
    found = fit(FoundModel("m", "folder", linears(8 * GiB)), dtype, room)
    assert (found.needed / GiB, found.quantize) == expected


@pytest.mark.parametrize(
    ("method", "stored", "mlp", "dtype"),
    [
        ("", "bfloat16", 2**22, "bfloat16"),
        ("", "bfloat16", 2**22 - 1, "float32"),
        ("", "float16", 2**23, "float32"),
        ("compressed-tensors", "bfloat16", 2**23, "bfloat16"),
        ("gptq", "bfloat16", 2**23, "float32"),
        ("torchao", "float16", 0, "float16"),
        ("gguf", "Q4_K", 2**23, "bfloat16"),
    ],
)
def test_the_dtype_that_is_chosen_on_a_cpu(method, stored, mlp, dtype) -> None:
    weights = linears(GiB, stored, method=method, quantization=method, mlp=mlp)
    assert dtype_of(weights, "auto", Room("cpu", 0)) == dtype
    assert dtype_of(linears(GiB), "float32", Room("cpu", 0)) == "float32"


@pytest.mark.parametrize(
    ("stored", "bits", "free", "expected"),
    [
        ("Q4_K", 4.6, 12, (4.25, "none")),  # packed in int4 by itself
        ("Q8_0", 8.5, 12, (8, "none")),
        ("Q8_0", 8.5, 7, (8, "int4")),
        ("Q4_K", 4.6, 4, (4.25, None)),
        ("F16", 16, 12, (16, "int8")),
        ("F16", 16, 20, (16, "none")),
    ],
)
@pytest.mark.parametrize("kind", ["GGUF", "hub", "Ollama"])
def test_whether_a_gguf_file_fits(kind, stored, bits, free, expected) -> None:
    weights = linears(8 * GiB, stored, method="gguf", layer_bits=bits)
    found = fit(FoundModel("m", kind, weights), "auto", Room("cuda", free * GiB))
    assert (pytest.approx(found.needed / GiB, rel=0.01), found.quantize) == expected


def test_the_room_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "_torch_without_cuda", lambda: False)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(FakeGpu(memory=8 * GiB, used=3 * GiB, capability=(8, 6))))
    assert room("auto", released=GiB) == Room("cuda", 6 * GiB, (8, 6))


def test_what_cannot_be_read_has_no_fit() -> None:
    assert fit(FoundModel("m", "folder", problem="damaged"), "auto", Room("cpu", GiB)) is None
