"""The perplexity benchmark: its passages, full against itself, and what a mode that reads little shows."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from kvchat.bench import perplexity
from kvchat.bench.baselines import as_written
from kvchat.cli.main import app
from kvchat.engine.model.load import load_model
from kvchat.errors import UsageError


@pytest.fixture(scope="module")
def model():
    return load_model("bundled", "cpu", "auto", lambda stage: None)


def test_every_part_of_the_shipped_books_gives_one_passage(model):
    books = sorted(perplexity.BOOKS.glob("*.txt"))
    found = list(perplexity.passages(books, 1000, model.tokenizer))
    assert [passage.text for passage in found] == [path.stem for path in books for _ in range(4)]
    assert {len(passage.ids) for passage in found} == {perplexity.PROMPT + 1000}
    assert len({passage.ids for passage in found}) == 12
    named = (perplexity.BOOKS / "README.md").read_text("utf-8")
    assert all(f"| {path.name} |" in named for path in books)


def test_passages_do_not_cross_parts_and_lines_are_joined(model, tmp_path):
    words = "a ship went\nover the sea " * 40
    text = tmp_path / "text.txt"
    text.write_text(f"{words}\n\n{words}\n* * *\ntoo short\n* * *\n{words}", "utf-8")
    found = list(perplexity.passages([text], 100, model.tokenizer))
    whole = [model.tokenizer.decode(passage.ids) for passage in found]
    assert all("*" not in piece and "short" not in piece for piece in whole)
    assert sum("\n\n" in piece for piece in whole) == 1
    assert "went over" in whole[0]
    assert {passage.ids[0] for passage in found} == {model.tokenizer.bos_token_id}


def test_full_is_the_models_own_perplexity_and_less_reading_costs_some(model):
    result = perplexity.run(["full", "streaming:budget=64,sink=4"], device="cpu", tokens=150, limit=2)
    assert json.loads(json.dumps(result)) == result
    full, again, streaming = result["rows"]
    assert (again["ratio"], again["read_share"], again["ratio_standard_error"]) == (1.0, 1.0, 0.0)
    assert full["read_end"] == perplexity.PROMPT + 150
    assert full["read_mean"] == pytest.approx(perplexity.PROMPT + 151 / 2)
    assert streaming["ratio"] > 1
    assert streaming["read_share"] < 0.95
    passage = next(perplexity.passages(sorted(perplexity.BOOKS.glob("*.txt")), 150, model.tokenizer))
    ids = torch.tensor([passage.ids])
    with as_written(model.model):
        logits = model.model(ids, use_cache=False).logits[0, perplexity.PROMPT - 1 : -1].float()
    nats = torch.nn.functional.cross_entropy(logits, ids[0, perplexity.PROMPT :])
    assert full["passages"][0]["perplexity"] == pytest.approx(float(nats.exp()), rel=1e-3)


def test_the_command_reads_a_text_and_prints_one_json_object(tmp_path):
    text = tmp_path / "mine.txt"
    text.write_text("The sea was calm, and the ship went on. " * 20, "utf-8")
    arguments = ["bench", "perplexity", "--text", str(text), "--tokens", "40", "--passages", "1", "--mode", "sync"]
    ran = CliRunner().invoke(app, [*arguments, "--json"])
    assert ran.exit_code == 0
    rows = json.loads(ran.stdout)["rows"]
    assert [row["variant"] for row in rows] == ["full", "sync"]
    assert rows[1]["passages"][0]["text"] == "mine"
    assert "1 of 1 (mine)" in ran.stderr


def test_a_short_text_is_refused(tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("Too short.", "utf-8")
    with pytest.raises(UsageError, match="too short to measure on"):
        perplexity.run(texts=[text], device="cpu")
