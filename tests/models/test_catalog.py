"""The models on this machine, in a fake home directory."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from support.environment import environ
from support.fake_hub import FakeHub
from support.fake_nvml import FakeGpu, FakeNvml
from support.gguf_files import gguf_header, number
from support.message import lacks
from support.patience import PATIENCE_S
from support.weights import linears

from kvchat import paths
from kvchat.config import profiles
from kvchat.errors import ModelError
from kvchat.models import catalog, checkpoint
from kvchat.models import hub as hub_module
from kvchat.models.catalog import FoundModel, Room, dtype_of, find, fit, room, short_name
from kvchat.models.hub import LARGE, ByteProgress
from kvchat.paths import bundled_model_dir
from kvchat.tui.models import DOWNLOAD


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty hub cache, and a home without models of other programs."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def copy_bundled(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names or ("config.json", "model.safetensors"):
        shutil.copy(bundled_model_dir() / name, folder)
    return folder


def downloaded(cache: Path, repository: str) -> Path:
    """The folder of a snapshot, with the references that huggingface_hub writes."""
    top = cache / f"models--{repository.replace('/', '--')}"
    (top / "refs").mkdir(parents=True)
    (top / "refs" / "main").write_text("0123abc")
    (top / "blobs").mkdir()
    return top / "snapshots" / "0123abc"


def test_the_bundled_model_is_always_found(cache, tmp_path):
    (only,) = find([tmp_path / "not there"])
    assert (only.name, only.kind, only.weights.quantization, only.problem) == ("bundled", "bundled", "", "")
    assert only.weights.dtype == "bfloat16"


def test_folders_gguf_files_and_the_hub_cache_are_searched(cache, tmp_path):
    copy_bundled(tmp_path / "mine" / "publisher" / "model")
    (tmp_path / "mine" / "publisher" / "q4.gguf").write_bytes(gguf_header(("a", (256, 16), 12)))
    (tmp_path / "mine" / "publisher" / "mmproj-q4.gguf").write_bytes(b"")
    copy_bundled(downloaded(cache, "org/whole"))
    copy_bundled(downloaded(cache, "org/begun"), "config.json")
    found = {model.name: model for model in find([tmp_path / "mine"])}
    folder, file = (str(tmp_path / "mine" / "publisher" / name) for name in ("model", "q4.gguf"))
    assert list(found) == ["bundled", file, folder, "org/begun", "org/whole"]
    assert [model.kind for model in found.values()] == ["bundled", "GGUF", "folder", "hub", "hub"]
    size = (tmp_path / "mine/publisher/q4.gguf").stat().st_size
    assert (found[file].weights.type, found[file].weights.nbytes) == ("Q4_K", size)
    assert found[folder].weights == found["org/whole"].weights == found["bundled"].weights
    assert "no weights" in found["org/begun"].problem


def test_a_downloaded_named_model_is_listed_by_its_name(cache):
    paths.models_dir().mkdir(parents=True)
    (paths.models_dir() / paths.NAMED["smollm2"].file).write_bytes(gguf_header(("a", (256, 16), 12)))
    found = {model.name: model for model in find([])}
    assert list(found) == ["bundled", "smollm2"]
    assert (found["smollm2"].kind, found["smollm2"].problem) == ("GGUF", "")
    assert catalog.is_here("smollm2")


def test_a_damaged_model_is_listed_with_its_problem(cache, tmp_path):
    damaged = copy_bundled(tmp_path / "a")
    (damaged / "model.safetensors").write_bytes(b"no")
    (copy_bundled(tmp_path / "b") / "config.json").write_text("[")
    (copy_bundled(tmp_path / "c") / "model.safetensors").rename(tmp_path / "c" / "model-2.safetensors")
    (tmp_path / "c" / paths.INDEX).write_text('{"metadata": {}, "weight_map": {"x": "model-1.safetensors"}}')
    (tmp_path / "m-00001-of-00002.gguf").write_bytes(gguf_header(("a", (4,), 0), values=[number("split.count", 2)]))
    problems = [model.problem for model in find([tmp_path])]
    expected = (
        (),
        ("m-00001-of-00002.gguf", "1 of its 2 parts", "m-00002-of-00002.gguf"),
        ("model.safetensors",),
        ("config.json",),
        ("1 of its 1 weight files",),
    )
    assert [bool(problem) for problem in problems] == [bool(facts) for facts in expected]
    assert not [problem for problem, facts in zip(problems, expected, strict=True) if lacks(problem, *facts)]


@pytest.mark.parametrize("section", ["quantization", "quantization_config"])
def test_mlx_weights_are_listed_as_unloadable(cache, tmp_path, section):
    folder = copy_bundled(tmp_path / "a")
    (folder / "config.json").write_text(json.dumps({section: {"group_size": 64, "bits": 4}}))
    (found,) = find([tmp_path])[1:]
    assert found.weights is None
    assert not lacks(found.problem, "MLX", "GGUF")


def test_quantized_checkpoints_show_method_and_dtype(cache, tmp_path):
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
        assert (found.weights.quantization, found.weights.dtype) == ("gptq", dtype)


def test_a_typed_path_is_recognized(cache, tmp_path, monkeypatch):
    copy_bundled(tmp_path / "model")
    monkeypatch.setenv("HOME", str(tmp_path))
    found = catalog.at(Path("~/model"))
    assert found
    assert (found.name, found.kind) == ("~/model", "folder")
    for other in ("org/model", "\0", "x" * 5000):
        assert catalog.at(Path(other)) is None


@pytest.mark.parametrize(
    ("file", "content"),
    [
        (paths.INDEX, json.dumps({"weight_map": {"a": "x\0"}})),
        (paths.INDEX, "[" * 100_000),
        ("config.json", json.dumps({"model_type": ["llama"]})),
    ],
)
def test_a_hostile_model_only_affects_its_own_row(cache, tmp_path, file, content):
    folder = copy_bundled(tmp_path / "all" / "hostile")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / file).write_text(content)
    copy_bundled(tmp_path / "all" / "whole")
    began = time.process_time()
    hostile, whole = find([tmp_path / "all"])[1:]
    assert time.process_time() - began < 2
    assert (hostile.weights, whole.problem) == (None, "")
    assert hostile.problem


def test_files_are_recognized_by_their_first_bytes(cache, tmp_path):
    content = gguf_header(("a", (256, 16), 12))
    (tmp_path / "all").mkdir()
    for name in ("x.GGUF", "sha256-0123", "notes"):
        (tmp_path / "all" / name).write_bytes(b"text" if name == "notes" else content)
    assert [Path(model.name).name for model in find([tmp_path / "all"])[1:]] == ["sha256-0123", "x.GGUF"]
    assert catalog.at(tmp_path / "all" / "sha256-0123").weights
    assert catalog.at(tmp_path / "all" / "notes") is None


def test_models_of_other_programs_are_found(cache, tmp_path):
    home, content = tmp_path / "home", gguf_header(("a", (256, 16), 12))
    for place in ("models/q.gguf", ".lmstudio/models/org/repo/q.gguf", ".cache/llama.cpp/q.gguf"):
        (home / place).parent.mkdir(parents=True)
        (home / place).write_bytes(content)
    ollama = home / ".ollama" / "models"
    (ollama / "blobs").mkdir(parents=True)
    (ollama / "blobs" / "sha256-01").write_bytes(content)
    layers = {"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:01"}]}
    for place, manifest in (
        ("registry.ollama.ai/library/smol/135m", layers),
        ("registry.ollama.ai/me/mine/latest", layers),
        ("hf.co/org/repo/Q4_0", layers),
        ("registry.ollama.ai/library/gone/latest", {"layers": []}),
        ("registry.ollama.ai/library/odd/latest", ["layers"]),
    ):
        (ollama / "manifests" / place).parent.mkdir(parents=True)
        (ollama / "manifests" / place).write_text(json.dumps(manifest))
    found = [model for model in find([]) if model.kind != "bundled"]
    names = [model.name.replace(str(home), "~") for model in found]
    assert names == [
        "~/models/q.gguf",
        "~/.lmstudio/models/org/repo/q.gguf",
        "~/.cache/llama.cpp/q.gguf",
        "ollama:hf.co/org/repo:Q4_0",
        "ollama:smol:135m",
        "ollama:me/mine:latest",
    ]
    assert all(model.weights for model in found)
    assert checkpoint.locate("ollama:me/mine", print).folder == ollama / "blobs"
    with pytest.raises(ModelError, match=r"smol:1.*smol:135m"):
        checkpoint.locate("ollama:smol:1", print)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("bundled", "bundled"),
        ("Qwen/Qwen3-4B", "Qwen3-4B"),
        ("/home/me/models/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("./gemma-3-270m-q4_k_m.gguf", "gemma-3-270m"),
        ("Big-IQ3_XXS-00001-of-00003.GGUF", "Big"),
        ("model-f16.gguf", "model"),
        ("/m/Qwen3-4B/", "Qwen3-4B"),
        ("/c/hub/models--Qwen--Qwen3-4B/snapshots/1cfa9a7208912126459214e8b04321603b3df60c", "Qwen3-4B"),
    ],
)
def test_a_model_has_a_short_name(model, name):
    assert short_name(model) == name


# ---- Whether weights fit, by bytes, quantization and free memory


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
def test_fit_names_the_size_and_the_quantization_needed(dtype, room, expected):
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
def test_the_dtype_on_a_cpu_depends_on_the_weights(method, stored, mlp, dtype):
    weights = linears(GiB, stored, method=method, quantization=method, mlp=mlp)
    assert dtype_of(weights, "auto", Room("cpu", 0)) == dtype
    assert dtype_of(linears(GiB), "float32", Room("cpu", 0)) == "float32"


@pytest.mark.parametrize(
    ("stored", "bits", "free", "expected"),
    [
        ("Q4_K", 4.6, 12, (4.25, "none")),  # packed in int4 by default
        ("Q8_0", 8.5, 12, (8, "none")),
        ("Q8_0", 8.5, 7, (8, "int4")),
        ("Q4_K", 4.6, 4, (4.25, None)),
        ("F16", 16, 12, (16, "int8")),
        ("F16", 16, 20, (16, "none")),
    ],
)
@pytest.mark.parametrize("kind", ["GGUF", "hub", "Ollama"])
def test_fit_of_a_gguf_file_starts_from_its_type(kind, stored, bits, free, expected):
    weights = linears(8 * GiB, stored, method="gguf", layer_bits=bits)
    found = fit(FoundModel("m", kind, weights), "auto", Room("cuda", free * GiB))
    assert (pytest.approx(found.needed / GiB, rel=0.01), found.quantize) == expected


def test_gpu_room_includes_released_memory(monkeypatch):
    monkeypatch.setattr(profiles, "_torch_without_cuda", lambda: False)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(FakeGpu(memory=8 * GiB, used=3 * GiB, capability=(8, 6))))
    assert room("auto", released=GiB) == Room("cuda", 6 * GiB, (8, 6))


def test_unreadable_models_have_no_fit():
    assert fit(FoundModel("m", "folder", problem="damaged"), "auto", Room("cpu", GiB)) is None


# ---- Downloads from a hub on this machine: whole, interrupted and resumed, refused


WEIGHTS = LARGE + 12_345
FETCH = """
import sys
from huggingface_hub import constants
constants.DOWNLOAD_CHUNK_SIZE = 2**17
from kvchat.models import hub
from kvchat.errors import ModelError
try:
    print(hub.download(sys.argv[1], ["*.json", "*.safetensors"], lambda stage: print(stage, flush=True)))
except ModelError as error:
    print("refused:", error)
"""


@pytest.fixture
def hub(tmp_path):
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "config.json").write_text("{}")
    (repository / "model.safetensors").write_bytes(bytes(range(256)) * (WEIGHTS // 256 + 1))
    with FakeHub("org/model", repository).serve() as hub:
        yield hub


def fetching(hub: FakeHub, cache: Path, name: str = "org/model") -> subprocess.Popen[str]:
    env = {**environ(), "HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0"}
    return subprocess.Popen([sys.executable, "-c", FETCH, name], stdout=subprocess.PIPE, env=env, text=True)


def fetched(hub: FakeHub, cache: Path, name: str = "org/model") -> str:
    """The last line that the process printed."""
    with fetching(hub, cache, name) as process:
        return process.communicate(timeout=600)[0].splitlines()[-1]


def test_an_interrupted_download_resumes(hub, tmp_path):
    hub.pause = 0.01
    with fetching(hub, tmp_path / "cache") as process:
        assert process.stdout
        lines = iter(process.stdout.readline, "")
        assert any("Downloading" in line and "/s · " in line and " left" in line for line in lines)
        process.kill()
    hub.pause = 0.0
    folder = Path(fetched(hub, tmp_path / "cache"))
    first, second = hub.ranges
    assert (first, second > LARGE // 100) == (0, True)
    for name in ("config.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (hub.folder / name).read_bytes()
    assert not list(tmp_path.rglob("*.partial"))
    fetched(hub, tmp_path / "cache")
    assert len(hub.ranges) == 2, "a complete download is not repeated"


def test_unknown_gated_and_unreachable_models_differ_in_errors(hub, tmp_path):
    assert "no model org/modle" in fetched(hub, tmp_path, "org/modle")
    hub.gated = True
    assert "org/model is gated" in fetched(hub, tmp_path)
    hub.url = "http://127.0.0.1:9"  # discard: nothing listens
    assert not lacks(fetched(hub, tmp_path), "org/model", "cannot be reached")


def test_progress_bars_are_silent_after_a_download(monkeypatch, tmp_path):
    bars: list[Any] = []

    def snapshot(*_, tqdm_class, **__):
        bars.append(tqdm_class(unit="B", total=2))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(hub_module, "large_files", lambda *_: iter(()))
    shown: list[str] = []
    hub_module.download("org/model", ["*"], shown.append)
    before = len(shown)
    bars[0].update(2)
    bars[0].close()
    assert len(shown) == before


# ---- The progress line of a download and of reading weights


def test_speed_and_time_left_cover_the_last_seconds():
    now, shown = iter([0.0, 0.5, 2.0, 3.0, 4.0]), []
    progress = ByteProgress(shown.append, "Downloading", lambda: next(now))
    for done in (100, 150, 200, 250, 400):
        with contextlib.suppress(StopIteration):
            progress.report(done * 2**20, 400 * 2**20)
    first, *others = shown
    assert first == "Downloading ▰▰▱▱▱▱▱▱ 100 MiB of 400 MiB"
    expected = (
        ("200 MiB of 400 MiB", "50.0 MiB/s", "4.0 s"),
        ("250 MiB of 400 MiB", "50.0 MiB/s", "3.0 s"),
        ("400 MiB of 400 MiB", "75.0 MiB/s", "0 ms"),
    )
    assert not [lacks(line, *facts) for line, facts in zip(others, expected, strict=True) if lacks(line, *facts)]


# ---- The download process does not outlive the application


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_a_download_without_its_application_exits_at_once():
    no_parent = str(os.getpid() - 1)
    command = [sys.executable, "-X", "importtime", "-m", "kvchat.models.download", no_parent, "bundled"]
    result = subprocess.run(command, capture_output=True, env=environ(), timeout=PATIENCE_S, check=True)
    imported = {line.split("|")[-1].strip() for line in result.stderr.decode().splitlines()}
    assert result.stdout == b""
    assert "kvchat.process" in imported
    assert "kvchat.models.checkpoint" not in imported


def test_the_application_passes_its_pid_to_a_download():
    assert DOWNLOAD[-2:] == ("kvchat.models.download", str(os.getpid()))
    command = [*DOWNLOAD, "bundled"]
    shown = subprocess.run(command, capture_output=True, env=environ(), timeout=PATIENCE_S, check=True).stdout
    assert shown.splitlines()[-1] == b'{"done": "bundled"}'
