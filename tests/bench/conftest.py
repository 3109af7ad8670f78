import pytest

from kvchat.bench import model_shapes


@pytest.fixture(scope="session")
def tiny_shape():
    """The model of the shape "tiny", random weights."""
    return model_shapes.build("tiny", "cpu")
