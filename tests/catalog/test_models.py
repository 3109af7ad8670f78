"""The models on this machine, in a made-up home."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants
from support.gguf_files import gguf_header, number

from kvchat import paths
from kvchat.catalog import models
from kvchat.catalog.headers import Weights
from kvchat.catalog.models import find
from kvchat.paths import bundled_model_dir


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def copy_bundled(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names or ("config.json", "model.safetensors"):
        shutil.copy(bundled_model_dir() / name, folder)
    return folder


def downloaded(cache: Path, repository: str) -> Path:
    """The folder of a snapshot, with the references that the hub's library writes."""
    top = cache / f"models--{repository.replace('/', '--')}"
    (top / "refs").mkdir(parents=True)
    (top / "refs" / "main").write_text("0123abc")
    (top / "blobs").mkdir()
    return top / "snapshots" / "0123abc"


def test_without_anything_else_there_is_the_bundled_model(cache: Path, tmp_path: Path) -> None:
    (only,) = find([tmp_path / "not there"])
    assert (only.name, only.kind, only.quantization, only.problem) == ("bundled", "bundled", "", "")
    assert only.weights
    assert only.weights.dtype == "bfloat16"


def test_folders_gguf_files_and_the_hubs_cache(cache: Path, tmp_path: Path) -> None:
    copy_bundled(tmp_path / "mine" / "publisher" / "model")
    (tmp_path / "mine" / "publisher" / "q4.gguf").write_bytes(gguf_header(("a", (256, 16), 12)))
    (tmp_path / "mine" / "publisher" / "mmproj-q4.gguf").write_bytes(b"")
    copy_bundled(downloaded(cache, "org/whole"))
    copy_bundled(downloaded(cache, "org/begun"), "config.json")
    found = {model.name: model for model in find([tmp_path / "mine"])}
    folder, file = (str(tmp_path / "mine" / "publisher" / name) for name in ("model", "q4.gguf"))
    assert list(found) == ["bundled", file, folder, "org/begun", "org/whole"]
    assert [model.kind for model in found.values()] == ["bundled", "GGUF", "folder", "hub", "hub"]
    assert found[file].weights == Weights(4096, (tmp_path / "mine/publisher/q4.gguf").stat().st_size, "Q4_K")
    assert found[folder].weights == found["org/whole"].weights == found["bundled"].weights
    assert found["org/begun"].problem == "All of its weight files are missing. Download the model again."


def test_a_fetched_model_is_listed_by_its_short_name(cache: Path) -> None:
    paths.models_dir().mkdir(parents=True)
    (paths.models_dir() / paths.NAMED["smollm2"].file).write_bytes(gguf_header(("a", (256, 16), 12)))
    found = {model.name: model for model in find([])}
    assert list(found) == ["bundled", "smollm2"]
    assert (found["smollm2"].kind, found["smollm2"].problem) == ("GGUF", "")
    assert models.is_here("smollm2")


def test_a_damaged_model_is_listed_with_what_is_wrong(cache: Path, tmp_path: Path) -> None:
    damaged = copy_bundled(tmp_path / "a")
    (damaged / "model.safetensors").write_bytes(b"no")
    (copy_bundled(tmp_path / "b") / "config.json").write_text("[")
    (copy_bundled(tmp_path / "c") / models.INDEX).write_text('{"weight_map": {"x": "model-1.safetensors"}}')
    (tmp_path / "m-00001-of-00002.gguf").write_bytes(gguf_header(("a", (4,), 0), values=[number("split.count", 2)]))
    problems = [model.problem for model in find([tmp_path])]
    assert problems == [
        "",
        "m-00001-of-00002.gguf is damaged. 1 of its 2 parts are missing, the first is m-00002-of-00002.gguf. Download "
        "the model again.",
        "model.safetensors is damaged. Its header cannot be read. Download the model again.",
        "Its config.json cannot be read. Download the model again.",
        "1 of its weight files are missing. Download the model again.",
    ]


def test_a_quantized_checkpoint_says_so(cache: Path, tmp_path: Path) -> None:
    folder = copy_bundled(tmp_path / "a")
    for config, dtype in (
        ({}, "float32"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "float16", "text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"dtype": ["float16"], "text_config": []}, "float32"),
    ):
        quantized = {**config, "quantization_config": {"quant_method": "gptq"}}
        (folder / "config.json").write_text(json.dumps(quantized))
        (found,) = find([tmp_path])[1:]
        assert found.weights
        assert (found.quantization, found.weights.dtype) == ("gptq", dtype)


def test_what_was_typed(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_bundled(tmp_path / "model")
    monkeypatch.setenv("HOME", str(tmp_path))
    found = models.at(Path("~/model"))
    assert found
    assert (found.name, found.kind) == ("~/model", "folder")
    for nothing in ("org/model", "\0", "x" * 5000):
        assert models.at(Path(nothing)) is None
