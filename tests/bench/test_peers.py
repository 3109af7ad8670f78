"""The peers benchmark: how figures are computed, and real processes that answer or say why they cannot."""

import itertools
import re
from typing import Any, ClassVar

import pytest
import torch
from support.gguf_files import write_model
from support.shape_runner import filled
from typer.testing import CliRunner

from kvchat.bench import peers
from kvchat.bench.decoding import prose
from kvchat.bench.external import baselines
from kvchat.bench.external.baselines import LlamaCpp, PeerProcess
from kvchat.bench.frame import Frame, ModelChoice, parsed
from kvchat.bench.report import rendered
from kvchat.bench.settings import Peers
from kvchat.cli.bench import app
from kvchat.engine.runner import geometry_of, traits_of
from kvchat.errors import UsageError
from kvchat.kv.modes import build
from kvchat.models.load import load_model
from kvchat.protocol.messages import Load

SHORT = Peers(
    ("full", "streaming:budget=512"), contexts=(64, 0), peers=("xllamacpp", "transformers"), steps=3, rounds=2
)
STEP_S = {"llama.cpp": 0.02, "kvchat full": 0.01, "kvchat streaming:budget=512": 0.005}


class FakeProcess:
    """Prefills 1,000 tokens per second and decodes at its peer's pace; transformers refuses."""

    started: ClassVar[list[tuple[Any, ...]]] = []
    closed: ClassVar[list[str]] = []
    loading_s = 0.25
    peak_bytes = 2**20

    def __init__(self, *start: Any) -> None:
        self.started.append(start)
        self.name = start[1]
        if self.name == "transformers":
            raise UsageError("transformers ended.", "no such architecture")

    def decode(self, prompt, count):
        stamps = [7 + len(prompt) / 1000 + number * STEP_S[self.name] for number in range(count)]
        return {"began": 7.0, "stamps": stamps, "text": ""}

    def close(self):
        self.closed.append(self.name)


@pytest.fixture
def processes(monkeypatch):
    monkeypatch.setattr(peers, "PeerProcess", FakeProcess)
    monkeypatch.setattr(peers, "refuse_llama_cpp", lambda model: None)
    monkeypatch.setattr(peers, "find_spec", lambda name: name != "llama_cpp")
    monkeypatch.setattr(peers, "version", lambda package: f"{package} 1")
    monkeypatch.setattr(baselines, "write", lambda model, file: None)
    monkeypatch.setattr(FakeProcess, "started", [])
    monkeypatch.setattr(FakeProcess, "closed", [])


@pytest.fixture
def result(processes):
    return peers.run(SHORT, ModelChoice(device="cpu", quantize="auto"), Frame())


def test_each_context_and_peer_has_a_row_of_timings(result):
    longest = result["settings"]["contexts"][-1]
    assert longest == 16_384 - 3 - 3 - 1  # leaves room in the context for the decoded tokens
    names = ["llama.cpp", "transformers", "kvchat full", "kvchat streaming:budget=512"]
    assert [(row["context"], row["variant"]) for row in result["rows"]] == [*itertools.product((64, longest), names)]
    for row in result["rows"]:
        if row["variant"] == "transformers":
            assert "no such architecture" in row["failed"]
            continue
        assert row["ms"] == pytest.approx(1000 * STEP_S[row["variant"]])
        assert row["times_as_fast"] == {"llama.cpp": pytest.approx(0.02 / STEP_S[row["variant"]])}
        assert row["prompt_tokens_per_s"] == pytest.approx(1000)
        assert row["first_token_s"] == pytest.approx(row["ready_s"] + peers.SHORT / 1000)
        assert (row["loading_s"], row["peak_bytes"]) == (0.25, 2**20)
    assert result["peers"] == {"xllamacpp": "xllamacpp 1", "transformers": "transformers 1"}


def test_peers_take_turns_in_separate_processes_that_are_closed(result):
    names = [start[1] for start in FakeProcess.started]
    running = ["llama.cpp", "kvchat full", "kvchat streaming:budget=512"]
    # A peer that failed is not tried again at the same context.
    assert names == [*["llama.cpp", "transformers", *running[1:], *running] * 2]
    assert FakeProcess.closed == [name for name in names if name != "transformers"]
    streaming = next(start for start in FakeProcess.started if start[1].endswith("512"))
    assert streaming[0] == "kvchat"
    assert streaming[2:] == ("bundled", 71, {"dtype": "auto", "quantize": "auto", "mode": "streaming", "budget": 512})


def test_a_model_llama_cpp_cannot_read_is_compared_without_it(processes, monkeypatch):
    def refuse(model, file):
        raise UsageError("It cannot be copied to GGUF.", "Only others are copied.")

    monkeypatch.setattr(baselines, "write", refuse)
    lines = []
    found = peers.run(SHORT, ModelChoice(device="cpu"), Frame(report=lines.append))
    assert {start[0] for start in FakeProcess.started} == {"transformers", "kvchat"}
    assert found["settings"]["peers"] == ["transformers"]
    assert any("xllamacpp" in line and "Only others are copied." in line for line in lines)


def test_the_table_has_a_line_per_row(result):
    text = rendered([result])
    assert text.count("| kvchat streaming, budget=512 |") == 2
    assert "2.00" in text
    assert "4.00" in text


def test_unknown_peers_are_rejected_before_loading(monkeypatch):
    monkeypatch.setattr(ModelChoice, "load", lambda self, report: pytest.fail("loaded"))
    with pytest.raises(UsageError, match='Did you mean "xllamacpp"'):
        CliRunner().invoke(app, ["peers", "--peers", "xllamacp"], catch_exceptions=False)


def test_weights_keep_the_files_quantization_unless_overridden(monkeypatch):
    seen = []
    monkeypatch.setattr(peers, "run", lambda settings, choice, frame: seen.append((settings, choice)) or 1 / 0)
    CliRunner().invoke(app, ["peers", "--context", "0", "--peers", "none", "--steps", "9"])
    CliRunner().invoke(app, ["peers", "--quantize", "none"])
    (settings, choice), (_, other) = seen
    assert (settings.contexts, settings.peers, settings.steps, choice.quantize) == ((0,), (), 9, "auto")
    assert settings.modes == ("full", "streaming:budget=512", "speculative:budget=512")
    assert other.quantize == "none"


def test_peer_errors_quote_the_peer():
    with pytest.raises(UsageError, match=r"llama.cpp ended.*KeyError: 'none'"):
        PeerProcess("none", "llama.cpp", "a.gguf", 100, {})


@pytest.mark.slow("each peer loads a model")
def test_every_installed_peer_answers(bundled, tmp_path):
    pytest.importorskip("xllamacpp")
    file = tmp_path / "bundled.gguf"
    write_model(file, bundled)
    settings = Peers(("full",), contexts=(64,), peers=("xllamacpp", "transformers"), steps=2, rounds=1)
    rows = peers.run(settings, ModelChoice(str(file), device="cpu", quantize="auto"))["rows"]
    assert [row["variant"] for row in rows if "failed" not in row] == ["llama.cpp", "transformers", "kvchat full"]
    for row in rows:
        assert row["first_token_s"] > row["ready_s"] > row["loading_s"] > 0
        assert row["ms"] > 0


# ---- Baselines: transformers' caches continue from the stored context, and the model runs unmodified


@pytest.mark.parametrize("name", ["dynamic", "static"])
def test_baselines_continue_from_the_stored_context(tiny_shape, name):
    """After the same tokens their logits equal full mode's."""
    runner = filled(tiny_shape, build(parsed("full", 0), geometry_of(tiny_shape), traits_of(tiny_shape)), 130)
    ids = [0] * 130
    baseline = baselines.BASELINES[name](tiny_shape, runner.kv.state, ids, spare=8)
    seen = []
    forward = baseline._forward
    baseline._forward = lambda: seen.append(forward()[0, -1].float()) or seen[-1]
    for _ in range(2):  # each round is rewound
        baseline.measure([5, 6, 7, 8, 9])
    ours = [runner.step(token) for token in (5, 6, 7, 8, 9)]
    for round_ in (seen[:5], seen[5:]):
        torch.testing.assert_close(torch.stack(round_), torch.stack(ours), atol=1e-4, rtol=1e-3)
    assert baseline.kv_device_bytes >= 130 * runner.kv.state.geometry.token_bytes


def test_baselines_run_the_original_forward_and_attention(tiny_shape):
    layer = tiny_shape.model.model.layers[0]
    swapped = lambda *args, **kwargs: None  # noqa: E731
    layer.forward = swapped
    try:
        with baselines.as_written(tiny_shape.model):
            assert "forward" not in layer.__dict__
            assert tiny_shape.model.config._attn_implementation == "sdpa"
        assert layer.forward is swapped
        assert tiny_shape.model.config._attn_implementation == "kvchat"
    finally:
        del layer.forward


def test_cpu_baselines_copy_weights_to_ordinary_memory(bundled):
    """kvchat's weights are contiguous in huge pages, which no user of transformers has."""
    plain = baselines.in_ordinary_memory(bundled)
    ours, theirs = dict(bundled.model.named_parameters()), dict(plain.model.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(weight, ours[name]) for name, weight in theirs.items())
    storages = {weight.untyped_storage().data_ptr() for weight in theirs.values()}
    assert len(storages) == len(theirs)
    assert not storages & {weight.untyped_storage().data_ptr() for weight in ours.values()}
    ids = torch.tensor([[3, 4, 5]])
    with baselines.as_written(plain.model), baselines.as_written(bundled.model):
        assert torch.allclose(plain.model(ids).logits, bundled.model(ids).logits, atol=1e-4)


# ---- llama.cpp as a baseline: decodes the same model or says what is missing


def test_llama_cpp_decodes_the_greedy_tokens_of_generate(bundled):
    pytest.importorskip("xllamacpp")
    pytest.importorskip("gguf")
    ids = prose(bundled.tokenizer, 100)
    with baselines.as_written(bundled.model):
        expected = bundled.model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0)
    peer = LlamaCpp(bundled, None, ids, 16)
    try:
        for _ in range(2):  # the second time its K/V is cached
            assert peer.measure([0] * 12).ms > 0
            assert re.findall(r"<(\d+)>", peer.answer) == [str(token) for token in expected[0, 100:].tolist()]
    finally:
        peer.close()


@pytest.mark.parametrize("absent", ["xllamacpp", "gguf"])
def test_missing_llama_cpp_packages_are_named(tiny_shape, monkeypatch, absent):
    monkeypatch.setattr(baselines, "find_spec", lambda name: None if name == absent else object())
    with pytest.raises(UsageError, match=rf"package {absent} is not installed.*install .*xllamacpp"):
        LlamaCpp(tiny_shape, None, [1, 2, 3], 4).measure([0] * 5)


def test_a_peer_process_that_exits_is_reported(tiny_shape, monkeypatch):
    monkeypatch.setattr(baselines, "find_spec", lambda name: object())
    monkeypatch.setattr(baselines, "write", lambda model, file: None)
    monkeypatch.setattr(baselines.process.sys, "executable", "false")
    peer = LlamaCpp(tiny_shape, None, [1, 2, 3], 4)
    with pytest.raises(UsageError, match=r"llama.cpp ended.*code 1"):
        peer.measure([0] * 5)
    peer.close()
    peer.close()


# ---- A model written to a GGUF file: llama.cpp's order of the elements of a head


def test_rotated_pairs_become_neighbors(tiny_shape):
    config = tiny_shape.model.config
    heads, dim = config.num_attention_heads, config.head_dim
    rows = torch.arange(heads * dim)[:, None].expand(-1, 3)
    paired = baselines.rotated_in_pairs("layers.0.self_attn.q_proj.weight", rows, config)[:, 0].view(heads, -1, 2)
    assert torch.equal(paired[..., 1] - paired[..., 0], torch.full((heads, dim // 2), dim // 2))
    assert baselines.rotated_in_pairs("v_proj.weight", rows, config) is rows


def test_baselines_can_multiply_quantized_weights(bundled):
    packed = load_model(Load("bundled", "cpu", "float32", quantize="int8"), lambda stage: None)
    ids = torch.tensor([[3, 4, 5]])
    with baselines.as_written(bundled.model), baselines.as_written(packed.model):
        expected, found = (model.model(ids).logits for model in (bundled, packed))
    assert not torch.equal(expected, found)
    assert (expected - found).norm() < 0.05 * expected.norm()
