"""The weights that an experiment runs on, and the way they are loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvchat.protocol.messages import HostDtype, Load

if TYPE_CHECKING:
    from kvchat.engine.session import Session
    from kvchat.models.load import LoadedModel


@dataclass(frozen=True)
class ModelChoice:
    """A model, its device, dtype, quantization and what full pages are kept in, as the command line names them."""

    model: str = "bundled"
    device: str = "auto"
    dtype: str = "auto"
    quantize: str = "none"
    host_dtype: HostDtype = "model"

    def load(self, report: Callable[[str], None]) -> LoadedModel:
        """Load the weights; ``report`` is called with each stage.

        Raises:
            KvchatError: as ``load_model``.
        """
        from kvchat.models.load import load_model  # imports torch

        return load_model(self._asked, report)

    def open(self, report: Callable[[str], None]) -> Session:
        """A session with the weights.

        Raises:
            KvchatError: as ``load_model``.
        """
        from kvchat.engine.session import Session

        return Session(self.load(report), self._asked)

    def settings(self) -> dict[str, str]:
        """The part of the choice that the model's identity does not say, as settings of an experiment."""
        return {} if self.host_dtype == "model" else {"host_dtype": self.host_dtype}

    @property
    def _asked(self) -> Load:
        return Load(**vars(self))
