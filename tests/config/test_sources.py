from __future__ import annotations

import os
from pathlib import Path

import pytest
import tomli
from support.message import lacks

from kvchat import paths
from kvchat.config import schema, sources
from kvchat.errors import UsageError
from kvchat.protocol.messages import Sampling


@pytest.fixture
def config() -> Path:
    path = paths.config_file()
    path.parent.mkdir(parents=True)
    return path


def refusal(config: Path, text: str) -> str:
    config.write_text(text)
    with pytest.raises(UsageError) as caught:
        sources.load(environ={})
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_each_source_is_checked_once(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text('[model]\ndevice = "cpu"\n')
    check, checked, asked = sources.check, [], []
    monkeypatch.setattr(sources, "check", lambda source: checked.append(source) or check(source))
    flags = sources.flag_source({"--device": ([sources.DEVICE], "cuda:1")})
    profile = sources.SettingsSource({("sampling", "top_k"): 3}, {("sampling", "top_k"): "8gb"})
    resolved = sources.load(flags, {}, lambda device: asked.append(device) or [profile])
    assert (len(checked), asked, resolved.settings.sampling.top_k) == (3, ["cuda:1"], 3)


def test_without_any_source_everything_is_a_default() -> None:
    resolved = sources.load(environ={})
    assert resolved.settings.sampling.sampling() == Sampling()
    assert resolved.origins == {}


def test_flags_beat_environment_beats_file_and_each_key_knows_its_origin(config: Path) -> None:
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


def test_only_parameters_somebody_set_are_handed_on(config: Path) -> None:
    config.write_text("[kv.streaming]\nsigma = 64\n")
    kv = sources.load(environ={"KVCHAT_KV_STREAMING_R": "8"}).settings.kv
    assert kv.params("streaming") == {"sigma": 64, "R": 8}
    assert kv.params("speculative") == kv.params("full") == {}


def test_a_wrong_word_is_shown_with_line_caret_and_the_nearest_word(config: Path) -> None:
    told, place = refusal(config, '# first\n[kv]\n  mode = "frezee"\n').split("\n", 1)
    assert told.startswith('config.toml:3: kv.mode: "frezee"')
    assert not lacks(told, "full, freeze, streaming, sync, speculative", '"freeze"')
    assert place == f'  {config}\n    mode = "frezee"\n           ^'


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("[kv]\nmod = 1", ("config.toml:2: kv.mod: ", '"mode"')),
        ("[kvs]\nx = 1", ("config.toml:1: kvs: ", '"kv"')),
        ("kv = 3", ("config.toml:1: kv: ", "[kv]", "3")),
        ("[kv]\nmode = 'spec'", ('config.toml:2: kv.mode: "spec"', "full, freeze", '"speculative"')),
        ("[kv]\nmode = 1", ("config.toml:2: kv.mode: 1", "full, freeze, streaming, sync, speculative")),
        ("[kv.streaming]\nsigm = 1", ("config.toml:2: kv.streaming.sigm: ", '"sigma"')),
        ("[kv]\nstreaming = 1", ("config.toml:2: kv.streaming: ", "[kv.streaming]", "1")),
        ("[kv.stream]\nR = 1", ("config.toml:1: kv.stream: ", '"streaming"')),
        ("[sampling]\ntop_p = 2", ("config.toml:2: sampling.top_p: 2", "0.000001", "1")),
        ("[sampling]\nmin_p = 1", ("config.toml:2: sampling.min_p: 1", "0 and below 1")),
        ("[sampling]\nseed = 'x'", ('config.toml:2: sampling.seed: "x"', "whole number", "92233")),
        ("[sampling]\nstop = [\n'a',\n1]", ("config.toml:2: sampling.stop.1: 1", "list")),
        ("[sampling]\nstop = ''", ('config.toml:2: sampling.stop.0: ""', "list")),
        ("[ui]\nhistory = 'maybe'", ('config.toml:2: ui.history: "maybe"', "true", "false")),
        ("[ui]\ntheme = 1", ("config.toml:2: ui.theme: 1", "text")),
        ("[model]\nname = ''", ('config.toml:2: model.name: ""', "empty")),
        ("[sampling]\nseed = 1\nseed = 2", ("config.toml:3: ",)),
        ("[kv]\n\nmode = ", ("config.toml:3: ",)),
        ("[kv.streaming]\nbudget = 3", ("config.toml:2: kv.streaming.budget: 3", "whole number")),
        ('[model]\ndevice = "gpu"', ('config.toml:2: model.device: "gpu"', "auto, cpu, cuda", "cuda:N")),
    ],
)
def test_bad_files_are_refused_by_line(config: Path, text: str, facts: tuple[str, ...]) -> None:
    told = refusal(config, text)
    assert told.startswith(facts[0])
    assert not lacks(told, *facts)


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
def test_an_unknown_table_is_shown_where_its_name_stands(config: Path, text: str, start: str, shown: str) -> None:
    told, place = refusal(config, text).split("\n", 1)
    assert told.startswith(start)
    assert place == f"  {config}\n{shown}"


def test_a_source_that_is_wrong_hides_no_other(config: Path) -> None:
    config.write_text("[kv]\nmode = 'frezee'\n")
    flags = sources.flag_source({"--seed": ([("sampling", "seed")], -1)})
    with pytest.raises(UsageError, match=r"(?s)config\.toml:2.*KVCHAT_SAMPLING_TOP_K: .*--seed: -1"):
        sources.load(flags, {"KVCHAT_SAMPLING_TOP_K": "many"})


def test_all_wrong_values_are_named_at_once(config: Path) -> None:
    message = refusal(config, "[sampling]\ntop_p = 2\ntop_k = -1\n")
    assert "config.toml:2: sampling.top_p" in message
    assert "config.toml:3: sampling.top_k" in message


def test_a_wrong_value_is_refused_even_where_a_flag_overrides_it(config: Path) -> None:
    config.write_text("[sampling]\nseed = -1\n")
    with pytest.raises(UsageError, match=r"config\.toml:2"):
        sources.load(sources.flag_source({"--seed": ([("sampling", "seed")], 1)}), {})


def test_below_what_is_no_folder_there_is_no_file() -> None:
    assert sources.file_source(Path("/dev/null/.config/kvchat/config.toml")) == sources.SettingsSource()


def test_unreadable_files_are_refused(config: Path) -> None:
    config.write_bytes(b"[kv]\n\xff")
    with pytest.raises(UsageError, match=r"config.toml.*UTF-8.*Byte 5.*0xff"):
        sources.load(environ={})
    for make in (Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        config.unlink()
        make(config)
        with pytest.raises(UsageError, match="cannot be read"):
            sources.load(environ={})
        if config.is_dir():
            config.rmdir()
            config.touch()


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
def test_each_value_has_the_line_on_which_it_begins(config: Path, text: str, key: sources.Key, line: int) -> None:
    config.write_text(text)
    assert sources.file_source(config).origins[key] == f"config.toml:{line}"


def test_variables_that_look_like_settings_must_be_some() -> None:
    with pytest.raises(UsageError, match=r'KVCHAT_KV_MOD: .*"KVCHAT_KV_MODE"'):
        sources.load(environ={"KVCHAT_KV_MOD": "full"})
    with pytest.raises(UsageError, match=r'^KVCHAT_SAMPLING_TOP_K: "many"'):
        sources.load(environ={"KVCHAT_SAMPLING_TOP_K": "many"})
    assert sources.load(environ={"KVCHAT_KV_MODE": "", "KVCHAT_OTHER": "x"}).origins == {}


def test_variables_without_effect_are_told_with_the_nearest_name() -> None:
    (told,) = sources.unknown_variables(
        {"KVCHAT_DATADIR": "x", "KVCHAT_CONFIG": "y", "KVCHAT_KV_MODE": "", "HOME": "/"}
    )
    assert not lacks(told, "KVCHAT_DATADIR", '"KVCHAT_DATA_DIR"')
    assert sources.unknown_variables({"KVCHAT_KV_MOD": "full"}) == [], "it is refused"


def test_what_a_flag_sets_in_several_places_is_refused_once() -> None:
    flags = {"--budget": ([("kv", "streaming", "budget"), ("kv", "speculative", "budget")], 3)}
    with pytest.raises(UsageError) as caught:
        sources.load(sources.flag_source(flags), {})
    assert str(caught.value).count("--budget: 3") == 1


def test_the_template_sets_nothing_describes_everything_and_shows_the_defaults(config: Path) -> None:
    text = sources.template()
    assert schema.Settings.model_validate(tomli.loads(text)) == schema.Settings()
    set_lines = [line.removeprefix("# ") if " = " in line else line for line in text.splitlines()]
    shown = schema.Settings.model_validate(tomli.loads("\n".join(set_lines)))
    assert shown.sampling == schema.Settings().sampling
    assert shown.kv.mode == "full"
    assert all(info.description and info.description in text for _, info in sources.leaves())
