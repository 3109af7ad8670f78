"""Whether weights fit, by bytes, quantization and free memory."""

from __future__ import annotations

import pytest

from kvchat.catalog.fit import GGUF_AT_MOST, Fit, Room, fit
from kvchat.catalog.headers import Weights
from kvchat.catalog.models import FoundModel
from kvchat.engine.model import gguf_weights

GiB = 2**30


@pytest.mark.parametrize(
    ("model", "dtype", "room", "expected"),
    [
        (("bfloat16", ""), "auto", Room("cpu", 40 * GiB), Fit(32 * GiB, "none")),
        (("bfloat16", ""), "auto", Room("cpu", 20 * GiB), Fit(32 * GiB, "int8")),
        (("bfloat16", ""), "auto", Room("cuda:0", 20 * GiB), Fit(16 * GiB, "none")),
        (("bfloat16", ""), "auto", Room("cuda", 8 * GiB), Fit(16 * GiB, "nf4")),
        (("bfloat16", ""), "float32", Room("cuda", 4 * GiB), Fit(32 * GiB, None)),
        (("int8", "gptq"), "auto", Room("cuda", 6 * GiB), Fit(5 * GiB, "none")),
        (("int8", "gptq"), "auto", Room("cuda", 5 * GiB), Fit(5 * GiB, None)),
    ],
)
def test_whether_it_fits(model: tuple[str, str], dtype: str, room: Room, expected: Fit) -> None:
    stored, quantization = model
    assert fit(FoundModel("m", "folder", Weights(8 * GiB, 5 * GiB, stored), quantization), dtype, room) == expected


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


def test_what_cannot_be_read_has_no_fit() -> None:
    assert fit(FoundModel("m", "folder", problem="damaged"), "auto", Room("cpu", GiB)) is None
