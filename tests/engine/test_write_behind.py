from __future__ import annotations

import threading

import numpy as np
import torch

from kvchat.engine.prefix_cache import Job, SavedFolder, WriteBehind
from kvchat.engine.prompt import Stored
from kvchat.kv.geometry import Geometry
from kvchat.kv.memory.host_pool import HostPool
from kvchat.kv.memory.page_file import TOKEN, PageFile
from kvchat.kv.memory.pages import Pages

GEOMETRY = Geometry(layers=1, q_heads=1, kv_heads=1, d_k=2, d_v=2, dtype=torch.float32, page=4)


class HeldFile(PageFile):
    """Stops in the middle of writing its second page until it is let on."""

    def __init__(self, path) -> None:
        super().__init__(path, GEOMETRY, {})
        self.reached, self.let_on = threading.Event(), threading.Event()

    def write(self, page, *rest) -> None:
        if page == 1:
            self.reached.set()
            assert self.let_on.wait(60)
        super().write(page, *rest)


def job_of(file: PageFile, layers: torch.Tensor, stored: Stored) -> Job:
    rows = np.zeros(len(stored.ids), TOKEN)
    rows["id"] = stored.ids
    return Job(file, stored, 0, rows, lambda: Pages([False] * len(layers), [layers], []))


def test_an_interruption_waits_for_no_disk_and_takes_nothing_afterwards(tmp_path):
    file, stored = HeldFile(tmp_path / "a.kv"), Stored(list(range(14)))
    layers = torch.arange(64, dtype=torch.float32).view(4, 1, 2, 4, 2)
    before = layers.clone()
    writer = WriteBehind(SavedFolder(tmp_path, 2**30), GEOMETRY.page)
    writer.begin([job_of(file, layers, stored)])
    assert file.reached.wait(60)
    writer.interrupt()  # while the second page is being written
    assert stored.saved == 4
    layers.zero_()
    writer.begin([])
    file.let_on.set()
    writer.finish(60)
    assert file.rows()["id"].tolist() == list(range(8))
    pool = HostPool(GEOMETRY, torch.device("cpu"))
    assert file.read(pool, 8) == 8
    assert torch.equal(pool.layers[0][:2], before[:2])


def test_what_does_not_fit_is_left_out(tmp_path):
    file, stored = PageFile(tmp_path / "a.kv", GEOMETRY, {}), Stored(list(range(14)))
    writer = WriteBehind(SavedFolder(tmp_path, 4096 + 2 * file.record_bytes(False)), GEOMETRY.page)
    writer.begin([job_of(file, torch.zeros(4, 1, 2, 4, 2), stored)])
    writer.finish(60)
    assert stored.saved == 8
    assert len(file.rows()) == 8
    assert "kv.saved_gib" in writer.problem


def test_a_file_that_is_gone_is_written_from_its_beginning_next_time(tmp_path):
    file, stored = PageFile(tmp_path / "a.kv", GEOMETRY, {}), Stored(list(range(14)), saved=8)
    writer = WriteBehind(SavedFolder(tmp_path, 2**30), GEOMETRY.page)
    job = job_of(file, torch.zeros(4, 1, 2, 4, 2), stored)
    job.first, job.rows, job.saved = 2, job.rows[8:], 8
    writer.begin([job])
    writer.finish(60)
    assert stored.saved == 0
    assert writer.problem == ""


def test_where_no_thread_can_be_started_nothing_is_saved_and_it_is_told(tmp_path, monkeypatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    file, stored = PageFile(tmp_path / "a.kv", GEOMETRY, {}), Stored(list(range(14)))
    writer = WriteBehind(SavedFolder(tmp_path, 2**30), GEOMETRY.page)
    writer.begin([job_of(file, torch.zeros(4, 1, 2, 4, 2), stored)])
    writer.finish(60)
    assert (stored.saved, writer.is_writing) == (0, False)
    assert writer.problem
