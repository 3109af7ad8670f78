"""Passages of texts: how they are cut, and which texts are rejected."""

import pytest
from typer.testing import CliRunner

from kvchat.bench.frame import mean, quantile, wilson
from kvchat.bench.texts import BOOKS, passages
from kvchat.cli.main import app
from kvchat.errors import UsageError


@pytest.mark.parametrize("size", [1016, 3000])
def test_the_shipped_books_are_cut_into_different_passages(tokenizer, size):
    books = sorted(BOOKS.glob("*.txt"))
    found = passages((), size, tokenizer)
    assert list(dict.fromkeys(passage.text for passage in found)) == [path.stem for path in books]
    assert {len(passage.ids) for passage in found} == {size}
    assert len({passage.ids for passage in found}) == len(found)
    named = (BOOKS / "README.md").read_text("utf-8")
    assert all(f"| {path.name} |" in named for path in books)


def test_passages_join_lines_and_keep_paragraphs(tokenizer, tmp_path):
    words = "a ship went\nover the sea " * 40
    text = tmp_path / "text.txt"
    text.write_text(f"{words}\n\n{words}\n* * *\nshort\n* * *\n{words}", "utf-8")
    found = passages([str(text)], 116, tokenizer)
    whole = [tokenizer.decode(passage.ids) for passage in found]
    assert all("*" not in piece for piece in whole)
    assert sum("\n\n" in piece for piece in whole) == 1
    assert "went over" in whole[0]
    assert {passage.ids[0] for passage in found} == {tokenizer.bos_token_id}


def test_short_and_binary_texts_are_rejected(tokenizer, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("Too short.", "utf-8")
    with pytest.raises(UsageError, match="too short to measure on"):
        passages([str(text)], 100, tokenizer)
    text.write_bytes(b"\xff\xff")
    with pytest.raises(UsageError, match="is not UTF-8"):
        passages([str(text)], 100, tokenizer)


@pytest.mark.parametrize(("content", "message"), [(b" \n", "is empty"), (b"\xff\xff", "is not UTF-8")])
@pytest.mark.parametrize("command", [["agreement"], ["coverage"], ["paper", "freekv"]])
def test_files_without_text_are_rejected_before_loading(command, content, message, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(content)
    ran = CliRunner().invoke(app, ["bench", *command, "--text", str(text), "--model", "none"])
    assert isinstance(ran.exception, UsageError)
    assert f"text.txt {message}" in str(ran.exception)


# ---- Quantiles and intervals compared with known values


@pytest.mark.parametrize(
    ("right", "cases", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (8, 10, 0.4902, 0.9433), (1, 1, 0.2065, 1.0), (40, 40, 0.9124, 1.0)],
)
def test_wilson_intervals_match_known_values(right, cases, low, high):
    assert wilson(right, cases) == pytest.approx((low, high), abs=1e-4)


def test_empty_samples_have_no_statistics():
    assert (mean([]), wilson(0, 0), quantile([], 0.5)) == (None, None, None)


def test_quantiles_need_enough_values():
    values = [float(i) for i in range(1, 1001)]
    assert quantile(values, 0.5) == 500
    assert quantile(values, 0.99) == 990
    assert quantile(values, 0.999) == 999
    assert quantile(values[:999], 0.999) is None
    assert quantile(values[:99], 0.99) is None
