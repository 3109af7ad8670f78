"""Downloads from the Hugging Face hub, with progress; a download that was cut off goes on where it ended."""

from __future__ import annotations

import contextlib
import io
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvchat.errors import ModelError
from kvchat.units import seconds, size

Progress = Callable[[str], None]

NOT_DOWNLOADED = ["*/*", "consolidated*"]  # the same weights once more, in other layouts
SPEED_SAMPLES = 20  # one a second
MIN_SPEED_S = 1.0


def download(name: str, patterns: list[str], progress: Progress) -> Path:
    """Download the files of a repository that match ``patterns``, where they are not in the cache; their folder.

    Raises:
        ModelError: there is no such model, it is gated, or the hub cannot be reached.
    """
    import huggingface_hub
    from huggingface_hub import errors

    try:
        folder = huggingface_hub.snapshot_download(
            name, allow_patterns=patterns, ignore_patterns=NOT_DOWNLOADED, tqdm_class=_reporter(progress)
        )
    except errors.HFValidationError as error:
        raise ModelError(
            f'"{name}" is no model.', "It is neither a folder nor the name of a hub repository."
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
    except OSError as error:
        raise ModelError(f"{name} cannot be downloaded.", str(error).strip().split("\n", 1)[0][:200]) from error
    return Path(folder)


class Speed:
    """Bytes per second over the last samples."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, float]] = deque(maxlen=SPEED_SAMPLES)

    def describe(self, done: float, total: float) -> str:
        """How far a download is: ``Downloading 1.4 GiB of 2.8 GiB · 45.0 MiB/s · 32 s left``."""
        self._samples.append((self._clock(), done))
        (began, first), (now, last) = self._samples[0], self._samples[-1]
        text = f"Downloading {size(done)} of {size(total)}"
        if now < began + MIN_SPEED_S or last <= first:
            return text
        rate = (last - first) / (now - began)
        return f"{text} · {size(rate)}/s · {seconds((total - done) / rate)} left"


def _reporter(progress: Progress) -> type:
    """A tqdm class that draws nothing and reports the bytes downloaded once a second.

    The hub's library makes several bars: one for files, then one for bytes in files, then one for bytes transferred,
    which are fewer where a file is partly there already. The second is reported.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]

    bars: list[Any] = []
    speed = Speed()

    class Reporter(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)  # only the hub's own class knows it
            if kwargs.get("unit") == "B":
                bars.append(self)
            super().__init__(*args, **(kwargs | {"file": io.StringIO(), "mininterval": 1.0}))

        def display(self, *_: Any, **__: Any) -> None:
            if bars and bars[0] is self and self.total:  # tqdm compares bars by their numbers
                with contextlib.suppress(OSError):
                    progress(speed.describe(self.n, self.total))

    return Reporter
