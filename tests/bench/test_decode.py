"""The decode benchmark end to end on a tiny shape: rows, bytes, change rates, baselines, the profile."""

import json
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from kvchat import paths
from kvchat.bench import decode, timing
from kvchat.bench.decoding import ModeRun
from kvchat.bench.frame import Frame, ModelChoice
from kvchat.bench.report import line
from kvchat.bench.settings import Decode
from kvchat.bench.timing import Timing
from kvchat.cli.main import app
from kvchat.config import profiles
from kvchat.config.profiles import Measured
from kvchat.errors import UsageError

MODES = ("full", "streaming", "speculative", "freeze", "sync")


@pytest.fixture(autouse=True)
def quick_roofline(monkeypatch):
    """Skip measuring rates, which has its own tests."""
    found = Measured(read=10.0, gather=2.0, kvchat="x", torch="y")
    monkeypatch.setattr(decode, "measure", lambda device, dtype: found)


def settings(**changes):
    standard = {"shape": "tiny", "contexts": (700,), "budget": 256, "steps": 4, "rounds": 2, "baselines": ("dynamic",)}
    return Decode(**{**standard, **changes})


# ---- rows ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(decode, "measure", lambda device, dtype: Measured(read=10.0, gather=2.0))
        return decode.run(settings(modes=MODES, contexts=(400, 700), change_rates=("natural", "0.5")))


def test_results_are_json_with_a_row_per_variant(result):
    assert json.loads(json.dumps(result)) == json.loads(json.dumps(result, default=str))
    names = ["dynamic", "full", "streaming", *["speculative"] * 3, "freeze", "sync"]
    assert [(row["context"], row["variant"]) for row in result["rows"]] == [(c, n) for c in (400, 700) for n in names]
    assert [row.get("change_rate") for row in result["rows"][:8]] == [
        None, "natural", "natural", "natural", 0.0, 0.5, "natural", "natural",
    ]  # fmt: skip
    assert not [row["failed"] for row in result["rows"] if "failed" in row]
    assert {"processor", "torch", "transformers", "triton", "driver"} <= result["environment"].keys()


def test_figures_follow_from_the_times(result):
    for row in result["rows"]:
        assert row["tokens_per_s"] == pytest.approx(1000 / row["ms"])
        assert row["times_floor"] == pytest.approx(row["ms"] / result["floor_ms"])
        if row["variant"] == "dynamic":
            assert row["times_as_fast"] == {"dynamic": 1.0}


def test_device_bytes_match_the_prediction(result):
    of_modes = [row for row in result["rows"] if "change_rate" in row]
    for row in of_modes:
        assert row["kv_device_bytes"] == pytest.approx(row["kv_predicted_bytes"], rel=0.01), row["variant"]
    shares = {row["variant"]: row["kv_device_bytes"] / row["kv_host_bytes"] for row in of_modes}
    assert max(shares["streaming"], shares["speculative"]) < 1


def test_the_floor_is_the_time_to_read_the_weights(tiny_shape):
    table = tiny_shape.model.get_input_embeddings().weight
    read = tiny_shape.weight_bytes - table.nbytes
    assert decode.floor_ms(tiny_shape, Measured(read=2.0)) == pytest.approx(read / 2e9 * 1000)
    assert decode.floor_ms(tiny_shape, Measured()) is None


def fake_rounds(monkeypatch, ms):
    """Let a round take the ``ms`` of its change rate and move 2 MB."""

    def measure(self, tokens):
        self.figures = {"moved_bytes": 2e6, "corrections": 0}
        return Timing(ms[self.change_rate], 0.0)

    monkeypatch.setattr(ModeRun, "measure", measure)


def test_hidden_recall_is_link_time_minus_exposed_time(tiny_shape, monkeypatch):
    fake_rounds(monkeypatch, {None: 10.0, 0.0: 9.0, 0.5: 9.25})
    rows = decode.run(settings(modes=("speculative",), baselines=(), change_rates=("natural", "0.5")))["rows"]
    natural, still, half = rows
    assert (half["recall_ms"], half["exposed_ms"], half["hidden_ms"]) == (1.0, 0.25, 0.75)
    assert (natural["exposed_ms"], natural["hidden_ms"]) == (1.0, 0.0)
    assert still["exposed_ms"] is None


def test_full_with_resident_is_bounded_by_the_link(tiny_shape, monkeypatch):
    monkeypatch.setattr(decode, "_without_spilled", lambda settings, model, report: settings)
    monkeypatch.setattr(decode, "measure", lambda device, dtype: Measured(read=10.0, to_device=4.0))
    fake_rounds(monkeypatch, {None: 3.0})
    full, spilled = decode.run(settings(modes=("full", "full:resident=256"), baselines=()))["rows"]
    assert "link_ms" not in full
    assert spilled["link_ms"] == 0.5
    assert "at least 0.50 ms over the link" in line(spilled)


def test_unified_memory_leaves_out_variants_that_need_a_link(tiny_shape):
    lines = []
    chosen = settings(modes=("full", "full:resident=256"), baselines=(), contexts=(300,), rounds=1)
    rows = decode.run(chosen, frame=Frame(report=lines.append))["rows"]
    assert [row["variant"] for row in rows] == ["full"]
    assert any("full:resident=256 left out." in line for line in lines)
    with pytest.raises(UsageError, match="cannot be measured here"):
        decode.run(settings(modes=("full:resident=256",)))


def test_every_variant_is_measured_again_under_load():
    result = decode.run(settings(modes=("full",), load=1))
    assert 0 < result["fair_share"] <= 1
    for row in result["rows"]:
        assert row["wall_ms_beside"] > 0
        assert row["kept"] > 0
        assert row["ms_spread"][0] <= row["ms"] <= row["ms_spread"][1]
    assert "of its speed under load" in line(result["rows"][0])


def test_modes_adapt_to_a_changed_load_before_measuring(monkeypatch):
    """Modes adapt their threads to the load, but sample it only while they decode."""
    now = {"load": False, "seen": None}

    @contextmanager
    def busy(processes):
        now["load"] = True
        yield
        now["load"] = False

    def measure(self, tokens):
        settled = now["seen"] in (None, now["load"])  # the first time there is nothing to adapt to
        now["seen"], self.figures = now["load"], {"moved_bytes": 0}
        return Timing(1.0, (4.0 if now["load"] else 2.0) if settled else 100.0)

    monkeypatch.setattr(timing, "keep_busy", busy)
    monkeypatch.setattr(decode, "SETTLED_S", 0.001)
    monkeypatch.setattr(ModeRun, "measure", measure)
    rows = decode.run(settings(modes=("full", "streaming"), baselines=(), rounds=3, load=2))["rows"]
    assert [(row["wall_ms"], row["wall_ms_beside"], row["kept"]) for row in rows] == [(2.0, 4.0, 0.5)] * 2


def test_failed_variants_become_rows_with_the_reason():
    names = ("offloaded", "dynamic")
    chosen = settings(modes=("streaming", "speculative"), change_rates=("1",), baselines=names, contexts=(300,))
    rows = decode.run(chosen)["rows"]
    assert "needs a GPU" in rows[0]["failed"]
    assert rows[1]["times_as_fast"] == {"dynamic": 1.0}
    assert rows[2]["ms"] > 0
    assert [("failed" in row, row["change_rate"]) for row in rows[3:]] == [(False, 0.0), (True, 1.0)]
    assert "longer context" in rows[4]["failed"]
    assert rows[4]["failed"] in line(rows[4])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": "llama-3.1-8"}, 'Did you mean "llama-3.1-8b"'),
        ({"baselines": ("dynamc",)}, 'Did you mean "dynamic"'),
        ({"change_rates": ("2",)}, 'change rate "2"'),
        ({"change_rates": ("half",)}, 'change rate "half"'),
    ],
)
def test_invalid_settings_are_rejected(changes, message):
    with pytest.raises(UsageError, match=message):
        decode.run(settings(**changes))


def test_a_real_model_is_compared_with_generate():
    rows = decode.run(settings(shape="", modes=("full",), contexts=(96,), rounds=1, baselines=("generate",)))["rows"]
    assert [row["variant"] for row in rows] == ["generate", "full"]
    assert rows[1]["times_as_fast"]["generate"] > 0


def test_random_weights_can_prefill_a_prompt():
    rows = decode.run(settings(modes=("speculative:unit=page",), baselines=(), rounds=1, prefill=True))["rows"]
    assert rows[0]["ms"] > 0
    assert 0 <= rows[0]["changed"] <= 1


@pytest.mark.cuda
@pytest.mark.slow("measures every baseline and mode")
def test_all_baselines_and_modes_run_on_a_gpu():
    chosen = settings(
        contexts=(2048,), modes=MODES, change_rates=("natural", "0.25", "1"),
        baselines=("dynamic", "static", "offloaded"), steps=8,
    )  # fmt: skip
    result = decode.run(chosen, ModelChoice(device="cuda", dtype="bfloat16"))
    assert not {row["variant"]: row["failed"] for row in result["rows"] if "failed" in row}
    assert not {row["variant"]: row["not_captured"] for row in result["rows"] if row.get("not_captured")}


# ---- the command -----------------------------------------------------------------------------------


def test_the_command_writes_json_and_profile(tmp_path, monkeypatch):
    monkeypatch.setattr(profiles, "read_gpu", lambda device="auto": None)
    out = tmp_path / "result.json"
    options = (
        "--shape tiny --mode speculative:tau=-2 --context 500 --rounds 1 --steps 3 --change-rate 0.5 --budget 256 "
        "--baselines dynamic,offloaded --json --save-profile --out"
    )
    ran = CliRunner().invoke(app, ["bench", "decode", *options.split(), str(out)])
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout) == json.loads(out.read_text())
    assert [row["variant"] for row in json.loads(ran.stdout)["rows"]] == [
        "dynamic", "offloaded", "speculative:tau=-2", "speculative:tau=-2",
    ]  # fmt: skip
    assert profiles.find("auto").measured.read == 10.0
    assert str(paths.user_profiles_dir() / "cpu.toml") in ran.stderr
