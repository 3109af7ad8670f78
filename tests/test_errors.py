import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvchat
from kvchat.errors import DoesNotFitError, EngineError, KvchatError, ModelError, UsageError, did_you_mean, resolve

PACKAGE = Path(kvchat.__file__).parent
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize(
    ("cls", "code"), [(KvchatError, 1), (UsageError, 2), (ModelError, 2), (DoesNotFitError, 3), (EngineError, 1)]
)
def test_each_error_class_has_its_exit_code(cls, code):
    assert cls("Title.").exit_code == code


def test_title_detail_and_hint_are_joined_into_sentences():
    assert str(UsageError("Title.", "Detail.", "Hint.")) == "Title. Detail. Hint."
    assert str(UsageError("Title.", hint="Hint.")) == "Title. Hint."
    assert str(UsageError("Title.")) == "Title."
    assert str(UsageError("Title.", "What a server says", "Run: x")) == "Title. What a server says. Run: x"


def test_the_closest_word_is_suggested():
    assert did_you_mean("frezee", ["full", "freeze"]) == 'Did you mean "freeze"? Known: freeze, full.'
    assert did_you_mean("xyz", ["full", "freeze"]) == "Known: freeze, full."
    assert did_you_mean("xyz", []) == "Known: none."
    assert did_you_mean("spec", ["sync", "speculative"]).startswith('Did you mean "speculative"?')
    assert did_you_mean("light", ["kvchat-dark", "kvchat-light"]).startswith('Did you mean "kvchat-light"?')
    assert did_you_mean("fulll", ["full", *map(str, range(30))]) == 'Did you mean "full"?', "no long list"


# Errors that need no hint: the beginning of the title, and why.
WITHOUT_HINT = {
    "where": "the excerpt of the file shows the place, the title says what is wrong there",
    "_reason(key, error.errors()[0], Settings)": "one sentence next to the setting's field, with the allowed values",
    "{source.origins[key]}: {problem}{source.excerpts.get(key, '')}": "the sentence before the excerpt says what to do",
    "{planned.model} cannot be planned for.": "the error that follows has its own",
    "\\n'.join(refusals)": "a line for each setting, with its place and the allowed values",
    "\\n'.join(messages)": "a line for each setting, with its place and the allowed values",
    "*_explain(cls, error.errors()[0])": "tests/config/test_modes.py checks their hints",
    "*map(visible, said['error'])": "a child process passes on all parts of its error",
}
FAMILY = {
    *("KvchatError", "UsageError", "ModelError", "DoesNotFitError", "ContextFullError", "OutOfMemoryError"),
    *("EngineError", "StoreError"),
}


def written_titles(path: Path) -> Iterator[tuple[str, bool]]:
    """The title of each error that a file creates, as written in the code, and whether it has a hint."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FAMILY):
            continue
        title = ast.unparse(node.args[0]).strip("f'\"") if node.args else ""
        has_hint = len(node.args) > 2 or any(keyword.arg == "hint" for keyword in node.keywords)
        yield title, has_hint or "did_you_mean" in ast.unparse(node)


def test_every_error_has_a_hint():
    titles = [(file, *written) for file in FILES for written in written_titles(PACKAGE / file)]
    assert len(titles) > 200
    assert not [(file, title) for file, title, is_helpful in titles if not is_helpful and title not in WITHOUT_HINT]


# ---- Words and their prefixes


KNOWN = ("mode", "model", "K", "k", "stop", "stats")


@pytest.mark.parametrize(
    ("given", "word"), [("mode", "mode"), ("mo", "mode"), ("MODEL", "model"), ("k", "k"), ("K", "K"), ("sto", "stop")]
)
def test_words_and_their_prefixes_resolve(given, word):
    assert resolve(given, KNOWN, "word") == word


@pytest.mark.parametrize(
    ("given", "reason"), [("st", "ambiguous: stats, stop"), ("stpo", 'no word "stpo".*"stop"'), ("", "no word")]
)
def test_ambiguous_and_unknown_words_are_rejected(given, reason):
    with pytest.raises(UsageError, match=reason):
        resolve(given, KNOWN, "word")
