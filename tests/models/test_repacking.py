"""Weights of GGUF files that stay packed; other checkpoints are in ``test_quantization_unpacked``."""

import importlib.util
from dataclasses import replace
from functools import cache

import pytest
import torch
from support import tiny_models
from support.gguf_files import write_lfm2, write_model
from support.message import lacks
from support.progress import silent

from kvchat import libraries
from kvchat.engine.plan import memory_plan, propose
from kvchat.models import repacking
from kvchat.models.description import describe
from kvchat.models.fuse.modules import sample_logits
from kvchat.models.load import load_model
from kvchat.models.probe import relative_error, selftest
from kvchat.models.quantize.rows import body
from kvchat.protocol.messages import Load
from kvchat.tui.models import plan_lines
from kvchat.units import size

GPU = torch.device("cuda")


def needs(*packages: str) -> pytest.MarkDecorator:
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(absent), reason=f"{', '.join(absent)} is not installed")


@pytest.fixture(scope="module")
def file_of(model, tmp_path_factory):
    """Gives the bundled model as a GGUF file of a type."""
    folder, written = tmp_path_factory.mktemp("gguf"), {}

    def get(kind):
        if kind not in written:
            written[kind] = folder / f"{kind}.gguf"
            write_model(written[kind], model, kind)
        return written[kind]

    return get


@pytest.fixture(scope="module")
def read(file_of):
    """The model of such a file, and the stages of loading it; each combination is loaded once."""

    @cache
    def loaded(kind, quantize="auto"):
        stages: list[str] = []
        return load_model(Load(str(file_of(kind)), "cpu", quantize=quantize), stages.append), stages

    return loaded


@needs("gguf")
@pytest.mark.parametrize(
    ("kind", "in_4_bits", "in_8_bits"),
    [("Q4_0", "int4", "int8"), ("Q5_0", "int8", "int8"), ("Q8_0", "int8", "int8"), ("F16", "none", "none")],
)
def test_the_default_quantization_follows_the_file_type(file_of, monkeypatch, kind, in_4_bits, in_8_bits):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    described = describe(str(file_of(kind)), "cpu", "float32", silent)
    assert repacking.by_default(described) == in_4_bits
    assert repacking.by_default(replace(described, device=GPU, dtype=torch.bfloat16)) == in_4_bits
    # int4 is multiplied in bfloat16 only
    assert repacking.by_default(replace(described, device=GPU, dtype=torch.float16)) == in_8_bits


@needs("gguf")
@pytest.mark.parametrize(("kind", "table_kind", "expected"), [("Q4_0", "F16", "int4"), ("Q8_0", "F32", "int8")])
def test_a_large_vocabulary_does_not_change_the_default(model, tmp_path, kind, table_kind, expected):
    write_model(tmp_path / "mixed.gguf", model, kind, table_kind)
    described = describe(str(tmp_path / "mixed.gguf"), "cpu", "float32", silent)
    assert repacking.by_default(described) == expected


@pytest.mark.parametrize(("kind", "packed", "error"), [("Q8_0", "int8", 0.1), ("Q4_0", "int4", 0.03)])
def test_packed_files_stay_small_and_loading_shows_both_sizes(read, file_of, model, kind, packed, error):
    """4-bit levels are those of the file: errors come from scales, bfloat16 products and 8-bit embeddings."""
    loaded, stages = read(kind)
    unpacked, _ = read(kind, "none")
    assert loaded.weights == packed
    assert loaded.weight_bytes < 0.5 * model.weight_bytes
    stage_with_sizes = next(stage for stage in stages if stage.startswith("Loading the weights"))
    planned = memory_plan(Load(str(file_of(kind)), "cpu"), 64, silent).weights
    sizes = file_of(kind).stat().st_size, planned["none"], planned[packed]
    assert stage_with_sizes.endswith("{} in the file, {} unpacked, {} in {}".format(*map(size, sizes), packed))
    assert not any("were unpacked" in note for note in loaded.notes)
    assert selftest(loaded.model) < 0.02
    assert relative_error(sample_logits(loaded.model), sample_logits(unpacked.model)) < error
    same, _ = read(kind, packed)
    assert torch.equal(sample_logits(same.model), sample_logits(loaded.model))


def test_the_plan_lists_all_sizes_and_the_default(read, file_of, model):
    plan = memory_plan(Load(str(file_of("Q8_0")), "cpu"), 4096, silent)
    assert plan.by_default == "int8"
    assert plan.weights == {
        "none": pytest.approx(model.weight_bytes, rel=0.01),
        "int8": pytest.approx(read("Q8_0")[0].weight_bytes, rel=0.01),
        "int4": pytest.approx(read("Q8_0", "int4")[0].weight_bytes, rel=0.01),
    }
    assert any(line.startswith("weights, int8, by default") for line in plan_lines(plan))
    assert plan.proposal.quantize == "int8"
    assert plan.unpacked == 0, "weights are packed one at a time"
    bundled = memory_plan(Load("bundled", "cpu"), 4096, silent)
    assert (bundled.by_default, bundled.unpacked) == ("none", 0)
    assert not any("unpacked" in line for line in plan_lines(bundled))


def test_a_plan_reports_only_bits_lost_from_the_file(file_of):
    def losses(kind, quantize):
        plan = memory_plan(Load(str(file_of(kind)), "cpu"), 64, silent)
        return propose(replace(plan, weights={quantize: 1}, by_default=quantize)).gave_up

    assert losses("Q4_0", "int4") == losses("Q4_0", "int8") == losses("Q8_0", "int8") == ()
    assert not lacks(losses("Q8_0", "int4")[0], "weights", "4 bits", "8.5")


def test_without_torchao_files_are_unpacked_and_a_note_names_it(read, file_of, model, monkeypatch):
    monkeypatch.setattr(libraries, "lacking", lambda quantize, device: ["torchao"])
    loaded = load_model(Load(str(file_of("Q8_0")), "cpu"), silent)
    assert (loaded.weights, loaded.weight_bytes) == ("", pytest.approx(model.weight_bytes, rel=0.01))
    (note,) = [note for note in loaded.notes if "torchao" in note]
    assert "int8" in note
    assert note.endswith(libraries.extra("ao"))
    requested, _ = read("Q8_0", "none")
    assert not any("torchao" in note for note in requested.notes)


@pytest.mark.parametrize(("kind", "quantize"), [("Q8_0", "int8"), ("Q4_0", "int4")])
def test_lfm2_files_are_unpacked_one_weight_at_a_time(tmp_path, monkeypatch, kind, quantize):
    pytest.importorskip("transformers.integrations.gguf")  # supports no architecture before 5.23
    file, left = tmp_path / "lfm2.gguf", []
    sizes = {"vocab_size": 8192, "intermediate_size": 96, "block_auto_adjust_ff_dim": False}
    write_lfm2(file, tiny_models.fresh("lfm2", **sizes), kind)
    genuine = repacking.pack

    def pack(model, config, described):
        left.extend(linear for linear in body(model) if linear.weight.is_floating_point())
        genuine(model, config, described)

    monkeypatch.setattr(repacking, "pack", pack)
    small, unpacked = (load_model(Load(str(file), "cpu", quantize=name), silent) for name in ("auto", "none"))
    assert (small.weights, left) == (quantize, [])
    assert relative_error(sample_logits(small.model), sample_logits(unpacked.model)) < 0.05
    plan = memory_plan(Load(str(file), "cpu"), 64, silent)
    assert (plan.by_default, plan.unpacked) == (quantize, 0)
    assert plan.weights[quantize] == pytest.approx(small.weight_bytes, rel=0.001)
