import pytest

from kvchat.bench import model_shapes
from kvchat.models.load import load_model
from kvchat.protocol.messages import Load


@pytest.fixture(scope="session")
def tiny_shape():
    """The model of the shape "tiny", random weights."""
    return model_shapes.build("tiny", "cpu")


@pytest.fixture(scope="session")
def bundled():
    """The bundled model in float32."""
    return load_model(Load("bundled", "cpu", "float32"), lambda stage: None)


@pytest.fixture
def tokenizer(bundled):
    return bundled.tokenizer
