"""Folders are read beside the loop: what is known is told at once, and what was read is told when it has come."""

from __future__ import annotations

import threading

from support.app_driver import wait_for

from kvchat.tui.prompt import folders
from kvchat.tui.prompt.folders import Entry, FolderReader


def test_files_and_folders_with_their_sizes(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    found = {entry.name: entry for entry in folders.read(f"{tmp_path}/")}
    assert found == {
        "sub": Entry("sub", is_folder=True),
        "a.txt": Entry("a.txt", size=3),
        "broken": Entry("broken"),
    }
    assert folders.read(f"{tmp_path}/nowhere/") == ()


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
    monkeypatch.setattr(folders, "FRESH_S", 0.0)
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
    for number in range(2 * folders.REMEMBERED):
        reader.entries(f"{number}/")
        await wait_for(lambda: not reader._reading)
    assert len(reader._known) == folders.REMEMBERED
