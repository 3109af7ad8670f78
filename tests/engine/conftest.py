"""The bundled model, loaded once for all tests of the engine: a load takes longer than most of them."""

from __future__ import annotations

import pytest

from kvchat.engine.model.load import LoadedModel, load_model


@pytest.fixture(scope="session")
def model() -> LoadedModel:
    return load_model("bundled", "cpu", "float32", lambda stage: None)
