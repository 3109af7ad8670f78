"""Downloads from the Hugging Face hub, with progress; a download that was cut off goes on where it ended."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvchat.engine.model import resumable
from kvchat.engine.model.byte_progress import ByteProgress
from kvchat.engine.model.resumable import RemoteFile
from kvchat.errors import ModelError
from kvchat.stored_tensors import StoredTensor

Progress = Callable[[str], None]

NOT_DOWNLOADED = ["*/*", "consolidated*"]  # the same weights once more, in other layouts


def download(name: str, patterns: list[str], progress: Progress) -> Path:
    """Download the files of a repository that match ``patterns``, where they are not in the cache; their folder.

    Raises:
        ModelError: there is no such model, it is gated, or the hub cannot be reached.
    """
    import huggingface_hub

    told = ByteProgress(progress, "Downloading")
    try:
        with _explained(name):
            resumable.fetch(_large_files(name, patterns), told)
            folder = huggingface_hub.snapshot_download(
                name, allow_patterns=patterns, ignore_patterns=NOT_DOWNLOADED, tqdm_class=_reporter(told)
            )
    finally:
        told.end()
    return Path(folder)


def remote_headers(name: str, revision: str) -> list[StoredTensor]:
    """The tensors of a repository's safetensors files, of which only the headers are read.

    Raises:
        ModelError: the repository has none, or the hub cannot be reached.
    """
    import huggingface_hub

    with _explained(name):
        found = huggingface_hub.get_safetensors_metadata(name, revision=revision)
    return [
        StoredTensor(tensor, str(entry.dtype), entry.parameter_count, entry.data_offsets[1] - entry.data_offsets[0])
        for file in found.files_metadata.values()
        for tensor, entry in file.tensors.items()
    ]


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Whatever the hub's library raises for a repository is raised as kvchat's own error."""
    from huggingface_hub import errors

    try:
        yield
    except errors.HFValidationError as error:
        raise ModelError(
            f'"{name}" is no model.', "It is neither a folder nor the name of a hub repository.", "Check the spelling."
        ) from error
    except errors.GatedRepoError as error:
        hint = f"Accept its terms at https://huggingface.co/{name}, then log in with `hf auth login`."
        raise ModelError(f"{name} is gated.", "Its owner asks for an agreement first.", hint) from error
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
    except Exception as error:  # the network's libraries have errors of their own
        raise ModelError(
            f"{name} cannot be downloaded.", str(error).strip().split("\n", 1)[0][:200], "Try again, or give a folder."
        ) from error


def _large_files(name: str, patterns: list[str]) -> list[RemoteFile]:
    """None where the hub cannot be reached: what is in the cache is enough then, or the library says what is missing.

    Raises:
        HfHubHTTPError: the hub refuses.
    """
    from huggingface_hub import errors

    try:
        return list(resumable.large_files(name, patterns, NOT_DOWNLOADED))
    except (errors.HfHubHTTPError, errors.HFValidationError):
        raise
    except Exception:  # noqa: BLE001  # offline, or one of the network's many errors
        return []


def _reporter(told: ByteProgress) -> type:
    """A tqdm class that draws nothing and tells the bytes downloaded.

    The hub's library makes several bars: one for files, then one for bytes in files, then one for bytes transferred,
    which are fewer where a file is partly there already. The second is told.
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
                    told.tell(self.n, self.total)

    return Reporter
