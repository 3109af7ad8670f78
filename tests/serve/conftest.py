"""Servers that many tests ask: one of the fake engine, one of the bundled model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.served import Served, serving


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("fake"), "--queue", "2", fake=True) as served:
        yield served


@pytest.fixture(scope="session")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("bundled")) as served:
        yield served
