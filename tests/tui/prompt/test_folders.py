"""Folders are read beside the loop: what is known is told at once, and what was read is told when it has come."""

from __future__ import annotations

import threading

from support.app_driver import wait_for

from kvchat.tui.prompt import mentions
from kvchat.tui.prompt.mentions import Entry, FolderReader


def test_files_and_folders_with_their_sizes(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    found = {entry.name: entry for entry in mentions.read(f"{tmp_path}/")}
    assert found == {
        "sub": Entry("sub", is_folder=True),
        "a.txt": Entry("a.txt", size=3),
        "broken": Entry("broken"),
    }
    assert mentions.read(f"{tmp_path}/nowhere/") == ()


def test_what_lies_below_the_present_folder_comes_behind_it_and_ends(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a/b/deep.py", "a/near.py", ".git/config", "node_modules/x.js", "top.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "loop").symlink_to(tmp_path)

    def names(folder: str) -> list[str]:
        return [entry.name for entry in mentions.read(folder)]

    assert sorted(names("")[:5]) == [".git", "a", "loop", "node_modules", "top.py"]
    assert sorted(names("")[5:7]) == ["a/b", "a/near.py"]
    assert names("")[7:] == ["a/b/deep.py"]
    assert names("a/")[2:] == ["b/deep.py"]
    assert sorted(names(f"{tmp_path}/a/")) == ["b", "near.py"]
    monkeypatch.setattr(mentions, "MAX_WITH_BELOW", 6)
    assert len(names("")) == 6
    monkeypatch.setattr(mentions, "WALK_S", -1)
    assert len(names("")) == 5


async def test_a_folder_that_does_not_answer_blocks_nobody_and_is_read_once_at_a_time():
    may_answer, asked, changes = threading.Event(), [], []

    def slow(folder: str) -> tuple[Entry, ...]:
        asked.append(folder)
        may_answer.wait(60)
        return (Entry("late.txt"),)

    reader = FolderReader(lambda: changes.append(1), slow)
    assert reader.entries("slow/") == reader.entries("slow/") == ()
    may_answer.set()
    await wait_for(lambda: changes)
    assert reader.entries("slow/") == (Entry("late.txt"),)
    assert asked == ["slow/"]


async def test_what_is_read_again_is_told_only_where_it_has_changed(monkeypatch):
    monkeypatch.setattr(mentions, "FRESH_S", 0.0)
    lies, asked, changes = [(Entry("a"),)], [], []
    reader = FolderReader(lambda: changes.append(1), lambda folder: asked.append(folder) or lies[0])

    async def look() -> None:
        reader.entries("x/")
        await wait_for(lambda: not reader._reading)

    await look()
    await look()
    assert (len(asked), len(changes)) == (2, 1)
    lies[0] = (Entry("a"), Entry("b"))
    await look()
    assert len(changes) == 2
    for number in range(2 * mentions.REMEMBERED):
        reader.entries(f"{number}/")
        await wait_for(lambda: not reader._reading)
    assert len(reader._known) == mentions.REMEMBERED
