"""GPU profiles: which match, what they set and how origins are shown; with a fake pynvml."""

import errno
import os

import pytest
import tomli
from support.gpu_profiles import RTX, active, gpu, own, resolved, shown
from support.message import lacks
from typer.testing import CliRunner

from kvchat import paths
from kvchat.cli import chat, main
from kvchat.cli.profile import load_settings
from kvchat.config import profiles, sources
from kvchat.config.profiles import Measured, Profile
from kvchat.doctor import installation
from kvchat.errors import UsageError
from kvchat.tui import app as application

SIZES = (4, 6, 8, 12, 16, 24, 48, 80)


# ---- which GPU -------------------------------------------------------------------------------------


def test_missing_readings_only_prevent_matches(nvml):
    nvml(RTX, missing=("nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo"))
    assert active("auto") == ()
    own("by-name.toml", '[match]\nname = "rtx 4060*"\n[sampling]\nseed = 1\n')
    assert active("auto") == ()
    nvml(RTX, missing=("nvmlDeviceGetMemoryInfo",))
    assert shown("sampling.seed").endswith("(matched: name)")


def test_cuda_visible_devices_decides_which_gpu_is_read(nvml, monkeypatch):
    nvml(RTX, gpu("H100", 79.6))

    def name(device):
        found = profiles.read_gpu(device)
        return found and found.name

    assert [name(device) for device in ("auto", "cuda:0", "cuda:1")] == [RTX.name, RTX.name, "H100"]
    assert name("cuda:5") is name("cpu") is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert [name(device) for device in ("auto", "cuda:1", "cpu")] == ["H100", RTX.name, None]


def test_a_torch_without_cuda_uses_no_gpu(nvml, monkeypatch):
    nvml(RTX)
    monkeypatch.undo()
    monkeypatch.setattr(profiles, "version", lambda package: "2.13.0+cpu")
    assert profiles.read_gpu() is None


@pytest.mark.cuda
def test_a_real_gpu_is_read():
    import torch

    found = profiles.read_gpu()
    assert found is not None
    assert found.name == torch.cuda.get_device_name(0)
    assert found.memory == pytest.approx(torch.cuda.get_device_properties(0).total_memory, rel=0.1)


# ---- which profile ---------------------------------------------------------------------------------


def test_the_bundled_profile_is_chosen_by_memory(nvml):
    names = {0.5: "4gb", 0.9: "4gb", 2.0: "4gb", 4.99: "4gb", 5.99: "6gb", 7.996: "8gb", 9.99: "8gb", 11.99: "12gb"}
    names |= {15.99: "16gb", 23.99: "24gb", 31.8: "24gb", 47.5: "48gb", 79.6: "80gb", 139.8: "80gb"}
    for memory, name in names.items():
        nvml(gpu("Some GPU", memory))
        origins = set(resolved().origins.values())
        assert origins
        assert all(o.startswith(f"profiles/{name}.toml:") and o.endswith("(matched: memory)") for o in origins), memory


@pytest.mark.parametrize(
    ("sizes", "bounded"),
    [
        ((1.0, 2.0, 4.99, 5.0, 5.99), ("speculative", "freeze", "streaming")),
        ((7.0, 10.0, 14.0, 20.0), ("freeze",)),
    ],
)
def test_small_gpus_have_budgets_for_the_other_modes(nvml, sizes, bounded):
    """Without a budget freeze holds as much as full after a prompt; a profile must match below 5 GiB too."""
    of_an_8b_model = 128 * 1024  # bytes a token: 32 layers, 8 KV heads of 128, 16 bits
    for memory in sizes:
        nvml(gpu("Some GPU", memory))
        kv = resolved().settings.kv
        assert kv.mode == "speculative"
        assert all(getattr(kv, mode).budget for mode in bounded), memory
        assert kv.freeze.budget * of_an_8b_model <= memory * 2**30 / 4


def test_the_defaults_apply_without_a_gpu(nvml):
    assert resolved().origins == {}
    nvml(RTX)
    assert resolved().settings.kv.mode == "speculative"
    cpu = sources.flag_source({"--device": ([("model", "device")], "cpu")})
    assert sources.load(cpu, {}, active).settings.kv.mode == "full"


def test_bundled_profiles_are_valid_and_contain_no_measurements():
    files = sorted(paths.bundled_profiles_dir().glob("*.toml"))
    assert {f.stem for f in files} == {f"{size}gb" for size in SIZES}
    for file in files:
        source = sources.file_source(file)
        assert sources.check(source, Profile).measured == Measured()
        lines = file.read_text().splitlines()
        assert lines[0].startswith("# ")
        for key in (key for key in source.values if key[0] != "match"):
            line = int(source.origins[key].partition(":")[2])
            assert "# " in lines[line - 1], f"{file.name}:{line} gives no reason"


@pytest.mark.parametrize(
    ("match", "holds"),
    [
        ('name = "RTX 4060"', True),
        ('name = "GeForce rtx 40*"', True),
        ('name = "RTX 4070"', False),
        ("memory = [7.5, 8.5]", True),
        ("memory = [8, 9]", False),
        ('name = ["RTX 4060", "RTX 4070"]\nmemory = [7.5, 8.5]', True),
        ('name = "RTX 4060"\nmemory = [8, 9]', False),
        ('name = "cpu"', False),
        ("", True),
    ],
)
def test_every_key_of_match_must_hold(nvml, match, holds):
    nvml(RTX)
    own("mine.toml", f"[match]\n{match}\n[sampling]\nseed = 7\n")
    assert (resolved().settings.sampling.seed == 7) == holds


def test_the_name_cpu_matches_a_machine_without_a_gpu(nvml):
    own("any.toml", "[sampling]\nseed = 7\n")
    assert resolved().settings.sampling.seed is None, "without a name, only GPUs match"
    own("mine.toml", '[match]\nname = "cpu"\n[sampling]\nseed = 8\n')
    assert shown("sampling.seed") == "sampling.seed = 8   # profiles/mine.toml:4 (matched: name)"


def test_a_name_beats_memory_and_other_sources_beat_profiles(nvml):
    nvml(gpu("NVIDIA GeForce RTX 3060 Laptop GPU", 5.99))
    own("a.toml", "[match]\nmemory = [5, 7]\n[sampling]\ntop_k = 1\nseed = 5\n")
    own("b.toml", '[match]\nname = "RTX 3060*"\n[sampling]\ntop_k = 2\nmin_p = 0.5\n[kv.speculative]\nbudget = 512\n')
    own("c.toml", '[match]\nmemory = [5, 7]\nname = "RTX 3060*"\n[sampling]\nmin_p = 0.25\n')
    assert shown("sampling.min_p") == "sampling.min_p = 0.25   # profiles/c.toml:5 (matched: name, memory)"
    assert shown("sampling.top_k") == "sampling.top_k = 2   # profiles/b.toml:4 (matched: name)"
    assert shown("sampling.seed") == "sampling.seed = 5   # profiles/a.toml:5 (matched: memory)"
    assert shown("kv.speculative.budget") == "kv.speculative.budget = 512   # profiles/b.toml:7 (matched: name)"
    assert shown("kv.streaming.budget").startswith("kv.streaming.budget = 1024   # profiles/6gb.toml:")
    paths.config_file().write_text("[sampling]\ntop_k = 3\n")
    assert shown("sampling.top_k") == "sampling.top_k = 3   # config.toml:2"
    in_variable = sources.load(environ={"KVCHAT_SAMPLING_TOP_K": "4"}, profiles=active)
    assert in_variable.origins["sampling", "top_k"] == "KVCHAT_SAMPLING_TOP_K"


def test_the_first_of_equal_profiles_is_used(nvml):
    nvml(RTX)
    own("b.toml", "[match]\nmemory = [7, 9]\n[sampling]\nseed = 2\ntop_k = 2\n")
    own("a.toml", "[match]\nmemory = [6, 9]\n[sampling]\nseed = 1\n")
    assert (resolved().settings.sampling.seed, resolved().settings.sampling.top_k) == (1, 2)


# ---- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[kv]\nmode = "frezee"', 'profiles/bad.toml:2: kv.mode: "frezee"'),
        ('[match]\nnmae = "x"', "profiles/bad.toml:2: match.nmae: "),
        ("[match]\nmemory = 8", "profiles/bad.toml:2: match.memory: 8"),
        ("[match]\nmemory = [10, 5]", "profiles/bad.toml:2: match.memory: [10, 5]"),  # it can match nothing
        ("[measured]\nread = -1", "profiles/bad.toml:2: measured.read: -1"),
        ("[kv", "profiles/bad.toml:1: "),
    ],
)
def test_invalid_profiles_are_rejected_with_their_line(nvml, text, message):
    file = own("bad.toml", text)
    with pytest.raises(UsageError) as caught:
        profiles.read_file(file, None)
    assert str(caught.value).startswith(message)
    assert str(caught.value).endswith("^")


WRONG = '[kv]\nmode = "frezee"\n'
MESSAGE = 'profiles/bad.toml:2: kv.mode: "frezee"'


def test_a_wrong_profile_is_reported_the_same_everywhere(nvml, monkeypatch):
    """It is ignored with the same message everywhere; ``validate`` fails."""
    nvml(RTX)
    own("bad.toml", WRONG)
    own("good.toml", "[match]\n[sampling]\nseed = 3\n")
    ran = CliRunner().invoke(main.app, ["config", "show"])
    assert (ran.exit_code, MESSAGE in ran.stderr, "sampling.seed = 3" in ran.stdout) == (0, True, True)
    reported: list[str] = []
    assert load_settings(problem=reported.append).settings.sampling.seed == 3
    check = installation.active_profiles("auto")
    assert (check.state, check.advice) == ("warning", reported[0])
    started = []
    monkeypatch.setattr(application, "run", lambda config: started.append(config) or 0)
    monkeypatch.setattr(chat, "_is_terminal", lambda stream: True)
    monkeypatch.setenv("TERM", "xterm")
    assert CliRunner().invoke(main.app, []).exit_code == 0
    assert (started[0].sampling.seed, started[0].load.mode) == (3, "speculative")
    assert started[0].problems == tuple(reported)
    assert started[0].profile.startswith("profiles/8gb.toml (matched: memory), profiles/good.toml (matched: any GPU)")
    assert reported[0].startswith(MESSAGE)
    refused = CliRunner().invoke(main.app, ["config", "validate"]).exception
    assert isinstance(refused, UsageError)
    assert (refused.exit_code, str(refused).startswith(MESSAGE)) == (2, True)


def test_valid_profiles_pass_config_validate(nvml, tmp_path):
    nvml(RTX)
    elsewhere = tmp_path / "mine.toml"
    elsewhere.write_text('[match]\nname = "RTX 40*"\n')
    for file in (elsewhere, own("good.toml", "[sampling]\nseed = 3\n")):
        assert CliRunner().invoke(main.app, ["config", "validate", str(file)]).stdout == f"{file}: valid\n"


# ---- kvchat profile --------------------------------------------------------------------------------


def run(*words: str) -> list[str]:
    ran = CliRunner().invoke(main.app, words)
    assert ran.exit_code == 0, ran.exception
    return ran.stdout.splitlines()


def test_commands_show_active_profiles_and_what_they_set(nvml):
    nvml(RTX)
    own("mine.toml", "[match]\n[sampling]\nseed = 3\n")
    marked = [line.split()[1] for line in run("profile", "list") if line.startswith("●")]
    assert marked == ["profiles/8gb.toml", "profiles/mine.toml"]
    shown = run("config", "show")
    assert shown[0] == "# profiles: profiles/8gb.toml (matched: memory), profiles/mine.toml (matched: any GPU)"
    assert 'kv.mode = "speculative"   # profiles/8gb.toml:6 (matched: memory)' in shown
    assert "sampling.seed = 3   # profiles/mine.toml:3 (matched: any GPU)" in shown


def test_invalid_and_missing_devices_are_rejected(nvml):
    listed = ("profile", "list")

    def refusal(name):
        return str(CliRunner().invoke(main.app, [*listed, "--device", name]).exception)

    for name in ("xyz", "cuda:", "cuda:x", "cpu:0"):
        assert not lacks(refusal(name), f'"{name}"', "auto, cpu, cuda")
    for name in ("cuda", "cuda:0"):
        assert not lacks(refusal(name), f'"{name}"', "GPU")
    nvml(RTX)
    assert '"cuda:77"' in refusal("cuda:77")
    assert run(*listed, "--device", "cuda") == run(*listed, "--device", "cuda:0") == run(*listed)


# ---- Wrong profiles are all reported at once


def test_all_wrong_profiles_are_reported_at_once():
    own("a.toml", '[kv]\nmode = "frezee"\n')
    own("b.toml", "[measured]\nread = -1\n")
    good = own("c.toml", "[sampling]\nseed = 3\n")
    ran = CliRunner().invoke(main.app, ["config", "validate"])
    assert isinstance(ran.exception, UsageError)
    assert not lacks(ran.exception, 'profiles/a.toml:2: kv.mode: "frezee"', "profiles/b.toml:2: measured.read: -1")
    assert ran.stdout.splitlines()[-1] == f"{good}: valid"


# ---- Measured rates, saved in a profile of this GPU


def test_measurements_apply_only_to_their_own_gpu(nvml):
    nvml(RTX)
    measured = Measured(read=250.0, to_device=11.5, gather=11.0, kvchat="0.1.0")
    file = profiles.save(measured)
    assert file == paths.user_profiles_dir() / "rtx-4060-8gb.toml"
    assert profiles.find("auto").measured == measured
    assert profiles.find("cpu").measured == Measured()
    load = chat.load_of(resolved().settings)
    assert (load.link_bytes_per_s, load.read_bytes_per_s) == (11e9, 250e9)
    nvml(gpu("NVIDIA GeForce RTX 4060 Ti", 7.996))
    assert profiles.find("auto").measured == Measured()


@pytest.mark.parametrize(
    ("measured", "rate"),
    [
        (Measured(to_device=50.0, gather=40.0), 40e9),
        (Measured(to_device=50.0), 50e9),
        (Measured(read=3000.0, to_host=50.0), None),
    ],
)
def test_the_link_rate_comes_from_recall_or_a_copy(measured, rate):
    assert measured.link_bytes_per_s == rate


def test_saving_again_keeps_settings_and_comments(nvml):
    nvml(RTX)
    file = profiles.save(Measured(read=1.0, to_host=3.0))
    file.write_text(file.read_text() + "\n[kv]  # mine\nmode = 'streaming'\n")
    profiles.save(Measured(read=2.0))
    written = tomli.loads(file.read_text())
    assert written["measured"] == {"read": 2.0}
    assert "[kv]  # mine" in file.read_text()
    assert 'kv.mode = "streaming"   # profiles/rtx-4060-8gb.toml:' in shown("kv.mode")


def test_saving_measurements_changes_no_settings(nvml):
    """A profile of measurements applies together with the user's, although its match has more keys."""
    own("mine.toml", '[match]\nname = "cpu"\n[kv]\nmode = "streaming"\n[kv.streaming]\nbudget = 300\n')
    before = resolved()
    profiles.save(Measured(read=9.0, kvchat="0.1.0"))
    assert resolved() == before
    assert profiles.find("auto").measured.read == 9.0
    assert not profiles.find("auto").problems
    measured = "measured.read = 9.0   # profiles/cpu.toml:5 (matched: name)"
    config = CliRunner().invoke(main.app, ["config", "show"]).stdout.splitlines()
    assert config[0].endswith("profiles/mine.toml (matched: name), profiles/cpu.toml (matched: name)")
    assert config[1] == f"# {measured}"
    assert 'kv.mode = "streaming"   # profiles/mine.toml:4 (matched: name)' in config


def test_all_measurements_come_from_one_profile(nvml):
    """Rates of two measurements do not belong together."""
    own("mine.toml", '[match]\nname = "cpu"\n[measured]\nread = 5.0\nto_host = 3.0\n[sampling]\nseed = 3\n')
    profiles.save(Measured(read=9.0))
    assert profiles.find("auto").measured == Measured(read=9.0)
    assert resolved().settings.sampling.seed == 3


def test_a_full_disk_leaves_the_old_profile(nvml, request):
    file = profiles.save(Measured(read=9.0))
    request.getfixturevalue("full_disk")
    with pytest.raises(UsageError, match=rf"cpu\.toml.*{os.strerror(errno.ENOSPC)}"):
        profiles.save(Measured(read=1.0))
    assert profiles.find("auto").measured.read == 9.0
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_saving_into_invalid_toml_is_rejected(nvml):
    own("cpu.toml", "[kv")
    with pytest.raises(UsageError, match=r"cpu\.toml"):
        profiles.save(Measured(read=9.0))
