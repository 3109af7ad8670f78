"""The bundled model, loaded once for all tests of the engine: a load takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import tiny_models
from support.freeze_run import EARLY, ruled

from kvchat.engine.session import Session
from kvchat.models.load import LoadedModel, load_model, wrap
from kvchat.protocol.messages import Load


@pytest.fixture(autouse=True)
def early_freezes() -> Iterator[None]:
    """Freeze's constants are for long conversations: in these tests tokens freeze from the first steps on."""
    with ruled(**EARLY):
        yield


@pytest.fixture(scope="session")
def model() -> LoadedModel:
    return load_model(Load("bundled", "cpu", "float32"), lambda stage: None)


@pytest.fixture(scope="session")
def small_model(model: LoadedModel) -> LoadedModel:
    """A tiny random model with the bundled one's tokenizer, for long answers whose words do not matter."""
    sizes = {"vocab_size": model.vocab, "max_position_embeddings": model.context, "eos_token_id": min(model.eos_ids)}
    return wrap(tiny_models.fresh("llama", **sizes), model.tokenizer, "small")


@pytest.fixture
def session(model: LoadedModel) -> Iterator[Session]:
    """A session with the bundled model that has stored nothing yet."""
    session = Session(model)
    yield session
    session.close()
