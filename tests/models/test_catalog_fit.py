"""Whether weights fit, by bytes, quantization and free memory."""

from __future__ import annotations

import sys

import pytest
from support.fake_nvml import FakeGpu, FakeNvml

from kvchat.config import profiles
from kvchat.models import description, repacking
from kvchat.models.catalog import AT_MOST, BFLOAT16_FROM, INT4_CAPABILITY, Fit, FoundModel, Room, fit, needs, room
from kvchat.models.quantize import quantization
from kvchat.models.stored_tensors import Elements, Weights

GiB = 2**30
LINEAR = Elements(linear=8 * GiB)


@pytest.mark.parametrize(
    ("stored", "dtype", "room", "expected"),
    [
        ("bfloat16", "auto", Room("cpu", 40 * GiB), Fit(32 * GiB, "none")),
        ("bfloat16", "auto", Room("cpu", 20 * GiB), Fit(32 * GiB, "int8")),
        ("bfloat16", "auto", Room("cuda:0", 20 * GiB), Fit(16 * GiB, "none")),
        ("bfloat16", "auto", Room("cuda", 8 * GiB), Fit(16 * GiB, "nf4")),
        ("bfloat16", "float32", Room("cuda", 4 * GiB), Fit(32 * GiB, None)),
    ],
)
def test_whether_it_fits(stored: str, dtype: str, room: Room, expected: Fit) -> None:
    assert fit(FoundModel("m", "folder", Weights(8 * GiB, 5 * GiB, stored, plain=LINEAR)), dtype, room) == expected


@pytest.mark.parametrize(
    ("device", "dtype", "head", "expected"),
    [
        # 5 GiB of Linears, 2 of embeddings, 1 of something else
        (
            "cpu",
            "float32",
            None,
            {"none": 32, "int8": 12 + 7 * 1.0625, "int4": 12 + 1.0625 * 2 + 5 * 0.625, "nf4": 12 + 5 * 0.5625},
        ),
        (
            "cpu",
            "float32",
            1,
            {"none": 32, "int8": 8 + 6 * 1.0625, "int4": 8 + 1.0625 + 5 * 0.625, "nf4": 12 + 5 * 0.5625},
        ),
        ("cuda", "auto", 1, {"none": 16, "int8": 6 + 5, "int4": 6 + 5 * 0.53125, "nf4": 6 + 5 * 0.5625}),
        ("cuda", "float16", None, {"none": 16, "int8": 6 + 5, "nf4": 6 + 5 * 0.5625}),
    ],
)
def test_only_linears_are_packed_and_on_a_cpu_the_head_in_8_bits(device, dtype, head, expected) -> None:
    plain = Elements(5 * GiB, 2 * GiB, head and head * GiB)
    weights = Weights(8 * GiB, 16 * GiB, "bfloat16", plain=plain)
    found = needs(FoundModel("m", "folder", weights), weights, dtype, Room(device, 0))
    assert {name: nbytes / GiB for name, nbytes in found.items()} == expected


def test_int4_needs_the_tensor_cores_of_a_gpu() -> None:
    assert (quantization.INT4_CAPABILITY, description.MEASURED_FROM) == (INT4_CAPABILITY, BFLOAT16_FROM)
    weights = Weights(GiB, GiB, "bfloat16")
    assert "int4" not in needs(FoundModel("m", "folder", weights), weights, "auto", Room("cuda", 0, (7, 5)))


@pytest.mark.parametrize(
    ("quantization", "stored", "mlp", "item"),
    [
        ("", "bfloat16", 2**22, 2),
        ("", "bfloat16", 2**22 - 1, 4),
        ("", "float16", 2**23, 4),
        ("compressed-tensors", "bfloat16", 2**23, 2),
        ("gptq", "bfloat16", 2**23, 4),
        ("torchao", "float16", 0, 2),
    ],
)
def test_the_dtype_that_is_chosen_on_a_cpu(quantization, stored, mlp, item) -> None:
    weights = Weights(GiB, GiB, stored, mlp=mlp)
    assert (
        needs(FoundModel("m", "folder", weights, quantization), weights, "auto", Room("cpu", 0))["none"] == item * GiB
    )
    assert needs(FoundModel("m", "folder", weights), weights, "float32", Room("cpu", 0))["none"] == 4 * GiB


@pytest.mark.parametrize(
    ("method", "dtype", "room", "expected"),
    [
        # 2 GiB of elements are plain, 6 GiB packed in 3 GiB
        ("gptq", "auto", Room("cuda", 8 * GiB), Fit(7 * GiB, "none")),
        ("gptq", "auto", Room("cuda", 7 * GiB), Fit(7 * GiB, None)),
        ("gptq", "float32", Room("cuda", 20 * GiB), Fit(11 * GiB, "none")),
        ("gptq", "auto", Room("cpu", 20 * GiB), Fit(11 * GiB, "none")),
        ("fp8", "auto", Room("cuda", 20 * GiB, (8, 9)), Fit(7 * GiB, "none")),
    ],
)
def test_whether_a_checkpoint_fits_that_is_quantized_already(
    method: str, dtype: str, room: Room, expected: Fit
) -> None:
    weights = Weights(8 * GiB, 5 * GiB, "bfloat16", packed_elements=6 * GiB, packed_bytes=3 * GiB)
    assert fit(FoundModel("m", "folder", weights, method), dtype, room) == expected


@pytest.mark.parametrize(
    ("method", "bits", "experts", "room", "expected"),
    [
        # 2 GiB of elements are plain, 6 GiB packed; in int4 on a GPU they take 0.53125 bytes, on a CPU 0.625
        ("compressed-tensors", 4.5, 0, Room("cuda", 20 * GiB), Fit(int(7.1875 * GiB), "none")),
        ("compressed-tensors", 4.5, 0, Room("cuda", 6 * GiB), Fit(int(7.1875 * GiB), None)),
        ("compressed-tensors", 8.1, 0, Room("cuda", 20 * GiB), Fit(10 * GiB, "none")),
        ("compressed-tensors", 8.1, 0, Room("cuda", 9 * GiB), Fit(10 * GiB, "int4")),
        ("compressed-tensors", 16, 0, Room("cuda", 20 * GiB), Fit(16 * GiB, "none")),
        ("fp8", 8.1, 0, Room("cuda", 20 * GiB, (8, 6)), Fit(10 * GiB, "none")),
        ("fp8", 8.1, 0, Room("cpu", 20 * GiB), Fit(int(10.375 * GiB), "none")),
        ("mxfp4", 4.25, 6, Room("cpu", 20 * GiB), Fit(int(7.75 * GiB), "none")),
        ("fp8", 8.1, 5, Room("cuda", 20 * GiB, (8, 6)), Fit(16 * GiB, "none")),  # experts stay unpacked
        ("fp8", 8.1, 5, Room("cuda", 16 * GiB, (8, 6)), Fit(16 * GiB, "int8")),
    ],
)
def test_whether_a_checkpoint_fits_that_is_unpacked(
    method: str, bits: float, experts: int, room: Room, expected: Fit
) -> None:
    packed = {"packed_elements": 6 * GiB, "packed_bytes": int(bits * 6 * GiB / 8), "packed_experts": experts * GiB}
    weights = Weights(8 * GiB, 5 * GiB, "bfloat16", **packed, layer_bits=bits)
    assert fit(FoundModel("m", "folder", weights, method), "bfloat16", room) == expected


def test_what_is_packed_is_told_also_where_a_tied_head_makes_it_larger_than_unpacked() -> None:
    packed = {"packed_elements": 2 * GiB, "packed_bytes": 2 * GiB, "layer_bits": 8.1}
    weights = Weights(8 * GiB, 14 * GiB, "bfloat16", plain=Elements(embedding=6 * GiB), **packed)
    # 6 GiB of embeddings in bfloat16 and once more in 8 bits as the head; unpacked all is 16.
    assert fit(FoundModel("m", "folder", weights, "fp8"), "bfloat16", Room("cpu", 40 * GiB)) == Fit(
        int(20.5 * GiB), "none"
    )


@pytest.mark.parametrize(
    ("stored", "bits", "free", "expected"),
    [
        ("Q4_K", 4.6, 12, Fit(int(4.25 * GiB), "none")),  # packed in int4 by itself
        ("Q8_0", 8.5, 12, Fit(8 * GiB, "none")),
        ("Q8_0", 8.5, 7, Fit(8 * GiB, "int4")),
        ("Q4_K", 4.6, 4, Fit(int(4.25 * GiB), None)),
        ("F16", 16, 12, Fit(16 * GiB, "int8")),
        ("F16", 16, 20, Fit(16 * GiB, "none")),
    ],
)
def test_whether_a_gguf_file_fits(stored: str, bits: float, free: int, expected: Fit) -> None:
    weights = Weights(8 * GiB, int(bits * GiB), stored, plain=LINEAR, layer_bits=bits)
    assert fit(FoundModel("m", "GGUF", weights), "auto", Room("cuda", free * GiB)) == expected


def test_the_rule_for_what_is_unpacked_is_the_engines() -> None:
    assert repacking.AT_MOST == AT_MOST


def test_the_room_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "_torch_without_cuda", lambda: False)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(FakeGpu(memory=8 * GiB, used=3 * GiB, capability=(8, 6))))
    assert room("auto", released=GiB) == Room("cuda", 6 * GiB, (8, 6))


def test_what_cannot_be_read_has_no_fit() -> None:
    assert fit(FoundModel("m", "folder", problem="damaged"), "auto", Room("cpu", GiB)) is None
