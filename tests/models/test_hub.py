"""Downloads from a hub on this machine: whole, cut off and gone on with, refused."""

from __future__ import annotations

import contextlib
import os
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
from support.patience import PATIENCE_S

from kvchat.models import hub as hub_module
from kvchat.models.hub import LARGE, ByteProgress
from kvchat.tui.models import DOWNLOAD

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


# ---- The words about a download and about reading weights


def test_speed_and_time_left_are_of_the_last_seconds() -> None:
    now, said = iter([0.0, 0.5, 2.0, 3.0, 4.0]), []
    progress = ByteProgress(said.append, "Downloading", lambda: next(now))
    for done in (100, 150, 200, 250, 400):
        with contextlib.suppress(StopIteration):
            progress.tell(done * 2**20, 400 * 2**20)
    first, *others = said
    assert first == "Downloading ▰▰▱▱▱▱▱▱ 100 MiB of 400 MiB"
    expected = (
        ("200 MiB of 400 MiB", "50.0 MiB/s", "4.0 s"),
        ("250 MiB of 400 MiB", "50.0 MiB/s", "3.0 s"),
        ("400 MiB of 400 MiB", "75.0 MiB/s", "0 ms"),
    )
    assert not [lacks(line, *facts) for line, facts in zip(others, expected, strict=True) if lacks(line, *facts)]


# ---- The download's process: it does not outlive the application


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_a_download_whose_application_is_gone_ends_before_it_looks_for_anything() -> None:
    no_parent = str(os.getpid() - 1)
    command = [sys.executable, "-X", "importtime", "-m", "kvchat.models.download", no_parent, "bundled"]
    result = subprocess.run(command, capture_output=True, env=environ(), timeout=PATIENCE_S, check=True)
    imported = {line.split("|")[-1].strip() for line in result.stderr.decode().splitlines()}
    assert result.stdout == b""
    assert "kvchat.process" in imported
    assert "kvchat.models.checkpoint" not in imported


def test_the_application_starts_a_download_that_ends_with_it() -> None:
    assert DOWNLOAD[-2:] == ("kvchat.models.download", str(os.getpid()))
    command = [*DOWNLOAD, "bundled"]
    said = subprocess.run(command, capture_output=True, env=environ(), timeout=PATIENCE_S, check=True).stdout
    assert said.splitlines()[-1] == b'{"done": "bundled"}'
