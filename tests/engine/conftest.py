"""The bundled model, loaded once for all tests of the engine: a load takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.freeze_run import EARLY, ruled

from kvchat.engine.model.load import LoadedModel, load_model


@pytest.fixture(autouse=True)
def early_freezes() -> Iterator[None]:
    """Freeze's constants are for long conversations: in these tests tokens freeze from the first steps on."""
    with ruled(**EARLY):
        yield


@pytest.fixture(scope="session")
def model() -> LoadedModel:
    return load_model("bundled", "cpu", "float32", lambda stage: None)
