"""``@file``: which words are files, what is sent for them, and completion."""

import pytest

from kvchat.conversations.attachments import fenced
from kvchat.errors import KvchatError, UsageError
from kvchat.tui.prompt import mentions
from kvchat.tui.prompt.mentions import Part

LIMIT = 1000


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("notes.txt", "a file.md", 'Bob\'s "best" (1).txt', "home/at home.txt", "sub/Deep.py", "sub/.hidden"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"in {name}")
    return tmp_path


def attached(text: str, limit: int = LIMIT) -> str:
    return mentions.attach([Part(text)], limit)


@pytest.mark.parametrize(
    ("typed", "name", "written"),
    [
        ("what is in @notes.txt?", "notes.txt", "what is in notes.txt?"),
        ('"@notes.txt" or @./sub/Deep.py.', "./sub/Deep.py", '"@notes.txt" or ./sub/Deep.py.'),
        ('sum up @"a file.md", please', "a file.md", "sum up a file.md, please"),
        ('@"~/at home.txt"\nread it', "~/at home.txt", "~/at home.txt\nread it"),
        ("@'a file.md' dropped", "a file.md", "a file.md dropped"),
        (r"@a\ file.md, dropped", "a file.md", "a file.md, dropped"),
    ],
)
def test_mentioned_files_are_sent_before_the_text(folder, typed, name, written):
    text = (folder / name.replace("~", "home")).read_text()
    assert attached(typed) == f"{fenced(name, text)}\n\n{written}"


@pytest.mark.parametrize(
    "dropped",
    [
        r"""'Bob'\''s "CV" (1).txt'""",  # GNOME, Konsole
        """'Bob'"'"'s "CV" (1).txt'""",  # kitty
        r"""Bob\'s\ \"CV\"\ \(1\).txt""",  # iTerm2, WezTerm
        """Bob's "CV" (1).txt""",
    ],
)
def test_dropped_files_are_found_from_any_terminal(folder, dropped):
    name = """Bob's "CV" (1).txt"""
    (folder / name).write_text("his")
    assert mentions.unquoted(dropped) == name
    assert attached(mentions.mention(name)) == fenced(name, "his")
    if dropped != name:
        assert attached(f"@{dropped} dropped") == f"{fenced(name, 'his')}\n\n{name} dropped"


def test_other_text_pasted_behind_an_at_sign_is_unchanged(folder):
    file = f"{folder}/notes.txt"
    for text in (file, f"{file} ", f"'{folder}/a file.md'", f"{file} and why?", f"{file} {folder}/none", "it's", ""):
        assert mentions.dropped(text) == text


def test_a_file_is_attached_once():
    assert attached(" @notes.txt ") == fenced("notes.txt", "in notes.txt")
    assert attached("@notes.txt and @notes.txt").count("File notes.txt") == 1


@pytest.mark.parametrize(
    "text",
    ["me@notes.txt", "a @ b", "@dataclass(frozen=True)", "@pytest.fixture", "@app.get('/x')", "thanks @anna!", "@"],
)
def test_other_at_signs_are_text(text):
    assert attached(text) == text


def test_escaped_mentions_and_pastes_are_literal():
    assert attached(r"see \@notes.txt") == "see @notes.txt"
    assert mentions.attach([Part("look: "), Part("@notes.txt \\@x", is_typed=False)], LIMIT) == (
        "look: @notes.txt \\@x"
    )
    pasted = '@notes.txt @dataclass @pytest.mark.slow, @"a fil.md" @/no/such'
    assert attached(mentions.literal(pasted)) == pasted


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("@note.txt", '"notes.txt"?'),
        ("@other.csv", '"other.csv"'),
        ("@./other", "./other"),
        ('@"a fil.md"', '"a file.md"?'),
        ("@sub", "directory"),
        ("@/" + "x" * 5000, "no file"),
    ],
)
def test_a_wrong_path_is_refused_with_a_suggestion(text, reason):
    with pytest.raises(UsageError) as refused:
        attached(text)
    assert reason in str(refused.value)


def test_a_link_that_leads_nowhere_is_not_suggested_in_its_own_place(folder):
    (folder / "dangling.md").symlink_to(folder / "gone.md")
    (folder / "circle.md").symlink_to(folder / "circle.md")
    for name in ("dangling.md", "circle.md"):
        with pytest.raises(KvchatError, match="cannot be read") as refused:
            attached(f"@{name}")
        assert "mean" not in str(refused.value)


def test_the_size_limit_covers_all_files_together():
    assert attached("@notes.txt @sub/Deep.py", limit=26).count("File ") == 2
    with pytest.raises(KvchatError, match=r"sub/Deep\.py"):
        attached("@notes.txt @sub/Deep.py", limit=25)


@pytest.mark.parametrize(
    ("before", "texts"),
    [
        ("sum up @", ['@"a file.md" ', "@home/", "@notes.txt ", "@sub/"]),
        ("sum up @NO", ["@notes.txt "]),
        ("@o", ["@home/", "@notes.txt ", '@"home/at home.txt" ']),
        ("@dee", ["@sub/Deep.py "]),
        ("@ntx", ["@notes.txt "]),
        ("@sdp", ["@sub/Deep.py "]),
        ("@hidden", []),
        ("@sub/", ["@sub/Deep.py "]),
        ("@sub/.", ["@sub/.hidden "]),
        ('@"a f', ['@"a file.md" ']),
        ("@~/", ['@"~/at home.txt" ']),
        ("@nowhere/", []),
        ("@notes.txt", []),
    ],
)
def test_paths_are_completed(before, texts):
    offer = mentions.offer(before, mentions.read)
    assert [suggestion.text for suggestion in offer.suggestions] == texts
    assert before.endswith(offer.typed)


@pytest.mark.parametrize(("before", "takes"), [("@notes", True), ("@notes.txt", False), ("@notes.txt.", False)])
def test_enter_sends_a_complete_mention(before, takes):
    offer = mentions.offer(
        before, lambda _folder: list(map(mentions.Entry, ["notes.txt", "notes.txt.old", "sub/notes.txt"]))
    )
    assert offer.suggestions
    assert offer.takes_by_enter == takes


@pytest.mark.parametrize("before", ["", "me@", "@notes.txt ", '@"a" b'])
def test_nothing_is_completed_elsewhere(before):
    assert mentions.offer(before, mentions.read) is None
