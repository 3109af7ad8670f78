"""Damaged and hostile models are refused within seconds, with the reason and no other error."""

import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_models
from support.model_folders import edit_json
from support.progress import silent

from kvchat.engine import template as templates
from kvchat.engine.prompt import PromptEncoder, Stored
from kvchat.errors import KvchatError, ModelError, UsageError
from kvchat.models.load import load_model
from kvchat.models.probe import _chunks
from kvchat.paths import INDEX
from kvchat.protocol.messages import Load, Turn

WEIGHTS, CONFIG, EMBEDDING = "model.safetensors", "config.json", "model.embed_tokens.weight"


def edit_tensor(folder, name: str, change) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors[name] = change(tensors[name])
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def sparse(folder, name: str, size: int) -> None:
    with (folder / name).open("wb") as file:
        file.truncate(size)


def with_row_of(value: float):
    """Writes a value into a row of the embeddings whose token the self-test does not use."""
    tested = set(torch.cat(_chunks(tiny_models.model("llama"))).tolist())

    def change(table: torch.Tensor) -> torch.Tensor:
        table[next(token for token in range(len(table)) if token not in tested)] = value
        return table

    return change


DAMAGES = {
    "weights of zeros": lambda it: sparse(it, WEIGHTS, 10**11),
    "an index that leaves": lambda it: (it / INDEX).write_text('{"metadata": {}, "weight_map": {"a": "../x"}}'),
    "layers of text": lambda it: edit_json(it / CONFIG, num_hidden_layers="four"),
    "no heads": lambda it: edit_json(it / CONFIG, num_attention_heads=0),
    "odd rope": lambda it: edit_json(it / CONFIG, rope_parameters={"rope_type": "no such"}),
    "another vocabulary": lambda it: edit_json(it / CONFIG, vocab_size=100),
    "an odd activation": lambda it: edit_json(it / CONFIG, hidden_act="no such"),
    "wrong shape": lambda it: edit_tensor(it, "model.norm.weight", lambda t: t[:-1].clone()),
    "NaN": lambda it: edit_tensor(it, "model.layers.1.mlp.up_proj.weight", lambda t: torch.full_like(t, torch.nan)),
    "an embedding of NaN that no test reads": lambda it: edit_tensor(it, EMBEDDING, with_row_of(torch.nan)),
    "an embedding that is infinite": lambda it: edit_tensor(it, EMBEDDING, with_row_of(-torch.inf)),
    "empty tokenizer": lambda it: (it / "tokenizer.json").write_text(""),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_model_is_refused_in_seconds(llama_folder, damage):
    damage(llama_folder)
    began = time.process_time()
    with pytest.raises(KvchatError) as caught:
        load_model(Load(str(llama_folder), "cpu"), silent)
    assert time.process_time() - began < 10
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["x" * 5000, "/dev/zero"])
def test_a_name_that_is_no_path_is_refused(name):
    with pytest.raises(ModelError) as caught:
        load_model(Load(name, "cpu"), silent)
    assert len(str(caught.value)) < 12_000


# ---- templates

LOOP = "{% for i in range(99999) %}" * 3 + "{% set x = i %}" + "{% endfor %}" * 3
TEMPLATES = {
    "nested loops": LOOP,
    "200 MB": "{% for i in range(99999) %}{{ 'x' * 2000 }}{% endfor %}",
    "hoarding": "{% set s = namespace(x='x' * 1000000) %}{% for i in range(60) %}{% set s.x = s.x + s.x %}{% endfor %}",
    "an attribute": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a syntax error": "{% for %}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_hostile_template_is_refused_in_time(model, monkeypatch, template):
    monkeypatch.setattr(templates, "SECONDS", 0.3)
    monkeypatch.setattr(model.tokenizer, "chat_template", template)
    began = time.process_time()
    with pytest.raises(UsageError, match=r"template (refuses|was stopped)"):
        PromptEncoder(model.tokenizer).encode([Turn("user", "Hello")], Stored())
    assert time.process_time() - began < 30


def test_weights_of_other_sizes_are_named_with_both(llama_folder):
    edit_json(llama_folder / CONFIG, intermediate_size=80)
    with pytest.raises(ModelError, match=r"mlp\.down_proj\.weight is 64x96 in the files, and 64x80"):
        load_model(Load(str(llama_folder), "cpu"), silent)
