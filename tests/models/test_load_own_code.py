"""Code and pickles that come with a model: never run, never read."""

from __future__ import annotations

import pytest
import torch
from support import tiny_models
from support.model_folders import edit_json

from kvchat.errors import ModelError
from kvchat.models.load import load_model
from kvchat.paths import INDEX
from kvchat.protocol.messages import Load


@pytest.fixture
def own_code(folder, tmp_path, monkeypatch):
    """The folder brings Python files that leave a mark, and the person would agree to everything asked."""
    mark = tmp_path / "it ran"
    for name in ("configuration_mine", "modeling_mine", "tokenization_mine"):
        (folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("a question on stdin"))
    return mark


AUTO_MAP = {
    "AutoConfig": "configuration_mine.MineConfig",
    "AutoModelForCausalLM": "modeling_mine.MineForCausalLM",
    "AutoTokenizer": ["tokenization_mine.MineTokenizer", None],
}


def test_a_model_that_needs_its_own_code_is_refused_without_a_question(folder, own_code):
    edit_json(folder / "config.json", model_type="mine", auto_map=AUTO_MAP)
    with pytest.raises(ModelError, match="code") as caught:
        load_model(Load(str(folder), "cpu"), lambda stage: None)
    assert caught.value.hint
    assert not own_code.exists()


def test_own_code_beside_a_known_architecture_is_left_alone(folder, own_code):
    edit_json(folder / "config.json", auto_map=AUTO_MAP)
    edit_json(folder / "tokenizer_config.json", auto_map=AUTO_MAP)
    assert load_model(Load(str(folder), "cpu"), lambda stage: None).layers == 4
    assert not own_code.exists()


def pickled(folder, monkeypatch):
    """The same weights as a pickle beside the others, and a torch that must not read it."""
    torch.save(tiny_models.model("llama").state_dict(), folder / "pytorch_model.bin")
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("a pickle was read"))


def test_a_pickle_beside_the_weights_is_not_read(folder, monkeypatch):
    pickled(folder, monkeypatch)
    assert load_model(Load(str(folder), "cpu"), lambda stage: None).layers == 4


def test_a_pickle_is_not_read_instead_of_the_weights(folder, monkeypatch):
    pickled(folder, monkeypatch)
    (folder / INDEX).unlink()  # without it transformers does not find the safetensors
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_model(Load(str(folder), "cpu"), lambda stage: None)


def test_a_pickle_alone_is_refused(folder, monkeypatch):
    pickled(folder, monkeypatch)
    for file in (*folder.glob("*.safetensors"), folder / INDEX):
        file.unlink()
    with pytest.raises(ModelError, match=r"safetensors and GGUF.*\.bin"):
        load_model(Load(str(folder), "cpu"), lambda stage: None)
