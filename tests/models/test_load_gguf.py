"""Models in GGUF files."""

from __future__ import annotations

import time
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
from support.gguf_files import gguf_header, text, write_model
from support.progress import silent

from kvchat.errors import DoesNotFitError, ModelError, UsageError
from kvchat.kv.memory import available
from kvchat.models import checkpoint, description
from kvchat.models.fuse.modules import sample_logits
from kvchat.models.load import load_model
from kvchat.models.probe import relative_error
from kvchat.protocol.messages import Load


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "bundled.gguf"
    write_model(path, model)
    return path


@pytest.mark.parametrize("of", [lambda path: path, lambda path: path.parent], ids=["file", "folder"])
def test_a_gguf_file_is_the_model_it_was_made_of(file, model, of, capfd):
    loaded = load_model(Load(str(of(file)), "cpu", quantize="none"), silent)
    assert (loaded.context, loaded.vocab, loaded.dtype) == (model.context, model.vocab, torch.float32)
    assert loaded.weight_bytes == pytest.approx(model.weight_bytes, rel=0.01), "unpacked"
    assert relative_error(sample_logits(loaded.model), sample_logits(model.model)) < 0.1
    text = "Biscuit's third lighthouse."
    assert loaded.tokenizer(text)["input_ids"][-5:] == model.tokenizer(text)["input_ids"][-5:]
    assert (loaded.fused, loaded.weights) == (model.fused, "")
    assert any("unpacked to float32" in note for note in loaded.notes)
    assert capfd.readouterr() == ("", "")


def test_a_file_needs_room_for_what_stays_of_it_only(file, monkeypatch):
    monkeypatch.setattr(available, "host_free", lambda: 40 * 2**20)  # 18 MiB in the file, 66 unpacked
    assert load_model(Load(str(file), "cpu"), silent).weights == "int8"
    with pytest.raises(DoesNotFitError):
        load_model(Load(str(file), "cpu", quantize="none"), silent)


def test_a_damaged_file_is_refused(file, tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ModelError, match="is damaged"):
        load_model(Load(str(path), "cpu"), silent)


@pytest.mark.parametrize("left", [500_000, -1])
def test_a_file_that_was_not_downloaded_to_its_end_is_called_so(file, tmp_path, left):
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes().rstrip(b"\0")[:left])
    with pytest.raises(ModelError, match=r"damaged.* bytes"):
        load_model(Load(str(tmp_path / "cut.gguf"), "cpu"), silent)


def test_no_gguf_file_at_all(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"not at all")
    with pytest.raises(ModelError, match="is damaged"):
        load_model(Load(str(path), "cpu"), silent)


def test_a_gguf_file_is_packed_in_int8_and_int4_only(file):
    with pytest.raises(ModelError, match=r"GGUF.*nf4.*--quantize none"):
        load_model(Load(str(file), "cpu", quantize="nf4"), silent)
    with pytest.raises(UsageError, match="no quantization"):
        load_model(Load(str(file), "cpu", quantize="nf5"), silent)


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("nothing"), Path.mkdir])
@pytest.mark.parametrize("of", [lambda path: path, lambda path: path.parent, lambda path: "x.gguf"])
def test_what_is_no_file_is_refused_at_once(tmp_path, monkeypatch, make, of):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "x.gguf")
    began = time.process_time()
    with pytest.raises(ModelError):
        load_model(Load(str(of(tmp_path / "x.gguf")), "cpu"), silent)
    assert time.process_time() - began < 1


def test_of_several_files_one_must_be_given(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="several GGUF files"):
        load_model(Load(str(tmp_path), "cpu"), silent)
    assert checkpoint.locate(str(tmp_path / "b.gguf"), silent).gguf == "b.gguf"


def test_a_projector_and_an_adapter_lie_beside_a_model(tmp_path):
    tensor = ("output_norm", (64,), 0)
    beside = {"mmproj-a.gguf": text("general.type", "mmproj"), "lora.gguf": text("adapter.type", "lora")}
    for name, value in beside.items():
        (tmp_path / name).write_bytes(gguf_header(tensor, values=[value]) + bytes(800))
    (tmp_path / "model.gguf").write_bytes(gguf_header(tensor) + bytes(800))
    assert checkpoint.locate(str(tmp_path), silent).gguf == "model.gguf"


def test_a_file_of_a_repository(tmp_path, monkeypatch):
    asked = []

    def snapshot_download(name, *, allow_patterns, **kwargs):
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelError, match=r"q4\.gguf"):
        checkpoint.locate("org/model:q4.gguf", silent)
    assert asked == [("org/model", ["q4.gguf"])]
    (tmp_path / "q4.gguf").write_bytes(content := gguf_header(("a", (256, 4), 12)))
    found = checkpoint.complete(checkpoint.locate("org/model:q4.gguf", silent), silent)
    assert (found.gguf, found.revision, found.weight_bytes) == ("q4.gguf", tmp_path.name, len(content))


@pytest.mark.parametrize(("kind", "layers", "scale"), [("gemma3", 34, 32), ("gemma3", 62, 40), ("gemma2", 46, 40)])
def test_gemmas_scores_are_scaled_as_by_llama_cpp(tmp_path, kind, layers, scale):
    """No key of the file tells: 27B divides by the root of 5376 / 32, the others by that of a head's size."""
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "gemma.gguf", kind)
    writer.add_block_count(layers)
    writer.add_context_length(512)
    writer.add_embedding_length(160)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(32)
    writer.add_value_length(32)
    for layer in range(layers):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.ones(160, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    described = description.describe(str(tmp_path), "cpu", "float32", silent)
    assert described.text_config.query_pre_attn_scalar == scale
