"""Freeze's constants suit long conversations; here tokens freeze from the first steps on."""

import pytest
from support.freeze_run import EARLY, with_rule


@pytest.fixture(autouse=True)
def early_freezes():
    with with_rule(**EARLY):
        yield
