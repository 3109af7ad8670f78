"""The list of files at servers, which several kvchat write."""

import subprocess
import sys

from kvchat.remote import slot_files

ROOT, EACH = "http://127.0.0.1:8080", 40
NOTING = f"""
import sys
from kvchat.remote import slot_files
input()
for number in range({EACH}):
    slot_files.note({ROOT!r}, f"{{sys.argv[1]}}{{number}}", 9)
"""


def test_what_two_kvchat_note_at_once_and_a_third_deletes_is_all_there(monkeypatch, tmp_path):
    monkeypatch.setenv("KVCHAT_DATA_DIR", str(tmp_path / "data"))
    slot_files.note(ROOT, "old", 9)
    noting = [subprocess.Popen([sys.executable, "-c", NOTING, name], stdin=subprocess.PIPE, text=True) for name in "ab"]
    for process in noting:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    slot_files.mark_deleted("old")
    for process in noting:
        process.communicate()
        assert process.returncode == 0
    assert slot_files.known() == {ROOT: {f"{name}{n}": 9 for name in "ab" for n in range(EACH)} | {"old": 0}}
