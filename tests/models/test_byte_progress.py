"""The words about a download and about reading weights."""

from __future__ import annotations

import contextlib

from support.message import lacks

from kvchat.models.hub import ByteProgress


def test_speed_and_time_left_are_of_the_last_seconds() -> None:
    now, said = iter([0.0, 0.5, 2.0, 3.0, 4.0]), []
    progress = ByteProgress(said.append, "Downloading", lambda: next(now))
    for done in (100, 150, 200, 250, 400):
        with contextlib.suppress(StopIteration):
            progress.tell(done * 2**20, 400 * 2**20)
    first, *others = said
    assert first == "Downloading 100 MiB of 400 MiB"
    expected = (
        ("200 MiB of 400 MiB", "50.0 MiB/s", "4.0 s"),
        ("250 MiB of 400 MiB", "50.0 MiB/s", "3.0 s"),
        ("400 MiB of 400 MiB", "75.0 MiB/s", "0 ms"),
    )
    assert not [lacks(line, *facts) for line, facts in zip(others, expected, strict=True) if lacks(line, *facts)]
