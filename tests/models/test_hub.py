"""Downloads from a hub on this machine: whole, cut off and gone on with, refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from support.environment import environ
from support.fake_hub import FakeHub
from support.message import lacks

from kvchat.models import hub as hub_module
from kvchat.models.hub import LARGE

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
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "config.json").write_text("{}")
    (repository / "model.safetensors").write_bytes(bytes(range(256)) * (WEIGHTS // 256 + 1))
    with FakeHub("org/model", repository).serve() as hub:
        yield hub


def fetching(hub: FakeHub, cache: Path, name: str = "org/model") -> subprocess.Popen[str]:
    given = {**environ(), "HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0"}
    return subprocess.Popen([sys.executable, "-c", FETCH, name], stdout=subprocess.PIPE, env=given, text=True)


def fetched(hub: FakeHub, cache: Path, name: str = "org/model") -> str:
    """The last line that it printed."""
    with fetching(hub, cache, name) as process:
        return process.communicate(timeout=600)[0].splitlines()[-1]


def test_a_download_that_was_cut_off_goes_on(hub: FakeHub, tmp_path: Path) -> None:
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
    assert len(hub.ranges) == 2, "what is there is not downloaded again"


def test_a_typing_error_a_gate_and_no_network_are_told_apart(hub: FakeHub, tmp_path: Path) -> None:
    assert "no model org/modle" in fetched(hub, tmp_path, "org/modle")
    hub.gated = True
    assert "org/model is gated" in fetched(hub, tmp_path)
    hub.url = "http://127.0.0.1:9"  # discard: nothing listens
    assert not lacks(fetched(hub, tmp_path), "org/model", "cannot be reached")


def test_when_a_download_has_ended_no_bar_of_the_library_speaks_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bars: list[Any] = []

    def snapshot(*_: object, tqdm_class: type, **__: object) -> str:
        bars.append(tqdm_class(unit="B", total=2))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(hub_module, "large_files", lambda *_: iter(()))
    said: list[str] = []
    hub_module.download("org/model", ["*"], said.append)
    before = len(said)
    bars[0].update(2)
    bars[0].close()
    assert len(said) == before
