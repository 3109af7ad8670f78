"""Whether weights fit, by bytes, quantization and free memory."""

from __future__ import annotations

import sys

import pytest
from support.fake_nvml import FakeGpu, FakeNvml

from kvchat.catalog.fit import GGUF_AT_MOST, Fit, Room, fit, room
from kvchat.catalog.headers import Weights
from kvchat.catalog.models import FoundModel
from kvchat.config import profiles
from kvchat.engine.model import gguf_weights

GiB = 2**30


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
    assert fit(FoundModel("m", "folder", Weights(8 * GiB, 5 * GiB, stored)), dtype, room) == expected


@pytest.mark.parametrize(
    ("method", "dtype", "room", "expected"),
    [
        # 2 GiB of elements are plain, 6 GiB packed in 3 GiB
        ("gptq", "auto", Room("cuda", 8 * GiB), Fit(7 * GiB, "none")),
        ("gptq", "auto", Room("cuda", 7 * GiB), Fit(7 * GiB, None)),
        ("gptq", "float32", Room("cuda", 20 * GiB), Fit(11 * GiB, "none")),
        ("gptq", "auto", Room("cpu", 20 * GiB), Fit(11 * GiB, "none")),
        ("compressed-tensors", "auto", Room("cuda", 20 * GiB), Fit(16 * GiB, "none")),
        ("compressed-tensors", "auto", Room("cuda", 8 * GiB), Fit(16 * GiB, None)),
        ("fp8", "auto", Room("cuda", 20 * GiB, (8, 9)), Fit(7 * GiB, "none")),
        ("fp8", "auto", Room("cuda", 20 * GiB, (8, 6)), Fit(16 * GiB, "none")),
        ("fp8", "bfloat16", Room("cpu", 20 * GiB), Fit(16 * GiB, "none")),
    ],
)
def test_whether_a_checkpoint_fits_that_is_quantized_already(
    method: str, dtype: str, room: Room, expected: Fit
) -> None:
    weights = Weights(8 * GiB, 5 * GiB, "bfloat16", packed_elements=6 * GiB, packed_bytes=3 * GiB)
    assert fit(FoundModel("m", "folder", weights, method), dtype, room) == expected


@pytest.mark.parametrize(
    ("stored", "nbytes", "free", "expected"),
    [
        ("Q4_K", 4.6, 12, Fit(int(4.25 * GiB), "none")),  # packed in int4 by itself
        ("Q8_0", 8.5, 12, Fit(8 * GiB, "none")),
        ("Q8_0", 8.5, 7, Fit(8 * GiB, "int4")),
        ("Q4_K", 4.6, 4, Fit(int(4.25 * GiB), None)),
        ("F16", 16, 12, Fit(16 * GiB, "int8")),
        ("F16", 16, 20, Fit(16 * GiB, "none")),
    ],
)
def test_whether_a_gguf_file_fits(stored: str, nbytes: float, free: int, expected: Fit) -> None:
    weights = Weights(8 * GiB, int(nbytes * GiB), stored)
    assert fit(FoundModel("m", "GGUF", weights), "auto", Room("cuda", free * GiB)) == expected


def test_the_rule_for_gguf_files_is_the_engines() -> None:
    assert gguf_weights.AT_MOST == GGUF_AT_MOST


def test_the_room_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "_torch_without_cuda", lambda: False)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(FakeGpu(memory=8 * GiB, used=3 * GiB, capability=(8, 6))))
    assert room("auto", released=GiB) == Room("cuda", 6 * GiB, (8, 6))


def test_what_cannot_be_read_has_no_fit() -> None:
    assert fit(FoundModel("m", "folder", problem="damaged"), "auto", Room("cpu", GiB)) is None
