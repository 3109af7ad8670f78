"""Files are written whole or not at all, for their owner alone."""

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
FULL = """
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
def test_files_and_folders_are_their_owners(write, tmp_path):
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
def test_a_file_that_does_not_fit_leaves_the_old_one(write, before, tmp_path):
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)
    result = subprocess.run([sys.executable, "-c", FULL, write, path], capture_output=True, text=True, check=False)
    assert result.stderr.startswith("refused: ")
    assert (path.read_bytes() if path.exists() else b"") == (before or b"")
    assert [name for name in os.listdir(tmp_path) if name != "file"] == []


def test_a_write_that_fails_at_its_end_leaves_the_old_one(tmp_path, full_disk):
    path = tmp_path / "file"
    path.write_bytes(OLD)
    with pytest.raises(OSError, match="No space left"):
        files.write(path, b"new")
    assert path.read_bytes() == OLD
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_stays_and_its_file_is_replaced(tmp_path):
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "file", tmp_path / "link"
    target.write_bytes(OLD)
    link.symlink_to(target)
    files.write(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


def test_a_device_is_written_to_and_stays_one():
    before = os.stat("/dev/null")
    files.write(Path("/dev/null"), b"gone")
    files.append(Path("/dev/null"), b"gone")
    after = os.stat("/dev/null")
    assert (after.st_mode, after.st_ino) == (before.st_mode, before.st_ino)
    with pytest.raises(OSError, match="No space left"):
        files.append(Path("/dev/full"), b"x")


def test_what_need_not_have_an_end_is_neither_read_nor_waited_for(tmp_path):
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


def test_the_longest_name_can_be_written(tmp_path):
    path = tmp_path / ("n" * 255)
    files.write(path, OLD)
    assert path.read_bytes() == OLD


# ---- Files that a person names: read, or refused by name


def test_marks_of_byte_order_are_no_part_of_a_text(tmp_path):
    marked = b"\xef\xbb\xbfone\r\n\xef\xbb\xbftwo \xef\xbb\xbf"  # two files, one after the other
    (tmp_path / "text.txt").write_bytes(marked)
    assert read_text(tmp_path / "text.txt") == "one\ntwo \ufeff"
    assert decoded(marked, "stdin") == "one\r\ntwo \ufeff"
    with pytest.raises(UsageError, match=r"Byte 4 is 0xff"):
        decoded(b"\xef\xbb\xbfa\xff", "stdin")


@pytest.mark.parametrize("form", ["utf-16-le", "utf-16-be"])
def test_a_text_of_an_editor_on_windows_is_read(tmp_path, form):
    file = tmp_path / "text.txt"
    file.write_bytes("\ufeffSchön \U0001f600.\r\n".encode(form))
    assert read_text(file) == "Schön \U0001f600.\n"
    file.write_bytes("\ufeffa\0b".encode(form))
    with pytest.raises(UsageError, match="is not a text"):
        read_text(file)
    file.write_bytes("\ufeffa\ud800b".encode(form, "surrogatepass"))
    with pytest.raises(UsageError, match="is not UTF-16"):
        read_text(file)


def test_a_text_of_as_many_bytes_as_may_be_is_read_whole(tmp_path):
    path = tmp_path / "f"
    path.write_bytes("a\r\né\x1b[31m".encode())
    assert read_text(path, limit=path.stat().st_size) == "a\né\x1b[31m"


def test_what_cannot_be_read_is_refused_with_the_reason_and_never_waited_for(tmp_path):
    (tmp_path / "large").write_bytes(b"x" * 11)
    (tmp_path / "binary").write_bytes(b"ELF\0")
    (tmp_path / "image").write_bytes(b"\x89PNG\0")
    (tmp_path / "latin").write_bytes(b"ab\xff")
    (tmp_path / "locked").touch(mode=0)
    os.mkfifo(tmp_path / "pipe")
    said = {
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
        said["locked"] = "Permission denied"
    for name, reason in said.items():
        with pytest.raises(KvchatError, match=reason) as refused:
            read_text(tmp_path / name, limit=10)
        assert isinstance(refused.value, DoesNotFitError) == (name == "large")


def test_a_new_file_is_refused_where_there_is_one_or_no_folder(tmp_path):
    files.check_new(tmp_path / "new")
    (tmp_path / "link").symlink_to("nowhere")
    for path, reason in ((tmp_path, "exists"), (tmp_path / "link", "exists"), (tmp_path / "a" / "b", "no folder")):
        with pytest.raises(UsageError, match=reason):
            files.check_new(path)
