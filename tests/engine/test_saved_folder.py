from __future__ import annotations

import os

from kvchat.engine.prefix_cache import SavedFolder


def test_the_least_recently_used_files_give_way(tmp_path):
    folder = SavedFolder(tmp_path, limit=100)
    for age, name in enumerate(("new", "old", "oldest")):
        path = folder.path(name)
        path.write_bytes(b"x" * 30)
        os.utime(path, (1000 - age, 1000 - age))
    folder.touch(folder.path("oldest"))
    assert folder.make_room(folder.path("mine"), 40) == 40
    assert [path.stem for path in folder.latest_first()] == ["oldest", "new"]


def test_a_conversation_larger_than_the_limit_is_kept_up_to_it(tmp_path):
    folder = SavedFolder(tmp_path / "absent", limit=100)
    assert folder.make_room(folder.path("mine"), 500) == 100


def test_none_gives_way_to_one_that_would_not_fit_alone(tmp_path):
    folder = SavedFolder(tmp_path, limit=100)
    for name in ("one", "other"):
        folder.path(name).write_bytes(b"x" * 30)
    assert folder.make_room(folder.path("mine"), 101) == 40
    assert len(folder.latest_first()) == 2
    assert folder.make_room(folder.path("mine"), 100) == 100
    assert folder.latest_first() == []


def test_an_imported_id_names_no_place_outside(tmp_path):
    assert SavedFolder(tmp_path, 1).path("../../x").parent == tmp_path
