"""Models loaded once for all tests of the engine: loading takes longer than most of them."""

import pytest
from support import tiny_models
from support.freeze_run import EARLY, with_rule

from kvchat.engine.session import Session
from kvchat.models.load import load_model, wrap
from kvchat.models.support import import_transformers
from kvchat.protocol.messages import Load

import_transformers()  # before tests import parts of it, with torch's compiler, sympy and torchao


@pytest.fixture(autouse=True)
def early_freezes():
    """Freeze's constants are for long conversations: let tokens freeze from the first steps on."""
    with with_rule(**EARLY):
        yield


@pytest.fixture(scope="session")
def bundled():
    return load_model(Load("bundled", "cpu", "float32"), lambda stage: None)


@pytest.fixture(scope="session")
def model(bundled):
    """A tiny random model with the bundled one's tokenizer, where words do not matter: it takes a quarter of the time.

    It is fused like the bundled one, and no folder holds it, so that its conversations are not saved on disk.
    Some files replace it with the bundled one.
    """
    sizes = {"vocab_size": bundled.vocab, "max_position_embeddings": bundled.context}
    made = tiny_models.fresh("llama", **sizes, eos_token_id=min(bundled.eos_ids))
    return wrap(made, bundled.tokenizer, "small")


@pytest.fixture
def session(model):
    """A session that has stored nothing yet."""
    session = Session(model)
    yield session
    session.close()
