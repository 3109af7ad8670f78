from __future__ import annotations

import ast
import dataclasses
import inspect
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field, ValidationError
from support.message import lacks

import kvchat
from kvchat import paths
from kvchat.config import schema, sources
from kvchat.config.modes import AUTO, registered
from kvchat.config.schema import ModelSettings, SamplingSettings, checked_sampling
from kvchat.config.validation_errors import advice, choices, expected, field_at, reason, refused_by_pydantic
from kvchat.engine.sampler import Sampler
from kvchat.errors import UsageError
from kvchat.protocol.messages import Load, Sampling
from kvchat.tui.prompt.arguments import change

# Around each bound: what is refused and what is allowed.
REFUSED = {
    "temperature": ("-1e-9", "100.001", "nan", "inf", "'warm'"),
    "top_k": ("-1", "1.5", "'x'", "None"),
    "top_p": ("0", "6e-8", "9.9e-7", "1.0000001", "-1", "nan"),
    "min_p": ("-1e-9", "1", "1.0", "1.5", "nan"),
    "repetition_penalty": ("0", "-1", "0.0099", "100.1", "inf"),
    "presence_penalty": ("-2.1", "2.1", "nan"),
    "frequency_penalty": ("-2.1", "2.1", "inf"),
    "seed": ("-1", "9223372036854775808", "0.5", "'x'"),
    "max_new_tokens": ("0", "-1", "1.5", "None"),
}
ALLOWED = {
    "temperature": ("0", "1e-9", "11", "100"),
    "top_k": ("0", "1", "1000000"),
    "top_p": ("1e-6", "0.5", "1"),
    "min_p": ("0", "0.5", "0.999999"),
    "repetition_penalty": ("0.01", "1", "100"),
    "presence_penalty": ("-2", "2"),
    "frequency_penalty": ("-2", "2"),
    "seed": ("0", "9223372036854775807"),
    "max_new_tokens": ("1", "1000000"),
}
CASES = [
    (name, text, allowed)
    for table, allowed in ((REFUSED, False), (ALLOWED, True))
    for name, texts in table.items()
    for text in texts
]


def value_of(text: str) -> Any:
    return float(text) if text in ("nan", "inf") else ast.literal_eval(text)


def in_file(name: str, text: str) -> Sampling:
    paths.config_file().parent.mkdir(exist_ok=True)
    paths.config_file().write_text(f"[sampling]\n{name} = {text}\n")
    return sources.load(environ={}).settings.sampling.sampling()


def in_environment(name: str, text: str) -> Sampling:
    return sources.load(environ={f"KVCHAT_SAMPLING_{name.upper()}": text}).settings.sampling.sampling()


def by_command(name: str, text: str) -> Sampling:
    return change(Sampling(), name, text)


def by_the_engine(name: str, text: str) -> Sampling:
    return Sampler(Sampling(**{name: value_of(text)}), 8, "cpu").sampling


@pytest.mark.parametrize("judge", [in_file, in_environment, by_command, by_the_engine])
@pytest.mark.parametrize(("name", "text", "allowed"), CASES)
def test_settings_command_and_engine_judge_a_value_alike(name: str, text: str, allowed: bool, judge: Any) -> None:
    if text == "None" and judge is in_file:
        pytest.skip("TOML has no null")
    if allowed:
        assert getattr(judge(name, text), name) == value_of(text)
    else:
        with pytest.raises(UsageError, match=f"(?i){name}.*number"):
            judge(name, text)


@pytest.mark.parametrize("stop", ["", ("a", ""), ("a", 1)])
def test_an_empty_stop_string_is_refused_everywhere(stop: Any) -> None:
    with pytest.raises(UsageError, match="stop"):
        Sampler(Sampling(stop=stop), 8, "cpu")
    flags = {"--stop": ([("sampling", "stop")], stop)}
    with pytest.raises(UsageError, match="--stop"):
        sources.load(sources.flag_source(flags), {})


def test_one_stop_string_stands_for_a_list_of_one() -> None:
    assert SamplingSettings(stop="ab").sampling() == checked_sampling(Sampling(stop="ab")) == Sampling(stop=("ab",))


def test_the_bounds_are_in_one_place() -> None:
    assert {field.name for field in dataclasses.fields(Sampling)} == set(SamplingSettings.model_fields)
    assert set(REFUSED) | {"stop"} == set(ALLOWED) | {"stop"} == set(SamplingSettings.model_fields)
    assert SamplingSettings().sampling() == Sampling()


def test_a_refusal_names_parameter_value_and_range() -> None:
    with pytest.raises(UsageError) as caught:
        checked_sampling(Sampling(), min_p="1")
    assert "min_p" in caught.value.title
    assert not lacks(caught.value.detail, "'1'", "0 and below 1")
    assert "0.0" in caught.value.hint


def test_every_mode_with_parameters_has_its_table() -> None:
    fields = schema.KvSection.model_fields
    assert {AUTO, *registered()} == set(schema.KvSection.model_json_schema()["properties"]["mode"]["enum"])
    for name, cls in registered().items():
        assert (name in fields) == bool(cls.model_fields)


def test_the_settings_of_a_model_the_engine_and_python_begin_alike() -> None:
    asked, parameters = Load(), inspect.signature(kvchat.load).parameters
    assert ModelSettings().of_load().items() <= vars(asked).items()
    shared = vars(asked).keys() & parameters.keys() - {"mode_params"}
    assert shared >= ModelSettings().of_load().keys()
    assert {name: parameters[name].default for name in shared} == {name: vars(asked)[name] for name in shared}


def test_options_of_a_model_may_be_text_and_leave_the_others_as_they_are() -> None:
    assert schema.checked_model("there", {"fast": "false"}) == {"model": "there", "fast": False}


# ---- Refusals in people's words: what a field takes, what is wrong with a value, and the way out


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
        ("name", "text that is not empty"),
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
