"""The entry point, before the command line is imported."""

import gc
import subprocess
import sys

import pytest

from kvchat import __main__ as entry
from kvchat import process
from kvchat.__main__ import main


class InterruptsImport:
    """Ctrl+C arrives while the command line is being imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "kvchat.cli.main":
            raise KeyboardInterrupt


def test_an_interrupt_during_the_import_exits_without_a_traceback(monkeypatch):
    monkeypatch.delitem(sys.modules, "kvchat.cli.main", raising=False)
    monkeypatch.setattr(sys, "meta_path", [InterruptsImport(), *sys.meta_path])
    with pytest.raises(SystemExit) as exited:
        main()
    assert exited.value.code == 130


def test_windows_users_are_sent_to_wsl2(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit, match="WSL2"):
        main()


def test_missing_standard_streams_are_replaced_by_null_streams(monkeypatch):
    with monkeypatch.context() as patch:
        for name in ("stdin", "stdout", "stderr"):
            patch.setattr(sys, name, None)
        entry._open_streams()
        assert sys.stdout.write("said") == sys.stderr.write("said") == 4
        assert sys.stdin.read() == ""
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            stream.close()
    command = 'exec "$0" -m kvchat modes >&-'
    done = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_full_garbage_collections_are_postponed():
    before = gc.get_threshold()
    try:
        process.postpone_full_collections()
        assert gc.get_threshold() == (*before[:2], process.LATE)
    finally:
        gc.set_threshold(*before)
