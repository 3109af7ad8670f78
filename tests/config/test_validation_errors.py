"""Refusals in people's words: what a field takes, what is wrong with a value, and the way out."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import BaseModel, Field, ValidationError
from support.message import lacks

from kvchat.config.validation_errors import advice, choices, expected, field_at, reason, refused_by_pydantic


class Inner(BaseModel):
    share: float = Field(0.5, gt=0, le=1)


class Outer(BaseModel):
    count: int | None = Field(None, ge=64)
    chance: float = Field(0.25, ge=0, lt=1)
    level: int = Field(3, ge=0, le=9)
    kind: Literal["one", "two"] = "one"
    flag: bool = True
    name: str = Field("", min_length=1)
    pair: tuple[int, int] = (1, 2)
    needed: str
    inner: Inner = Inner()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("count", "a whole number of at least 64"),
        ("chance", "a number of at least 0 and below 1"),
        ("level", "a whole number from 0 to 9"),
        ("kind", "one of one, two"),
        ("flag", "true or false"),
        ("name", "a text that is not empty"),
        ("pair", "a list of 2 numbers"),
        ("inner", "a table"),
    ],
)
def test_a_field_says_what_it_takes(name, words):
    assert expected(Outer.model_fields[name]) == words


def test_a_reason_is_that_of_the_field_inside():
    with pytest.raises(ValidationError) as refused:
        Outer.model_validate({"needed": "", "inner": {"share": 2}})
    (details,) = refused.value.errors()
    assert not lacks(reason(Outer, details), "above 0", "at most 1")
    assert field_at(Outer, ("nothing", "share")) is None


def test_the_way_out_names_a_default_that_can_be_read():
    hints = {name: advice(Outer.model_fields[name]) for name in ("chance", "count", "needed")}
    assert "0.25" in hints["chance"]
    assert "default" in hints["count"]
    assert "default" not in hints["needed"]


def test_few_words_can_be_offered():
    offered = [choices(Outer.model_fields[name]) for name in ("kind", "flag", "count")]
    assert offered == [("one", "two"), ("true", "false"), ()]


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [(Outer, {"count": 0}, "at least 64"), (Outer, {"count": "x"}, "a whole number"), (Inner, {"share": 0}, "above 0")],
)
def test_a_value_that_no_field_describes(kind, value, words):
    with pytest.raises(ValidationError) as refused:
        kind.model_validate({"needed": "", **value})
    assert refused_by_pydantic(refused.value) == (*value.values(), words)
    assert refused_by_pydantic(ValueError()) is None
