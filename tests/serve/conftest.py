"""Servers shared by many tests: one with the fake engine, one with the bundled model."""

import pytest
from support.served import serving


@pytest.fixture(scope="session")
def fake(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("fake"), "--queue", "2", fake=True) as served:
        yield served


@pytest.fixture(scope="session")
def bundled(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("bundled")) as served:
        yield served
