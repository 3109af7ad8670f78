"""Files of PG19 and WikiText are found and cut into passages."""

from __future__ import annotations

import json

import pytest

from kvchat.bench.texts import ENDINGS, files, passages
from kvchat.errors import UsageError


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
