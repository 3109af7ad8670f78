"""Calibrations of a model's KV heads: how they are measured and saved, and what happens without one."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.grids import WHOLE
from support.loads import load_in
from typer.testing import CliRunner, Result

from kvchat import paths
from kvchat.cli.main import app
from kvchat.engine import calibration
from kvchat.engine.calibration import Recorder, Sample, find, load, representatives, samples_of, save
from kvchat.engine.session import Session
from kvchat.engine.synthetic_text import sentences
from kvchat.errors import UsageError
from kvchat.kv import inspect
from kvchat.kv.attention import AttentionSpec
from kvchat.models import attention_hook
from kvchat.models.load import LoadedModel
from kvchat.protocol.messages import Prefilled, Preparing, Sampling, Text, Turn

SPEC = AttentionSpec(1.0)
HEAD = '"revision": "r", "measured_on": "", "clusters": '
CHOICE = '{"measured_on": "", "covered": 1.0, "budget": %d}'
DAMAGED = (
    *("", "{", "[]", "{}", '{"similarity": [[[1]]], "retrieval": [[1]], "what": 1}'),
    "{" + HEAD + '1, "similarity": [1], "retrieval": [1]}',
    "{" + HEAD + '1, "similarity": [[[1]]], "retrieval": [[1]], "choice": {"budget": 256}}',
    "{" + HEAD + f'1, "similarity": [[[1]]], "retrieval": [[1]], "choice": {CHOICE % 0}' + "}",
)


def fake(kv_heads: int = 3, **more) -> LoadedModel:
    return SimpleNamespace(layers=1, kv_heads=kv_heads, device=torch.device("cpu"), revision="r", **more)


# ---- measuring


def test_similarity_and_retrieval_follow_the_attention_weights():
    """Heads 0 and 1 attend to the latest tokens, head 2 to the first, and to the source while it is repeated."""
    n, run, at = 400, 20, 50
    sample = Sample([0] * n, (at, at + run))
    late = 0.1 * torch.arange(n, dtype=torch.float32).expand(n, n)
    early = -late.clone()
    early[-run - 1 : -1, at : at + run] = 50.0
    recorder = Recorder(fake())
    recorder._sample, recorder._read = sample, 1
    keys = torch.eye(n).expand(3, n, n)
    recorder.attention(0, torch.stack([late, late, early]), keys, torch.randn(3, n, 8), SPEC)
    similarity, retrieval = recorder.means()
    assert torch.allclose(similarity[0].diagonal(), torch.ones(3, dtype=torch.float64))
    assert float(similarity[0, 0, 1]) == 1
    assert float(similarity[0, 0, 2]) < 0.05
    assert torch.equal(similarity[0], similarity[0].T)
    assert retrieval[0].tolist() == pytest.approx([0, 0, 1], abs=1e-3)


def test_recorder_attends_as_the_model_does(model):
    """The attention weights of a layer depend on what the layers before it computed."""
    ids = torch.tensor(samples_of(model.tokenizer.encode(" ".join(next(sentences(1)) for _ in range(90))))[0].ids)
    recorder = Recorder(model)
    recorder._sample = Sample(ids.tolist(), (10, 20))
    positions = torch.arange(len(ids))
    mine = attention_hook.forward(model.model, ids, positions, recorder, logits=True)
    session = Session(model)
    torch.testing.assert_close(mine, session.prefill(ids.tolist()), atol=2e-3, rtol=0)


def test_samples_repeat_their_source_at_the_end():
    samples = samples_of(list(range(1500)))
    assert [len(s.ids) for s in samples] == [512 + 48, 512 + 48, 476 + 48]
    for sample in samples:
        first, last = sample.source
        assert sample.ids[first:last] == sample.ids[-sample.run :]


def test_unusable_calibration_input_is_refused(model, tmp_path):
    (tmp_path / "short.txt").write_text("Too short.")
    with pytest.raises(UsageError, match="too short to calibrate"):
        calibration.calibrate(model, calibration.file_samples(model, [tmp_path / "short.txt"]), "x")
    with pytest.raises(UsageError, match=r"none\.txt"):
        calibration.file_samples(model, [tmp_path / "none.txt"])
    with pytest.raises(UsageError, match="5 clusters are not possible"):
        calibration.calibrate(model, samples_of(list(range(600))), "x", clusters=5)


@pytest.mark.skipif(not WHOLE, reason="KVCHAT_TEST_GRIDS is not set")
@pytest.mark.slow("the bundled model is calibrated")
def test_the_shipped_calibration_is_reproducible(bundled):
    shipped = find(bundled.revision)
    assert shipped is not None
    measured = calibration.calibrate(bundled, calibration.default_samples(bundled), shipped.measured_on)
    for name in ("similarity", "retrieval"):
        torch.testing.assert_close(
            torch.tensor(getattr(measured, name)), torch.tensor(getattr(shipped, name)), atol=5e-3, rtol=0
        )
    assert measured.clusters == shipped.clusters == 1
    assert shipped.choice is not None
    assert (shipped.choice.params, shipped.choice.covered) == (
        {"budget": 256, "index": "bits2"},
        pytest.approx(0.964, abs=2e-3),
    )
    # One KV head each of layers 4, 5 and 6 carries the retrieval of the bundled model.
    assert [representatives(measured, "retrieval")[layer] for layer in (4, 5)] == [(2,), (3,)]


# ---- saving


def test_saved_calibration_precedes_the_shipped_one(bundled):
    shipped = find(bundled.revision)
    assert shipped is not None
    assert shipped.revision == bundled.revision
    own = calibration.Calibration(bundled.revision, "my text", 2, shipped.similarity, shipped.retrieval)
    assert save(own).parent == paths.calibration_dir()
    assert find(bundled.revision) == own
    assert find("another") is None


def test_unreadable_file_falls_back_to_the_shipped_calibration(bundled, monkeypatch):
    file, problems = paths.calibration_dir() / f"{bundled.revision}.json", []
    shipped = load(paths.bundled_calibration_dir() / file.name)
    file.parent.mkdir(parents=True)
    for text in DAMAGED:
        file.write_text(text)
        with pytest.raises(UsageError, match=file.name):
            load(file)
        assert find(bundled.revision, problems.append) == shipped, text
        assert str(file) in str(problems.pop())
    session = Session(bundled, load_in("sync"))
    assert [str(file) in note for note in session.info.notes if "calibration" in note] == [True]
    assert "".join(session.chat("Hello.", Sampling(max_new_tokens=4)))
    file.unlink()
    os.mkfifo(file)
    assert find(bundled.revision, problems.append) == shipped
    monkeypatch.setattr(paths, "calibration_dir", lambda: file.parent / ("n" * 300))  # as for a folder without access
    assert find(bundled.revision, problems.append) == shipped
    assert [str(file.name) in str(problem) for problem in problems] == [True, True]


def test_full_disk_keeps_the_old_calibration(bundled, request):
    shipped = find(bundled.revision)
    file = save(shipped)
    request.getfixturevalue("full_disk")
    with pytest.raises(UsageError, match="cannot be written"):
        save(replace(shipped, measured_on="other text"))
    assert load(file) == shipped
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_unwritable_folder_is_refused(bundled, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        save(find(bundled.revision), tmp_path / "file" / "x.json")


# ---- without a calibration


def test_uncalibrated_model_is_measured_on_its_first_long_prompt(bundled, monkeypatch):
    monkeypatch.setattr(paths, "bundled_calibration_dir", lambda: Path("nowhere"))
    session = Session(bundled, load_in("sync", {"budget": 132}))
    assert any("kvchat calibrate bundled" in note for note in session.info.notes)
    list(session.answer([Turn("user", "Hi.")], Sampling(temperature=0, max_new_tokens=2)))
    assert "long prompt" in session.snapshot().extras["representative heads"]
    assert bool(session.attended(0).all())
    text = " ".join(sentence for _, sentence in zip(range(60), sentences(5), strict=False))
    events = list(session.answer([Turn("user", text)], Sampling(temperature=0, max_new_tokens=2)))
    kinds = [type(event) for event in events]
    assert max(i for i, kind in enumerate(kinds) if kind is Prefilled) < kinds.index(Preparing) < kinds.index(Text)
    extras = session.snapshot().extras
    assert not any("kvchat calibrate" in note for note in session.info.notes)
    assert extras["measured on"].startswith("this prompt")
    assert len(extras["representative heads"].split()) == 8
    assert not bool(session.attended(0).all())


def test_switching_to_sync_measures_on_stored_tokens(model, monkeypatch):
    monkeypatch.setattr(paths, "bundled_calibration_dir", lambda: Path("nowhere"))
    session = Session(model)
    session.prefill([7, 8, 9] * 200)
    assert session.switch("sync", budget=132).params["clusters"] == 1
    assert session.snapshot().extras["measured on"].startswith("this prompt")
    session.step(7)
    assert not bool(session.attended(0).all())


def attend_to_last(monkeypatch, tokens: int) -> None:
    """Let every head attend equally to the last ``tokens`` tokens, and to nothing else."""

    def attention_shares(state, layer):
        shares = torch.zeros(state.geometry.kv_heads, state.total)
        shares[:, -tokens:] = 1 / tokens
        return shares

    monkeypatch.setattr(inspect, "attention_shares", attention_shares)


def test_speculative_mode_measures_the_budget_attention_needs(model, monkeypatch):
    """At the first 1,024 tokens and at each doubling; the budget is only raised, and a given one stays."""
    session = Session(model, load_in("speculative"))
    attend_to_last(monkeypatch, 100)
    session.prefill([7, 8, 9] * 300)
    assert "measured on" not in session.snapshot().extras
    session.prefill([7, 8, 9] * 50)
    assert session.snapshot().extras["measured on"] == "1,050 stored tokens"
    assert (session.info.params["budget"], session.snapshot().extras["expected to cover"]) == (512, "97 %")
    attend_to_last(monkeypatch, 1000)
    session.prefill([7, 8, 9] * 300)
    assert session.info.params["budget"] == 512
    session.prefill([7, 8, 9] * 60)
    assert session.info.params["budget"] == 1024
    assert session.snapshot().extras["measured on"] == "2,130 stored tokens"
    attend_to_last(monkeypatch, 10)
    session.prefill([7, 8, 9] * 800)
    assert session.info.params["budget"] == 1024
    assert session.switch("speculative", budget=300).params["budget"] == 300
    assert "measured on" not in session.snapshot().extras


@pytest.mark.parametrize("given", [{"window": 300}, {"sink": 300}, {"index": "bits4"}])
def test_measured_budget_is_ignored_if_a_part_is_given(model, monkeypatch, given):
    session = Session(replace(model, context=32_768), load_in("speculative", given))
    attend_to_last(monkeypatch, 10)
    session.prefill([7, 8, 9] * 400)
    assert (session.info.params["budget"], session.info.params | given) == (1024, session.info.params)


@pytest.mark.parametrize(
    ("windows", "sampled"), [("-64-6-", [3, 5]), ("666666", [0, 1, 2, 3, 4, 5]), ("-" * 40, [*range(1, 40, 5)])]
)
def test_layers_without_a_window_are_sampled_at_all_depths(windows, sampled):
    specs = [AttentionSpec(1.0, window=None if one == "-" else int(one)) for one in windows]
    state = SimpleNamespace(specs=specs, total=10, geometry=SimpleNamespace(layers=len(specs)))
    assert inspect._looked_at(state) == sampled


def test_attention_to_everything_gets_the_largest_budget(model, monkeypatch):
    session = Session(model, load_in("speculative"))
    attend_to_last(monkeypatch, 3000)
    session.prefill([7, 8, 9] * 1000)
    assert session.info.params["budget"] == 2048
    assert session.snapshot().extras["expected to cover"] == f"{100 * (2048 / 3000 - 0.03):.0f} %"


# ---- the command


def calibrate(*options: str) -> Result:
    return CliRunner().invoke(app, ["calibrate", "bundled", "--device", "cpu", *options], catch_exceptions=False)


def test_command_saves_what_it_measured(model, monkeypatch, tmp_path):
    monkeypatch.setattr("kvchat.models.load.load_model", lambda *args: model)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(sentence for _, sentence in zip(range(60), sentences(2), strict=False)))
    for name, less in (("CONTEXT", 600), ("STEPS", 4), ("FACTS", 1)):
        monkeypatch.setattr(f"kvchat.cli.models.{name}", less)
    printed = calibrate("--text", str(text), "--clusters", "2", "--out", str(tmp_path / "out.json"))
    assert printed.stdout.count("representative KV heads") == model.layers
    choice = load(tmp_path / "out.json").choice
    assert f"covers {choice.covered:.1%} of the attention" in printed.stdout
    assert "calibrations" in printed.stderr
    saved = json.loads((tmp_path / "out.json").read_text())
    assert (saved["clusters"], saved["revision"]) == (2, model.revision)
    assert "text.txt" in saved["measured_on"]


def test_missing_output_folder_is_refused_before_loading(monkeypatch, tmp_path):
    monkeypatch.setattr("kvchat.models.load.load_model", lambda *args: pytest.fail("loaded"))
    with pytest.raises(UsageError, match="nope"):
        calibrate("--out", str(tmp_path / "nope" / "out.json"))
    assert not (tmp_path / "nope").exists()


@pytest.mark.parametrize(("clusters", "rule"), [(2, "best"), (0, "retrieval")])
def test_invalid_options_are_refused_before_loading(clusters, rule, monkeypatch):
    monkeypatch.setattr("kvchat.models.load.load_model", lambda *args: pytest.fail("loaded"))
    with pytest.raises(UsageError):
        calibrate("--clusters", str(clusters), "--representatives", rule)
