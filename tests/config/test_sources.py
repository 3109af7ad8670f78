import ast
import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st
from support.message import lacks

import kvchat
from kvchat import paths
from kvchat.cli.options import flags
from kvchat.config import presets, schema, sources
from kvchat.config.modes import AUTO, registered
from kvchat.config.presets import MODE, SYSTEM
from kvchat.config.schema import ModelSettings, SamplingSettings, checked_sampling
from kvchat.config.settings_file import save
from kvchat.config.validation_errors import choices
from kvchat.engine.sampler import Sampler
from kvchat.errors import UsageError
from kvchat.protocol.messages import Load, Sampling
from kvchat.tui.prompt.arguments import change


@pytest.fixture
def config():
    path = paths.config_file()
    path.parent.mkdir(parents=True)
    return path


def error_of(config: Path, text: str) -> str:
    config.write_text(text)
    with pytest.raises(UsageError) as caught:
        sources.load(environ={})
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_each_source_is_checked_once(config, monkeypatch):
    config.write_text('[model]\ndevice = "cpu"\n')
    check, checked, asked = sources.check, [], []
    monkeypatch.setattr(sources, "check", lambda source: checked.append(source) or check(source))
    flags = sources.flag_source({"--device": ([sources.DEVICE], "cuda:1")})
    profile = sources.SettingsSource({("sampling", "top_k"): 3}, {("sampling", "top_k"): "8gb"})
    resolved = sources.load(flags, {}, lambda device: asked.append(device) or [profile])
    assert (len(checked), asked, resolved.settings.sampling.top_k) == (3, ["cuda:1"], 3)


def test_flags_beat_the_environment_which_beats_the_file(config):
    config.write_text('[kv]\nmode = "streaming"\n[sampling]\ntop_k = 1\nseed = 1\n')
    environ = {"KVCHAT_SAMPLING_TOP_K": "2", "KVCHAT_KV_MODE": "speculative"}
    flags = sources.flag_source({"--mode": ([("kv", "mode")], "full"), "--seed": ([("sampling", "seed")], None)})
    resolved = sources.load(flags, environ)
    assert resolved.settings.kv.mode == "full"
    assert (resolved.settings.sampling.top_k, resolved.settings.sampling.seed) == (2, 1)
    assert resolved.origins == {
        ("kv", "mode"): "--mode",
        ("sampling", "top_k"): "KVCHAT_SAMPLING_TOP_K",
        ("sampling", "seed"): "config.toml:5",
    }
    lines = list(resolved.lines())
    assert "sampling.seed = 1   # config.toml:5" in lines
    assert "sampling.top_p = 1.0   # default" in lines
    assert "# kv.streaming.budget is unset   # default" in lines


def test_only_parameters_that_were_set_are_passed_on(config):
    config.write_text("[kv.streaming]\nsigma = 64\n")
    kv = sources.load(environ={"KVCHAT_KV_STREAMING_R": "8"}).settings.kv
    assert kv.params("streaming") == {"sigma": 64, "R": 8}
    assert kv.params("speculative") == kv.params("full") == {}


def test_an_unknown_word_is_shown_with_line_caret_and_suggestion(config):
    message, place = error_of(config, '# first\n[kv]\n  mode = "frezee"\n').split("\n", 1)
    assert message.startswith('config.toml:3: kv.mode: "frezee"')
    assert not lacks(message, "full, freeze, streaming, sync, speculative", '"freeze"')
    assert place == f'  {config}\n    mode = "frezee"\n           ^'


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("[kv]\nmod = 1", ("config.toml:2: kv.mod: ", '"mode"')),
        ("[kvs]\nx = 1", ("config.toml:1: kvs: ", '"kv"')),
        ("kv = 3", ("config.toml:1: kv: ", "[kv]", "3")),
        ("[kv]\nmode = 'spec'", ('config.toml:2: kv.mode: "spec"', "full, freeze", '"speculative"')),
        ("[kv]\nmode = 1", ("config.toml:2: kv.mode: 1", "full, freeze, streaming, sync, speculative")),
        ("[kv]\nstreaming = 1", ("config.toml:2: kv.streaming: ", "[kv.streaming]", "1")),
        ("[sampling]\nmin_p = 1", ("config.toml:2: sampling.min_p: 1", "0 and below 1")),
        ("[sampling]\nseed = 'x'", ('config.toml:2: sampling.seed: "x"', "whole number", "92233")),
        ("[sampling]\nstop = [\n'a',\n1]", ("config.toml:2: sampling.stop.1: 1", "list")),
        ("[sampling]\nstop = ''", ('config.toml:2: sampling.stop.0: ""', "list")),
        ("[ui]\nhistory = 'maybe'", ('config.toml:2: ui.history: "maybe"', "true", "false")),
        ("[ui]\ntheme = 1", ("config.toml:2: ui.theme: 1", "text")),
        ("[model]\nname = ''", ('config.toml:2: model.name: ""', "empty")),
        ("[sampling]\nseed = 1\nseed = 2", ("config.toml:3: ",)),
        ("[kv]\n\nmode = ", ("config.toml:3: ",)),
        ("[kv]\nmode = full", ("config.toml:2: ", "quotes")),
        ("[model]\nfast = True", ("config.toml:2: ", "lowercase")),
        ("temperature = 0", ("config.toml:1: temperature: ", "[sampling]")),
        ("[kv]\nbudget = 512", ("config.toml:2: kv.budget: ", "[kv.streaming]", "[kv.speculative]")),
        ("[model]\ntheme = 'x'", ("config.toml:2: model.theme: ", "[ui]")),
        ("[kv.streaming]\nbudget = 3", ("config.toml:2: kv.streaming.budget: 3", "whole number")),
        ('[model]\ndevice = "gpu"', ('config.toml:2: model.device: "gpu"', "auto, cpu, cuda", "cuda:N")),
    ],
)
def test_invalid_settings_are_rejected_with_their_line(config, text, facts):
    message = error_of(config, text)
    assert message.startswith(facts[0])
    assert not lacks(message, *facts)


@pytest.mark.parametrize(
    ("text", "start", "shown"),
    [
        ("[zork]\na = 1", "config.toml:1: zork: ", "  [zork]\n   ^"),
        ("[zork.deep]  # here\na = 1", "config.toml:1: zork: ", "  [zork.deep]  # here\n   ^"),
        (
            "[kv]\nmode = 'full'\n\n[kv . stream]\n# of tokens\nR = 1",
            "config.toml:4: kv.stream: ",
            "  [kv . stream]\n        ^",
        ),
        ("zork.a = 1", "config.toml:1: zork: ", "  zork.a = 1\n           ^"),
    ],
)
def test_the_caret_points_at_the_name_of_an_unknown_table(config, text, start, shown):
    message, place = error_of(config, text).split("\n", 1)
    assert message.startswith(start)
    assert place == f"  {config}\n{shown}"


def test_the_errors_of_all_sources_are_reported(config):
    config.write_text("[kv]\nmode = 'frezee'\n")
    flags = sources.flag_source({"--seed": ([("sampling", "seed")], -1)})
    with pytest.raises(UsageError, match=r"(?s)config\.toml:2.*KVCHAT_SAMPLING_TOP_K: .*--seed: -1"):
        sources.load(flags, {"KVCHAT_SAMPLING_TOP_K": "many"})


def test_a_path_below_a_file_counts_as_a_missing_file():
    assert sources.file_source(Path("/dev/null/.config/kvchat/config.toml")) == sources.SettingsSource()


def test_unreadable_files_are_rejected(config):
    config.write_bytes(b"[kv]\n\xff")
    with pytest.raises(UsageError, match=r"config.toml.*UTF-8.*Byte 5.*0xff"):
        sources.load(environ={})
    config.unlink()
    config.mkdir()
    with pytest.raises(UsageError, match="cannot be read"):
        sources.load(environ={})


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ('[model]\nsystem = """\nfast = no\n[ui]\n"""\nfast = true\n', ("model", "fast"), 6),
        ("[sampling]\nstop = [\n  'a = 1',\n]\nseed = 1\n", ("sampling", "seed"), 5),
        ("ui = {theme = 'x', history = true}\n", ("ui", "history"), 1),
        ('kv.mode = "full"\n"kv"."sync".m = 3\n', ("kv", "sync", "m"), 2),
        ("[keys]\nmode.next = 'f8'\n\"theme\" = 'f9'\n", ("keys", "mode.next"), 2),
        ("\n  [kv.streaming]   # mine\n\tR = 8 # = 9\n", ("kv", "streaming", "R"), 3),
    ],
)
def test_each_value_has_the_line_on_which_it_begins(config, text, key, line):
    config.write_text(text)
    assert sources.file_source(config).origins[key] == f"config.toml:{line}"


def test_wrong_settings_in_the_environment_are_rejected():
    with pytest.raises(UsageError, match=r'KVCHAT_KV_MOD: .*"KVCHAT_KV_MODE"'):
        sources.load(environ={"KVCHAT_KV_MOD": "full"})
    with pytest.raises(UsageError, match=r'^KVCHAT_SAMPLING_TOP_K: "many"'):
        sources.load(environ={"KVCHAT_SAMPLING_TOP_K": "many"})
    assert sources.load(environ={"KVCHAT_KV_MODE": "", "KVCHAT_OTHER": "x"}).origins == {}


def test_variables_without_effect_are_reported_with_a_suggestion():
    (message,) = sources.unknown_variables(
        {"KVCHAT_DATADIR": "x", "KVCHAT_CONFIG": "y", "KVCHAT_KV_MODE": "", "HOME": "/"}
    )
    assert not lacks(message, "KVCHAT_DATADIR", '"KVCHAT_DATA_DIR"')
    assert sources.unknown_variables({"KVCHAT_KV_MOD": "full"}) == [], "rejected when it is loaded"


def test_a_wrong_flag_for_several_settings_is_reported_once():
    flags = {"--budget": ([("kv", "streaming", "budget"), ("kv", "speculative", "budget")], 3)}
    with pytest.raises(UsageError) as caught:
        sources.load(sources.flag_source(flags), {})
    assert str(caught.value).count("--budget: 3") == 1


def test_the_template_sets_nothing_and_shows_all_defaults(config):
    text = sources.template()
    assert schema.Settings.model_validate(tomli.loads(text)) == schema.Settings()
    set_lines = [line.removeprefix("# ") if " = " in line else line for line in text.splitlines()]
    shown = schema.Settings.model_validate(tomli.loads("\n".join(set_lines)))
    assert shown.sampling == schema.Settings().sampling
    assert shown.kv.mode == "full"
    assert all(info.description and info.description in text for _, info in sources.leaves())


# ---- Writing config.toml changes values and nothing else


OWN = """\
# mine
title = 1   # not ours, see below

[sampling]   # how it talks
temperature = 0.7   # calm
stop = [
  "END",   # both
  "STOP",
]

# the screen
[ui]
theme = 'kvchat-dark'
"""
CHANGES = {
    ("sampling", "temperature"): 0.2,
    ("sampling", "seed"): 7,
    ("sampling", "stop"): ("a\nb", "[ui]"),
    ("model", "system"): 'He said "no".\n[kv]\n# theme = 1',
    ("ui", "theme"): "kvchat-light",
    ("ui", "history"): False,
    ("kv", "mode"): "freeze",
    ("kv", "freeze", "tau"): 0.25,
    ("keys", "mode.next"): "f8",
}
STARTS = [
    "",
    sources.template(),
    OWN.replace("title = 1   # not ours, see below\n", ""),
    "kv.mode = 'full'\nui = { theme = 'x', history = true }\nkeys.mode.next = 'f9'\n",
    "kv = { mode = 'full' }\n",
]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "config.toml"


@pytest.mark.parametrize("start", STARTS)
@settings(max_examples=8)
@given(st.permutations(list(CHANGES)), st.integers(0, len(CHANGES)))
def test_saved_values_are_read_back_and_can_be_removed(tmp_path_factory, start, order, removed):
    path = tmp_path_factory.mktemp("config") / "config.toml"
    path.write_text(start)
    before = sources.file_source(path).values
    save(path, {key: CHANGES[key] for key in order})
    read = {key: tuple(value) if isinstance(value, list) else value for key, value in _values(path).items()}
    assert read == {**before, **CHANGES}
    save(path, dict.fromkeys(order[:removed]))
    assert _values(path).keys() == {**before, **CHANGES}.keys() - set(order[:removed])


def test_surrogates_are_replaced_when_saved(path):
    save(path, {("model", "system"): "caf\udce9"})  # from a command line in Latin-1
    assert _values(path) == {("model", "system"): "caf?"}


def test_saving_keeps_comments_order_and_other_lines(path):
    path.parent.mkdir()
    path.write_text(OWN.replace("title = 1   # not ours, see below\n", ""))
    save(path, {("sampling", "temperature"): 0.2, ("sampling", "seed"): 7, ("ui", "theme"): "kvchat-light"})
    assert path.read_text().splitlines() == [
        "# mine",
        "",
        "[sampling]   # how it talks",
        "seed = 7",
        "temperature = 0.2   # calm",
        *OWN.splitlines()[5:12],
        'theme = "kvchat-light"',
    ]


def test_byte_order_marks_are_ignored(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b'\xef\xbb\xbf[model]\nsystem = "\xef\xbb\xbfBe brief."\n')
    save(path, {("ui", "theme"): "kvchat-light"})
    resolved = sources.resolve(sources.file_source(path)).settings
    assert (resolved.model.system, resolved.ui.theme) == ("Be brief.", "kvchat-light")


def test_saving_into_the_template_keeps_its_comments(path):
    path.parent.mkdir()
    path.write_text(sources.template())
    save(path, {("sampling", "top_k"): 12, ("kv", "sync", "rho"): 0.75})
    added = {"[sampling]": ["top_k = 12"], "[kv.sync]": ["rho = 0.75"]}
    expected = [new for line in sources.template().splitlines() for new in (line, *added.get(line, ()))]
    assert path.read_text().splitlines() == expected


@pytest.mark.parametrize("text", ["[ui\n", OWN, "[ui]\nhistory = 3\n"])
def test_a_wrong_file_is_rejected_and_unchanged(path, text):
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(UsageError, match=r"config.toml:\d"):
        save(path, {("ui", "theme"): "x"})
    assert path.read_text() == text


def test_an_unwritable_file_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be"):
        save(tmp_path / "file" / "config.toml", {("ui", "theme"): "x"})


def _values(path):
    return sources.file_source(path).values


# Values on both sides of each bound.
REJECTED = {
    "temperature": ("-1e-9", "100.001", "nan", "inf", "'warm'"),
    "top_k": ("-1", "1.5", "'x'", "None"),
    "top_p": ("1.0000001", "-1", "nan"),
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
    "top_p": ("0", "6e-8", "0.5", "1"),
    "min_p": ("0", "0.5", "0.999999"),
    "repetition_penalty": ("0.01", "1", "100"),
    "presence_penalty": ("-2", "2"),
    "frequency_penalty": ("-2", "2"),
    "seed": ("0", "9223372036854775807"),
    "max_new_tokens": ("1", "1000000"),
}


def value_of(text: str) -> Any:
    return float(text) if text in ("nan", "inf") else ast.literal_eval(text)


def in_file(name: str, text: str) -> Sampling:
    paths.config_file().parent.mkdir(exist_ok=True)
    paths.config_file().write_text(f"[sampling]\n{name} = {text}\n")
    return sources.load(environ={}).settings.sampling.sampling()


def in_environment(name: str, text: str) -> Sampling:
    return sources.load(environ={f"KVCHAT_SAMPLING_{name.upper()}": text}).settings.sampling.sampling()


def in_command(name: str, text: str) -> Sampling:
    return change(Sampling(), name, text)


def in_the_engine(name: str, text: str) -> Sampling:
    return Sampler(Sampling(**{name: value_of(text)}), 8, "cpu").sampling


@pytest.mark.parametrize("accept", [in_file, in_environment, in_command, in_the_engine])
def test_settings_command_and_engine_accept_the_same_values(accept):
    for name, texts in ALLOWED.items():
        for text in texts:
            assert getattr(accept(name, text), name) == value_of(text), (name, text)
    for name, texts in REJECTED.items():
        for text in texts:
            if text != "None" or accept is not in_file:  # TOML has no null
                with pytest.raises(UsageError, match=f"(?i){name}.*number"):
                    accept(name, text)


@pytest.mark.parametrize("stop", ["", ("a", ""), ("a", 1)])
def test_invalid_stop_strings_are_rejected_everywhere(stop):
    with pytest.raises(UsageError, match="stop"):
        Sampler(Sampling(stop=stop), 8, "cpu")
    flags = {"--stop": ([("sampling", "stop")], stop)}
    with pytest.raises(UsageError, match="--stop"):
        sources.load(sources.flag_source(flags), {})


def test_a_single_stop_string_becomes_a_list():
    assert SamplingSettings(stop="ab").sampling() == checked_sampling(Sampling(stop="ab")) == Sampling(stop=("ab",))


def test_settings_and_protocol_have_the_same_sampling_parameters():
    assert {field.name for field in dataclasses.fields(Sampling)} == set(SamplingSettings.model_fields)
    assert set(REJECTED) | {"stop"} == set(ALLOWED) | {"stop"} == set(SamplingSettings.model_fields)
    assert SamplingSettings().sampling() == Sampling()


def test_an_error_names_parameter_value_and_range():
    with pytest.raises(UsageError) as caught:
        checked_sampling(Sampling(), min_p="1")
    assert not lacks(caught.value.title, "min_p", "'1'")
    assert "0 and below 1" in caught.value.detail
    assert "0.0" in caught.value.hint


def test_every_mode_with_parameters_has_its_table():
    fields = schema.KvSection.model_fields
    assert {AUTO, *registered()} == set(schema.KvSection.model_json_schema()["properties"]["mode"]["enum"])
    for name, cls in registered().items():
        assert (name in fields) == bool(cls.model_fields)


def test_settings_engine_and_python_have_equal_default_values():
    asked, parameters = Load(), inspect.signature(kvchat.load).parameters
    assert ModelSettings().of_load().items() <= vars(asked).items()
    shared = vars(asked).keys() & parameters.keys() - {"mode_params"}
    assert shared >= ModelSettings().of_load().keys()
    assert {name: parameters[name].default for name in shared} == {name: vars(asked)[name] for name in shared}


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("https://huggingface.co/org/m-4B/", "org/m-4B"),
        ("http://www.huggingface.co/org/m/tree/main?library=transformers", "org/m"),
        ("hf.co/org/m:Q4_K_M", "org/m:Q4_K_M"),
        ("https://huggingface.co/org/m/blob/main/config.json", "org/m"),
        ("https://huggingface.co/org/m/resolve/main/m.Q8_0.gguf?download=true", "org/m:m.Q8_0.gguf"),
        *((name, name) for name in ("https://huggingface.co/org/m/tree/v2", "http://hf.company:80/org/m", "hf/m", "m")),
    ],
)
def test_hub_addresses_become_model_names(address, name):
    assert schema.checked_model(address, {})["model"] == name


def test_model_options_may_be_text_and_change_no_others():
    assert schema.checked_model("there", {"fast": "false"}) == {"model": "there", "fast": False}


def test_only_fields_with_few_values_have_choices():
    fields = dict(sources.leaves())
    assert [choices(fields["ui", "history"]), choices(fields["sampling", "seed"])] == [("true", "false"), ()]


# ---- Presets are files: they set what was saved in them, and what does not belong in one is rejected


CODER = {SYSTEM: "You write code.", ("sampling", "temperature"): 0.2, ("sampling", "stop"): ("END",), MODE: "streaming"}


def written(text: str, name: str = "coder") -> None:
    paths.presets_dir().mkdir(parents=True)
    (paths.presets_dir() / f"{name}.toml").write_text(text)


def test_a_saved_preset_is_read_back_and_can_be_replaced():
    presets.save("coder", {**CODER, ("kv", "streaming", "budget"): 512})
    settings = sources.resolve(presets.read(presets.find("cod"))).settings
    assert (settings.model.system, settings.sampling.temperature) == ("You write code.", 0.2)
    assert (settings.kv.mode, settings.kv.params("streaming"), settings.sampling.stop) == (
        *("streaming", {"budget": 512}, ("END",)),
    )
    presets.save("coder", {MODE: "full", ("sampling", "seed"): None})
    assert presets.read(presets.find("coder")).values == {MODE: "full"}
    assert presets.names() == ["coder"]


@pytest.mark.parametrize("name", ["", "../config", "a b", ".hidden", "a/b"])
def test_invalid_preset_names_are_rejected(name):
    with pytest.raises(UsageError):
        presets.save(name, CODER)
    assert not paths.presets_dir().exists()


@pytest.mark.parametrize(
    "text",
    [
        "[model]\nname = 'bundled'\n",
        "[ui]\ntheme = 'x'\n",
        "[kv]\nparked_gib = 1\n",
        "[sampling]\ntemperature = -1\n",
        "[",
    ],
)
def test_invalid_presets_are_rejected_with_their_file(text):
    written(text)
    with pytest.raises(UsageError, match=r"presets/coder\.toml"):
        presets.read(presets.find("coder"))


def test_an_unknown_preset_is_rejected():
    with pytest.raises(UsageError):
        presets.read(presets.find("coder"))
    presets.save("coder", CODER)
    with pytest.raises(UsageError, match="writer"):
        presets.read(presets.find("writer"))


def test_other_options_override_a_preset():
    presets.save("coder", {**CODER, ("kv", "streaming", "budget"): 512})
    given = flags({"preset": "coder", "temperature": 0.9, "budget": 256})
    settings = sources.resolve(given).settings
    assert (settings.sampling.temperature, settings.kv.params("streaming")) == (0.9, {"budget": 256})
    assert (settings.kv.mode, settings.model.system) == ("streaming", "You write code.")
    assert given.origins[MODE] == "--preset coder"
