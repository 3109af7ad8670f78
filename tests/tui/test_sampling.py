"""Sampling by name."""

from __future__ import annotations

import pytest

from kvchat.errors import UsageError
from kvchat.protocol.messages import Sampling
from kvchat.tui.prompt.arguments import change, describe_sampling


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("temperature", "0", 0.0),
        ("top_p", "0.5", 0.5),
        ("min_p", "0.1", 0.1),
        ("repetition_penalty", "1.5", 1.5),
        ("top_k", "40", 40),
        ("seed", "7", 7),
        ("seed", "none", None),
        ("stop", "\\n\\n", ("\n\n",)),
        ("stop", "none", ()),
        ("max_new_tokens", "20", 20),
    ],
)
def test_values(key, text, value):
    assert getattr(change(Sampling(seed=1), key, text), key) == value


@pytest.mark.parametrize(
    ("key", "text"), [("temperature", "-1"), ("temperature", "nan"), ("top_p", "0"), ("top_k", "1.5"), ("seed", "x")]
)
def test_refused_values_say_what_is_allowed(key, text):
    with pytest.raises(UsageError, match=rf"{key}.*'{text}'.*number"):
        change(Sampling(), key, text)


def test_only_what_differs_is_described():
    assert describe_sampling(Sampling()) == "defaults"
    assert describe_sampling(Sampling(top_k=40, seed=3)) == "top_k 40 · seed 3"
