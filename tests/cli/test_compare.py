"""``kvchat compare``: calls of the session, output and files, and errors before a model is loaded."""

import json
import re

import pytest
from support.fake_session import PIECES

from kvchat.protocol.figures import Run
from kvchat.protocol.messages import Compared, Comparing, Variant


@pytest.fixture
def compare(run):
    return lambda *args: run("compare", *args)


def test_output_and_files_contain_all_answers(compare, session, tmp_path):
    out = tmp_path / "both.md"
    line = ["hello", "streaming", "budget=256", "sync", "--seed", "7", "--max-new-tokens", "5", "--json", "--out"]
    code, printed, _ = compare(*line, str(out))
    result = json.loads(printed)
    assert code == 0
    assert result["variants"] == [{"mode": "streaming", "params": {"budget": 256}}, {"mode": "sync", "params": {}}]
    assert (result["question"], result["sampling"]["seed"], result["sampling"]["max_new_tokens"]) == ("hello", 7, 5)
    assert [run["pieces"] for run in result["runs"]] == [list(PIECES)] * 2
    assert "".join(PIECES) in out.read_text()
    assert session.closed
    code, printed, _ = compare("hello")
    assert "── full ──" in printed
    assert "── speculative ──" in printed
    assert "tok/s" in printed


def test_refused_modes_and_early_stops_set_the_exit_code(compare, session):
    refused = Run("sync", {}, refusal="The reason.")
    session.compare = lambda turns, variants, sampling: iter([Compared((Run("full", {}, ("a",)), refused), 7)])
    code, printed, _ = compare("hello", "sync")
    assert code == 3
    assert re.search("sync.*The reason", printed)
    session.compare = lambda turns, variants, sampling: iter([Comparing(0, "a", 1), Compared((), 7)])
    code, _, errors = compare("hello")
    assert (code, errors.count("\n")) == (1, 1)


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        ("hello frezee", '"freeze"'),
        ("hello budget=256", "budget=256"),
        ("hello sync sync", "sync"),
        ("hello full --out it.txt", "it.txt"),
        ("hello full --out no/such/folder/it.md", "no/such/folder"),
        ("-", "prompt"),
    ],
)
def test_invalid_comparisons_are_rejected_before_loading(compare, session, line, fact):
    code, printed, errors = compare(*line.split())
    assert (code, printed) == (2, "")
    assert fact in errors
    assert session.loaded is None


def test_an_unwritable_file_is_named_and_not_left_behind(compare, session, tmp_path, full_disk):
    code, _, errors = compare("hello", "full", "--out", str(tmp_path / "told.md"))
    assert (code, errors.count("\n")) == (2, 1)
    assert "told.md" in errors
    assert not (tmp_path / "told.md").exists()


def test_variants_are_parsed_as_in_the_chat(compare, session):
    compared = []
    session.compare = lambda turns, variants, sampling: compared.append(variants) or iter([Compared((), 7)])
    compare("hello", "full", "streaming", "budget=256")
    assert compared[-1] == (Variant("full"), Variant("streaming", {"budget": 256}))
