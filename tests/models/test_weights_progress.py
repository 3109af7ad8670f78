"""The progress of reading weights, told for each kind of checkpoint; nothing is counted twice or left out."""

from __future__ import annotations

import itertools
import re
import sys

import pytest
import transformers
from support import tiny_models, tiny_multimodal
from support.gguf_files import write_model
from transformers.utils import logging

from kvchat.models import hub
from kvchat.models.load import load_model
from kvchat.protocol.messages import Load
from kvchat.units import size


@pytest.fixture(autouse=True)
def slow(monkeypatch):
    """A second goes by whenever a clock is looked at."""
    seconds = itertools.count()
    monkeypatch.setattr(hub.ByteProgress.__init__, "__defaults__", (lambda: next(seconds),))


def stages_of(path, **asked):
    stages = []
    load_model(Load(str(path), "cpu", "float32", **asked), stages.append)
    return [stage for stage in stages if stage.startswith("Loading the weights")]


@pytest.mark.parametrize(("name", "quantize"), [("llama", "none"), ("llama", "int8"), ("qwen3_moe", "none")])
def test_every_byte_of_every_tensor_is_counted_once(tmp_path, name, quantize):
    model = tiny_models.model(name)
    tiny_multimodal.save(model, tmp_path)
    told = stages_of(tmp_path, quantize=quantize)
    stored = sum(tensor.nbytes for tensor in model.parameters())
    assert told[-1].startswith(f"Loading the weights ▰▰▰▰▰▰▰▰ {size(stored)} of {size(stored)}")
    assert len(told) > 10
    assert all(re.search(r"/s · .* left$", stage) for stage in told[2:])


def test_the_sizes_of_a_gguf_file_are_shown_first(tmp_path, model):
    write_model(tmp_path / "model.gguf", model, "Q8_0")
    told = stages_of(tmp_path / "model.gguf")
    assert re.match(r"Loading .* in the file, .* unpacked, .* in int8$", told[0])
    assert re.match(r"Loading the weights ▰+ (.*) of \1", told[-1])
    assert len(told) > 10


def test_it_is_heard_where_what_libraries_print_goes_nowhere(tmp_path, capfd, monkeypatch):
    tiny_multimodal.save(tiny_models.model("llama"), tmp_path)
    read = transformers.LlamaForCausalLM.from_pretrained

    def say(*texts):
        sys.stdout.writelines(texts)
        sys.stderr.writelines(texts)

    def loud(*args, **options):
        say("a banner")
        return read(*args, **options)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", loud)
    load_model(Load(str(tmp_path), "cpu"), say)
    for text in capfd.readouterr():
        assert "Loading the weights ▱" in text
        assert "a banner" not in text


def test_what_bars_were_used_before_is_used_again(tmp_path, model):
    def ours(factory, args, options):
        return factory(*args, **options)

    before = logging.set_tqdm_hook(ours)
    try:
        load_model(Load("bundled", "cpu"), lambda stage: None)
    finally:
        assert logging.set_tqdm_hook(before) is ours
