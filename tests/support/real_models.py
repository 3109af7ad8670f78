"""Models not trained by us, where ``.ci/models.py`` has put them or their packages are installed."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from kvchat import paths

if TYPE_CHECKING:
    from kvchat.models.load import LoadedModel

FILES = {name: file for name in paths.NAMED if (file := paths.named_model(name))}


@cache
def real_model(name: str) -> LoadedModel:
    """The model on the CPU, loaded once per worker, for tests marked ``real_model(name)``."""
    from kvchat.models.load import load_model
    from kvchat.protocol.messages import Load

    return load_model(Load(str(FILES[name]), "cpu"), lambda *_: None)
