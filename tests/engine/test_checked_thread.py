"""Threads that find no memory to begin are an error at once; Python's own wait for ever for them."""

from __future__ import annotations

import threading

import pytest

from kvchat.engine import template
from kvchat.engine.template import CheckedThread, limited


def test_work_has_begun_and_is_waited_for():
    go_on, done = threading.Event(), []
    thread = CheckedThread(lambda: (go_on.wait(), done.append(True)))
    thread.join(0.01)
    assert not done
    go_on.set()
    thread.join()
    assert done


def never_begins(run, args):
    """As a thread whose first operation finds no memory."""


def is_refused(run, args):
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("start", [never_begins, is_refused])
def test_a_thread_that_does_not_begin_is_a_lack_of_memory(start, monkeypatch):
    monkeypatch.setattr(template._thread, "start_new_thread", start)
    monkeypatch.setattr(template, "BEGINS_S", 0.01)
    with pytest.raises(MemoryError):
        limited(lambda: 7, 5, 2**30)
