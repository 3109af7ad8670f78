"""Files are written completely or not at all, and only their owner can read them."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvchat import files
from kvchat.errors import DoesNotFitError, KvchatError, UsageError
from kvchat.files import decoded, read_text

OLD = b"what was there"
OVERFLOW = """
import resource, sys
from pathlib import Path
from kvchat import files
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    getattr(files, sys.argv[1])(Path(sys.argv[2]), b"x" * 5000)
except OSError as error:
    sys.exit(f"refused: {error.strerror}")
"""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.parametrize("write", [files.write, files.append])
def test_files_and_folders_are_private(write, tmp_path):
    path = tmp_path / "a" / "b" / "file"
    write(path, OLD)
    assert path.read_bytes() == OLD
    assert (mode(path), mode(path.parent), mode(path.parent.parent)) == (0o600, 0o700, 0o700)
    path.chmod(0o644)
    write(path, OLD)
    assert mode(path) == 0o600
    assert os.listdir(path.parent) == ["file"]


@pytest.mark.parametrize("write", ["write", "append"])
@pytest.mark.parametrize("before", [OLD, None])
def test_a_file_beyond_the_size_limit_leaves_the_old_one(write, before, tmp_path):
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)
    result = subprocess.run([sys.executable, "-c", OVERFLOW, write, path], capture_output=True, text=True, check=False)
    assert result.stderr.startswith("refused: ")
    assert (path.read_bytes() if path.exists() else b"") == (before or b"")
    assert [name for name in os.listdir(tmp_path) if name != "file"] == []


def test_a_failed_fsync_leaves_the_old_file(tmp_path, full_disk):
    path = tmp_path / "file"
    path.write_bytes(OLD)
    with pytest.raises(OSError, match="No space left"):
        files.write(path, b"new")
    assert path.read_bytes() == OLD
    assert os.listdir(tmp_path) == ["file"]


def test_writing_to_a_link_replaces_its_target(tmp_path):
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "file", tmp_path / "link"
    target.write_bytes(OLD)
    link.symlink_to(target)
    files.write(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


def test_devices_are_written_in_place():
    before = os.stat("/dev/null")
    files.write(Path("/dev/null"), b"gone")
    files.append(Path("/dev/null"), b"gone")
    after = os.stat("/dev/null")
    assert (after.st_mode, after.st_ino) == (before.st_mode, before.st_ino)
    with pytest.raises(OSError, match="No space left"):
        files.append(Path("/dev/full"), b"x")


def test_pipes_devices_and_folders_are_rejected_without_blocking(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(OLD)
    assert files.read(path) == OLD
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            files.read(place)
    with pytest.raises(OSError, match="directory"):
        files.read(tmp_path)
    with pytest.raises(OSError, match="No such device"):
        files.open_log(tmp_path / "pipe")


def test_a_name_of_255_characters_can_be_written(tmp_path):
    path = tmp_path / ("n" * 255)
    files.write(path, OLD)
    assert path.read_bytes() == OLD


# ---- Files that the user names: read, or rejected with a reason


def test_byte_order_marks_at_line_starts_are_removed(tmp_path):
    marked = b"\xef\xbb\xbfone\r\n\xef\xbb\xbftwo \xef\xbb\xbf"  # two concatenated files
    (tmp_path / "text.txt").write_bytes(marked)
    assert read_text(tmp_path / "text.txt") == "one\ntwo \ufeff"
    assert decoded(marked, "stdin") == "one\r\ntwo \ufeff"
    with pytest.raises(UsageError, match=r"Byte 4 is 0xff"):
        decoded(b"\xef\xbb\xbfa\xff", "stdin")


@pytest.mark.parametrize("form", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_read_or_rejected(tmp_path, form):
    file = tmp_path / "text.txt"
    file.write_bytes("\ufeffSchön \U0001f600.\r\n".encode(form))
    assert read_text(file) == "Schön \U0001f600.\n"
    file.write_bytes("\ufeffa\0b".encode(form))
    with pytest.raises(UsageError, match="is not a text"):
        read_text(file)
    file.write_bytes("\ufeffa\ud800b".encode(form, "surrogatepass"))
    with pytest.raises(UsageError, match="is not UTF-16"):
        read_text(file)


def test_a_file_of_exactly_the_limit_is_read(tmp_path):
    path = tmp_path / "f"
    path.write_bytes("a\r\né\x1b[31m".encode())
    assert read_text(path, limit=path.stat().st_size) == "a\né\x1b[31m"


def test_unreadable_files_are_rejected_with_the_reason(tmp_path):
    (tmp_path / "large").write_bytes(b"x" * 11)
    (tmp_path / "binary").write_bytes(b"ELF\0")
    (tmp_path / "image").write_bytes(b"\x89PNG\0")
    (tmp_path / "latin").write_bytes(b"ab\xff")
    (tmp_path / "locked").touch(mode=0)
    os.mkfifo(tmp_path / "pipe")
    reasons = {
        "large": "At most 10 B",
        "binary": "not a text file",
        "image": "not a text file",
        "latin": "is not UTF-8. Byte 2 is 0xff.",
        "pipe": "not a regular file",
        ".": "Is a directory. Name a file",
        "missing": "No such file",
        "/dev/zero": "not a regular file",
    }
    if os.geteuid():
        reasons["locked"] = "Permission denied"
    for name, reason in reasons.items():
        with pytest.raises(KvchatError, match=reason) as refused:
            read_text(tmp_path / name, limit=10)
        assert isinstance(refused.value, DoesNotFitError) == (name == "large")


def test_existing_files_and_missing_folders_are_rejected(tmp_path):
    files.check_new(tmp_path / "new")
    (tmp_path / "link").symlink_to("nowhere")
    for path, reason in ((tmp_path, "exists"), (tmp_path / "link", "exists"), (tmp_path / "a" / "b", "no folder")):
        with pytest.raises(UsageError, match=reason):
            files.check_new(path)
