"""Passages of texts: where they are cut, and what is refused."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvchat.bench.texts import BOOKS, ENDINGS, files, passages
from kvchat.cli.main import app
from kvchat.errors import UsageError
from kvchat.models.load import load_model
from kvchat.protocol.messages import Load

SIZE = 1016


@pytest.fixture(scope="module")
def tokenizer():
    return load_model(Load("bundled", "cpu"), lambda stage: None).tokenizer


def test_every_part_of_the_shipped_books_gives_one_passage(tokenizer):
    books = sorted(BOOKS.glob("*.txt"))
    found = passages((), SIZE, tokenizer)
    assert [passage.text for passage in found] == [path.stem for path in books for _ in range(4)]
    assert {len(passage.ids) for passage in found} == {SIZE}
    assert len({passage.ids for passage in found}) == 12
    named = (BOOKS / "README.md").read_text("utf-8")
    assert all(f"| {path.name} |" in named for path in books)


def test_passages_do_not_cross_parts_and_lines_are_joined(tokenizer, tmp_path):
    words = "a ship went\nover the sea " * 40
    text = tmp_path / "text.txt"
    text.write_text(f"{words}\n\n{words}\n* * *\ntoo short\n* * *\n{words}", "utf-8")
    found = passages([str(text)], 116, tokenizer)
    whole = [tokenizer.decode(passage.ids) for passage in found]
    assert all("*" not in piece and "short" not in piece for piece in whole)
    assert sum("\n\n" in piece for piece in whole) == 1
    assert "went over" in whole[0]
    assert {passage.ids[0] for passage in found} == {tokenizer.bos_token_id}


@pytest.mark.parametrize("joined", [True, False])
def test_joined_parts_give_longer_passages_also_where_no_part_is_long_enough(tokenizer, joined):
    found = passages((), 3000, tokenizer, joined)
    assert {passage.text for passage in found} == {path.stem for path in BOOKS.glob("*.txt")}
    assert {len(passage.ids) for passage in found} == {3000}


def test_what_cannot_be_cut_is_refused(tokenizer, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("Too short.", "utf-8")
    with pytest.raises(UsageError, match="too short to measure on"):
        passages([str(text)], 100, tokenizer)
    text.write_bytes(b"\xff\xff")
    with pytest.raises(UsageError, match="is not UTF-8"):
        passages([str(text)], 100, tokenizer)


@pytest.mark.parametrize(("content", "message"), [(b" \n", "is empty"), (b"\xff\xff", "is not UTF-8")])
@pytest.mark.parametrize("command", [["agreement"], ["coverage"], ["paper", "freekv"]])
def test_a_file_without_text_is_refused_before_a_model_is_loaded(command, content, message, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(content)
    ran = CliRunner().invoke(app, ["bench", *command, "--text", str(text), "--model", "none"])
    assert isinstance(ran.exception, UsageError)
    assert f"text.txt {message}" in str(ran.exception)


# ---- Files of PG19 and WikiText are found and cut into passages


def texts(name, folder):
    return tuple(map(str, files(folder, ENDINGS[name])))


class Words:
    """A tokenizer of words, by their length."""

    bos_token_id = None

    def encode(self, text, add_special_tokens=True):
        return [len(word) for word in text.split()]


def test_books_raw_articles_and_rows_are_found_and_cut_into_passages(tmp_path):
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "11.txt").write_text("one two\nthree\n\nfour")
    (tmp_path / "wiki.test.raw").write_text(" = Title = \n")
    rows = [{"text": "aa bb"}, {"text": "cccc dddd eeee"}]
    (tmp_path / "books.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = texts("pg19", tmp_path)
    assert [name.rpartition("/")[2] for name in found] == ["books.jsonl", "11.txt"]
    assert [passage.ids for passage in passages(found, 2, Words())] == [(2, 2), (4, 4), (3, 3), (5, 4)]
    assert len(texts("wikitext", tmp_path)) == 3


def test_a_row_without_text_and_an_empty_folder_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"ends in \.txt or \.jsonl"):
        texts("pg19", tmp_path)
    (tmp_path / "books.jsonl").write_text('{"text": "a"}\n{"title": "b"}\n')
    with pytest.raises(UsageError, match=r"books\.jsonl, line 2"):
        passages(texts("pg19", tmp_path), 2, Words())
