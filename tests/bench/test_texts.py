"""Passages of texts: where they are cut, and what is refused."""

import json

import pytest
from typer.testing import CliRunner

from kvchat.bench import data_sets
from kvchat.bench.frame import mean, quantile, wilson
from kvchat.bench.texts import BOOKS, ENDINGS, files, lines, passages
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


# ---- Scores of made-up answers, worked out by hand from the data sets' definitions


@pytest.mark.parametrize(
    ("answer", "reference", "f1"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1),
        ("in Paris, near the Louvre", "Paris", 2 / 5),  # "the" does not count
        ("red red blue", "red green", 2 / 5),
        ("nothing", "", 0),
    ],
)
def test_f1_counts_words_without_case_articles_and_punctuation(answer, reference, f1):
    assert data_sets.token_f1(answer, reference) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("answer", "reference", "f1"),
    [
        ("the cat sat on the mat", "the cat sat on the mat", 1),
        # Longest in common: police ... the gunman; 4 different words against 4.
        ("police kill the gunman", "police killed the gunman", 2 * 3 / 8),
        # The union over the answer's sentences: w1 w2 and w1 w3 w5 of w1 w2 w3 w4 w5 (the paper of ROUGE).
        ("w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5", 2 * 4 / (8 + 5)),
        ("", "words", 0),
        ("a b", "c d", 0),
    ],
)
def test_rouge_l_is_the_union_of_the_sentences_longest_subsequences(answer, reference, f1):
    assert data_sets.rouge_l(answer, reference) == pytest.approx(f1)


def test_a_class_is_shared_by_all_that_are_named():
    classes = ("Food", "Food and drink", "Sport")
    assert data_sets.class_share("It is Sport", "Sport", classes) == 1
    assert data_sets.class_share("Sport or Food", "Sport", classes) == 0.5
    assert data_sets.class_share("Food and drink", "Food and drink", classes) == 1, "Food is part of the right name"
    assert data_sets.class_share("Weather", "Sport", classes) == 0


def test_numbers_retrieved_and_counted():
    assert data_sets.number_share("Paragraph 12", "Paragraph 12") == 1
    assert data_sets.number_share("12 or 7, not 3", "Paragraph 12") == pytest.approx(1 / 3)
    assert data_sets.number_share("none", "Paragraph 12") == 0


def test_code_is_the_first_line_that_is_no_comment():
    answer = "\n# add one\n```python\nreturn x + 1\nreturn None"
    assert data_sets.code_similarity(answer, "return x + 1") == 1
    assert data_sets.code_similarity("return x", "return x + 1") == pytest.approx(0.8)
    assert data_sets.code_similarity("# nothing", "return x") == 0


def test_ruler_counts_contained_references_or_any():
    assert data_sets.contained("The numbers are 12 and 34.", ("12", "34", "56")) == pytest.approx(2 / 3)
    assert data_sets.any_contained("it was ANNE", ("Anne", "Emma")) == 1
    assert data_sets.any_contained("it was Jane", ("Anne", "Emma")) == 0


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("so \\boxed{7}, no: \\boxed{ 204 } since 3 is odd", 204),
        ("The answer is 033.", 33),
        ("x = 3.14, so 1,204 in all", None),
        ("1024", None),
        ("nothing", None),
    ],
)
def test_the_integer_of_an_aime_answer(answer, found):
    assert data_sets.final_integer(answer) == found


# ---- Quantiles and intervals against known values


@pytest.mark.parametrize(
    ("right", "cases", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (8, 10, 0.4902, 0.9433), (1, 1, 0.2065, 1.0), (40, 40, 0.9124, 1.0)],
)
def test_wilson_intervals_are_those_of_the_tables(right, cases, low, high):
    assert wilson(right, cases) == pytest.approx((low, high), abs=1e-4)


def test_nothing_has_neither_mean_nor_interval():
    assert (mean([]), wilson(0, 0), quantile([], 0.5)) == (None, None, None)


def test_a_quantile_that_the_count_does_not_carry_is_missing():
    values = [float(i) for i in range(1, 1001)]
    assert quantile(values, 0.5) == 500
    assert quantile(values, 0.99) == 990
    assert quantile(values, 0.999) == 999
    assert quantile(values[:999], 0.999) is None
    assert quantile(values[:99], 0.99) is None


# ---- Bad rows are named by their file and line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": "1", "all": ["2"]}\n\n{"a": ', r"rows\.jsonl, line 3 is not JSON"),
        ('{"a": 1, "all": ["2"]}\n[1]', r"rows\.jsonl, line 2.*not an object"),
        ('{"b": "1"}', r"rows\.jsonl, line 1.*no text 'a'"),
        ('{"a": true}', r"rows\.jsonl, line 1.*no text 'a'"),
        ('{"a": "1", "all": [1]}', r"line 1.*no list of texts 'all'"),
        ("\xff", "is not UTF-8"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path, text, message):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=message):
        [(line.text("a"), line.texts("all")) for line in lines(file)]


def test_a_folder_without_files_and_no_folder_are_refused(tmp_path):
    (tmp_path / "rows.csv").write_text("a")
    with pytest.raises(UsageError, match=r"has no file that ends in \.jsonl"):
        files(tmp_path)
    with pytest.raises(UsageError, match="There is no folder"):
        files(tmp_path / "gone")
