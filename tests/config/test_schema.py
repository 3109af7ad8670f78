from __future__ import annotations

import ast
import dataclasses
import inspect
from typing import Any

import pytest
from support.message import lacks

import kvchat
from kvchat import paths
from kvchat.config import schema, sources
from kvchat.config.modes import registered
from kvchat.config.schema import ModelSettings, SamplingSettings, checked_sampling
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
    "seed": ("-1", "9223372036854775808", "0.5", "'x'"),
    "max_new_tokens": ("0", "-1", "1.5", "None"),
}
ALLOWED = {
    "temperature": ("0", "1e-9", "11", "100"),
    "top_k": ("0", "1", "1000000"),
    "top_p": ("1e-6", "0.5", "1"),
    "min_p": ("0", "0.5", "0.999999"),
    "repetition_penalty": ("0.01", "1", "100"),
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
    assert set(registered()) == set(schema.KvSection.model_json_schema()["properties"]["mode"]["enum"])
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
