"""Download from the Hugging Face hub, with progress; an interrupted download resumes where it stopped.

The hub's library would restart a large file. Here it grows as ``ETAG.partial`` among the blobs of the library's cache
and gets its final name when it is complete. The library then finds it and adds the rest of the cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvchat.errors import ModelError
from kvchat.models.stored_tensors import StoredTensor
from kvchat.units import meter, seconds, size

Progress = Callable[[str], None]
NOT_DOWNLOADED = ["*/*[!fF]", "consolidated*"]  # the same weights in other layouts, but not GGUF files
LARGE = 2**24
CHUNK = 2**20  # the library's own chunks are ten times as large, so a slow line would show no progress for ten seconds
TOO_LARGE = 50 * 10**9  # the hub sends no larger file in one piece
REPORT_S = 1.0
SPEED_SAMPLES = 20


def download(name: str, patterns: list[str], progress: Progress) -> Path:
    """Download the files of a repository that match ``patterns`` and are not in the cache; return their folder.

    Raises:
        ModelError: there is no such model, it is gated, or the hub cannot be reached.
    """
    import huggingface_hub

    bar = ByteProgress(progress, "Downloading")
    try:
        with _explained(name):
            fetch(_large_files(name, patterns), bar)
            folder = huggingface_hub.snapshot_download(
                name, allow_patterns=patterns, ignore_patterns=NOT_DOWNLOADED, tqdm_class=_reporter(bar.report)
            )
    finally:
        bar.end()
    return Path(folder)


def remote_headers(name: str, revision: str) -> list[StoredTensor]:
    """Return the tensors of a repository's safetensors files, downloading only the headers.

    Raises:
        ModelError: the repository has none, or the hub cannot be reached.
    """
    import huggingface_hub

    with _explained(name):
        found = huggingface_hub.get_safetensors_metadata(name, revision=revision)
    return [
        StoredTensor(tensor, str(entry.dtype), tuple(entry.shape), entry.data_offsets[1] - entry.data_offsets[0])
        for file in found.files_metadata.values()
        for tensor, entry in file.tensors.items()
    ]


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn whatever the hub's library raises for a repository into kvchat's own error."""
    from huggingface_hub import errors

    try:
        yield
    except errors.HFValidationError as error:
        raise ModelError(
            f'"{name}" is not a model.',
            "It is neither a folder nor the name of a hub repository.",
            "Name a repository as ORG/MODEL, a GGUF file of one as ORG/MODEL:FILE.gguf, a server as http://HOST:PORT.",
        ) from error
    except errors.GatedRepoError as error:
        hint = f"Accept its terms at https://huggingface.co/{name}, then log in with `hf auth login`."
        raise ModelError(f"{name} is gated.", "Its owner requires you to accept its terms first.", hint) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"The hub has no model {name}.",
            "There is no folder of that name either.",
            "Check the spelling; a private model needs `hf auth login`.",
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise ModelError(
            f"{name} cannot be downloaded.",
            "The hub cannot be reached, and the model is not (completely) in the local cache.",
            'Check the network and HF_HUB_OFFLINE, or give a folder. The model "bundled" needs neither.',
        ) from error
    except ModelError:
        raise
    except Exception as error:  # network libraries have their own errors
        raise ModelError(
            f"{name} cannot be downloaded.", str(error).strip().split("\n", 1)[0][:200], "Try again, or give a folder."
        ) from error


def _large_files(name: str, patterns: list[str]) -> list[RemoteFile]:
    """Return ``large_files``, or none if the hub cannot be reached: the library then uses the cache or explains.

    Raises:
        HfHubHTTPError: the hub refuses.
    """
    from huggingface_hub import errors

    try:
        return list(large_files(name, patterns, NOT_DOWNLOADED))
    except (errors.HfHubHTTPError, errors.HFValidationError):
        raise
    except Exception:  # noqa: BLE001  # offline, or one of many network errors
        return []


def _reporter(report: Callable[[float, float], None]) -> type:
    """Return a tqdm class that draws nothing and calls ``report`` with the bytes downloaded and the total.

    The hub's library makes several bars: one for files, one for bytes in files, and one for bytes transferred, which
    are fewer if a file was partly downloaded before. The second is reported.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]

    bars: list[Any] = []

    class Reporter(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)  # only the hub's own class knows it
            if kwargs.get("unit") == "B":
                bars.append(self)
            super().__init__(*args, **(kwargs | {"file": io.StringIO(), "mininterval": 1.0}))

        def display(self, *_: Any, **__: Any) -> None:
            if bars and bars[0] is self and self.total:  # tqdm compares bars by their numbers
                with contextlib.suppress(OSError):
                    report(self.n, self.total)

    return Reporter


class RemoteFile(NamedTuple):
    """A file on the hub, and the ``blob`` in the cache that it becomes."""

    url: str
    nbytes: int
    blob: Path

    @property
    def partial(self) -> Path:
        return self.blob.with_name(f"{self.blob.name}.partial")


def fetch(files: list[RemoteFile], progress: ByteProgress) -> None:
    """Download the files that are not in the cache.

    Raises:
        ModelError: another process is downloading one, or one arrived damaged. Network errors are passed on.
    """
    total = sum(file.nbytes for file in files)
    before = 0
    for file in files:
        if not file.blob.exists():
            _fetch(file, before, total, progress)
        before += file.nbytes


def large_files(name: str, patterns: list[str], ignored: list[str]) -> Iterator[RemoteFile]:
    """Yield the large files of a repository that match ``patterns``.

    Raises:
        huggingface_hub's errors: the repository does not exist or is gated. Network errors are passed on.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, model_info
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]  # by name alone

    info = model_info(name, files_metadata=True)
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or ()}
    blobs = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model") / "blobs"
    for file in filter_repo_objects(sizes, allow_patterns=patterns, ignore_patterns=ignored):
        if LARGE <= sizes[file] < TOO_LARGE:
            url = hf_hub_url(name, file, revision=info.sha)
            etag = get_hf_file_metadata(url).etag or ""
            if re.fullmatch(r"[0-9a-f]{40,64}", etag):
                yield RemoteFile(url, sizes[file], blobs / etag)


def _fetch(file: RemoteFile, before: int, total: int, progress: ByteProgress) -> None:
    from huggingface_hub import constants
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # by name alone

    file.blob.parent.mkdir(parents=True, exist_ok=True)
    with file.partial.open("ab") as partial:
        try:
            fcntl.flock(partial, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ModelError(
                "The model is being downloaded by another process.", hint="Wait until it is done."
            ) from error
        start = partial.tell()
        constants.DOWNLOAD_CHUNK_SIZE = min(constants.DOWNLOAD_CHUNK_SIZE, CHUNK)
        http_get(
            file.url,
            partial,
            resume_size=start,
            headers=build_hf_headers(),
            expected_size=file.nbytes,
            tqdm_class=_reporter(lambda done, _: progress.report(before + done, total)),
        )
        partial.flush()
        _check(file)
        os.replace(file.partial, file.blob)


def _check(file: RemoteFile) -> None:
    """Compare the digest if the hub gives one: parts downloaded on different days must belong together."""
    if len(file.blob.name) != 64:
        return
    with file.partial.open("rb") as partial:
        digest = hashlib.file_digest(partial, "sha256").hexdigest()
    if digest != file.blob.name:
        file.partial.unlink()
        raise ModelError("A downloaded file of the model is damaged.", f"{file.url}"[:200], "Download the model again.")


class ByteProgress:
    """Reports at most once a second how much of the work ``doing`` is done, its speed and the time left."""

    def __init__(self, show: Callable[[str], None], doing: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._show, self._doing, self._clock = show, doing, clock
        self._samples: deque[tuple[float, float]] = deque(maxlen=SPEED_SAMPLES)
        self._ended = False

    def end(self) -> None:
        """Stop reporting: the library's bars report once more when they are garbage-collected."""
        self._ended = True

    def report(self, done: float, total: float) -> None:
        """Show ``Downloading ▰▰▰▰▱▱▱▱ 1.4 GiB of 2.8 GiB · 45.0 MiB/s · 32.0 s left``."""
        now = self._clock()
        too_soon = self._samples and now - self._samples[-1][0] < REPORT_S and done < total
        if self._ended or too_soon:
            return
        self._samples.append((now, done))
        began, first = self._samples[0]
        text = f"{self._doing} {meter(done / total if total else 0.0)} {size(done)} of {size(total)}"
        if now - began >= REPORT_S and done > first:
            rate = (done - first) / (now - began)
            text += f" · {size(rate)}/s · {seconds((total - done) / rate)} left"
        self._show(text)
