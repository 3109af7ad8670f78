"""Large files of the hub, downloaded so that one that was cut off goes on where it ended; the library starts over.

A file grows as ``ETAG.partial`` beside the blobs of the library's cache and gets its name when it is whole. The library
then finds it there, and makes the rest of the cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvchat.engine.model.byte_progress import ByteProgress
from kvchat.errors import ModelError

LARGE = 2**24
CHUNK = 2**20  # the library's ten times as many bytes show nothing for ten seconds on a slow line
TOO_LARGE = 50 * 10**9  # the hub sends no larger file in one piece


class RemoteFile(NamedTuple):
    """A file on the hub and where its bytes belong in the cache."""

    url: str
    nbytes: int
    blob: Path

    @property
    def partial(self) -> Path:
        """The path of the part downloaded so far."""
        return self.blob.with_name(f"{self.blob.name}.partial")


def fetch(files: list[RemoteFile], progress: ByteProgress) -> None:
    """Download files where they are not there yet.

    Raises:
        ModelError: one is being downloaded by another process, or arrived damaged; the network's errors.
    """
    total = sum(file.nbytes for file in files)
    before = 0
    for file in files:
        if not file.blob.exists():
            _fetch(file, before, total, progress)
        before += file.nbytes


def large_files(name: str, patterns: list[str], ignored: list[str]) -> Iterator[RemoteFile]:
    """The large files of a repository that match ``patterns``.

    Raises:
        huggingface_hub's errors: the repository is not there or gated; the network's errors.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, model_info
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils._paths import filter_repo_objects

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
    from huggingface_hub.utils._headers import build_hf_headers

    file.blob.parent.mkdir(parents=True, exist_ok=True)
    with file.partial.open("ab") as partial:
        try:
            fcntl.flock(partial, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ModelError("The model is being downloaded by another process.", hint="Wait for it.") from error
        start = partial.tell()
        constants.DOWNLOAD_CHUNK_SIZE = min(constants.DOWNLOAD_CHUNK_SIZE, CHUNK)
        bar = _bar(lambda done: progress.tell(before + done, total), start)
        http_get(
            file.url,
            partial,
            resume_size=start,
            headers=build_hf_headers(),
            expected_size=file.nbytes,
            tqdm_class=bar,
        )
        partial.flush()
        _check(file)
        os.replace(file.partial, file.blob)


def _check(file: RemoteFile) -> None:
    """Compare the digest where the hub names one: what came on different days belongs together."""
    if len(file.blob.name) != 64:
        return
    with file.partial.open("rb") as partial:
        digest = hashlib.file_digest(partial, "sha256").hexdigest()
    if digest != file.blob.name:
        file.partial.unlink()
        raise ModelError("A file of the model arrived damaged.", f"{file.url}"[:200], "Download the model again.")


def _bar(tell: Callable[[float], None], start: int) -> type:
    """A tqdm class that draws nothing and tells how many bytes of the file there are."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)  # only the hub's own class knows it
            super().__init__(*args, **(kwargs | {"file": io.StringIO()}))
            self._there: float = start

        def update(self, n: float | None = 1) -> None:
            self._there += n or 0
            tell(self._there)

    return Bar
