"""Which weights an experiment runs on, and how they are loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvchat.engine.model.load import LoadedModel
    from kvchat.engine.session import Session


@dataclass(frozen=True)
class ModelChoice:
    """A model, its device, dtype and quantization, as the command line names them."""

    model: str = "bundled"
    device: str = "auto"
    dtype: str = "auto"
    quantize: str = "none"

    def load(self, report: Callable[[str], None]) -> LoadedModel:
        """Load the weights; ``report`` is called with each stage.

        Raises:
            KvchatError: as ``load_model``.
        """
        from kvchat.engine.model.load import load_model  # imports torch

        return load_model(self.model, self.device, self.dtype, report, quantize=self.quantize)

    def open(self, report: Callable[[str], None]) -> Session:
        """A session with the weights.

        Raises:
            KvchatError: as ``load_model``.
        """
        from kvchat.engine.session import Session

        return Session(self.load(report))
