"""``kvchat models`` as lines and as JSON."""

import json
import re

import pytest
from support.weights import linears

from kvchat import paths
from kvchat.cli import models
from kvchat.models import catalog
from kvchat.models.catalog import FoundModel, Room

GiB = 2**30
FOUND = [
    FoundModel("bundled", "bundled", linears(2**24)),
    FoundModel("org/large", "hub", linears(3 * GiB)),
    FoundModel("/m/huge.gguf", "GGUF", linears(99 * GiB, "Q4_K", 50 * GiB, method="gguf", layer_bits=4.6)),
    FoundModel("/m/broken", "folder", problem="Unreadable."),
]


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr(catalog, "find", lambda folders: FOUND)
    monkeypatch.setattr(models, "room", lambda device: Room("cpu", 8 * GiB))


def test_models_are_listed_with_size_type_and_fit(run):
    outcome = run("models")
    bundled, large, huge, broken = outcome.out.splitlines()
    assert re.match(r"bundled +bundled +32\.0 MiB +bfloat16 +fits.*64\.0 MiB$", bundled)
    assert re.match(r"org/large +hub +6\.0 GiB +bfloat16 +int8 fits.*12\.0 GiB", large)
    assert re.match(r"/m/huge\.gguf +GGUF +50\.0 GiB +Q4_K +too large.*61\.9 GiB$", huge)
    assert re.match(r"/m/broken +folder +Unreadable\.$", broken)
    assert "8.0 GiB" in outcome.err


def test_json_lists_sizes_in_bytes(run):
    listed = json.loads(run("models", "--json").out)
    assert [row["quantize"] for row in listed] == ["none", "int8", None, None]
    assert listed[0] == {
        "name": "bundled",
        "kind": "bundled",
        "file_bytes": 2**25,
        "type": "bfloat16",
        "needed_bytes": 2**26,
        "quantize": "none",
        "problem": "",
    }
    assert listed[3]["problem"] == "Unreadable."


def test_packed_weights_are_counted_and_cleared(run):
    assert "packed" not in run("models").err
    paths.packed_dir().mkdir(parents=True)
    for name in ("a.safetensors", "b.safetensors.7.unfinished"):
        (paths.packed_dir() / name).write_bytes(bytes(2**20))
    assert "2.0 MiB" in run("models").err
    cleared = run("models", "--clear")
    assert (cleared.out, "2.0 MiB" in cleared.err) == ("", True)
    assert list(paths.packed_dir().iterdir()) == []


@pytest.mark.parametrize("command", ["plan", "calibrate", "serve"])
@pytest.mark.parametrize("option", [[], ["-m"]])
def test_a_model_is_named_with_or_without_the_option(run, command, option):
    outcome = run(command, *option, "./nothing")
    assert (outcome.code, '"./nothing"' in outcome.err) == (2, True)


def test_a_mistyped_model_name_is_not_searched_on_the_hub(run):
    outcome = run("ask", "hello", "-m", "smolm2")
    assert (outcome.code, 'Did you mean "smollm2"?' in outcome.err) == (2, True)
