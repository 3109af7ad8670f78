"""Bad rows are named by their file and line."""

from __future__ import annotations

import pytest

from kvchat.bench.texts import files, lines
from kvchat.errors import UsageError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": "1", "all": ["2"]}\n\n{"a": ', r"rows\.jsonl, line 3 is no JSON"),
        ('{"a": 1, "all": ["2"]}\n[1]', r"rows\.jsonl, line 2.*no object"),
        ('{"b": "1"}', r"rows\.jsonl, line 1.*no text 'a'"),
        ('{"a": true}', r"rows\.jsonl, line 1.*no text 'a'"),
        ('{"a": "1", "all": [1]}', r"line 1.*no list of texts 'all'"),
        ("\xff", "is not UTF-8"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path, text, message):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=message):
        [(line.text("a"), line.texts("all")) for line in lines(file)]


def test_a_folder_without_files_and_no_folder_are_refused(tmp_path):
    (tmp_path / "rows.csv").write_text("a")
    with pytest.raises(UsageError, match=r"has no file that ends in \.jsonl"):
        files(tmp_path)
    with pytest.raises(UsageError, match="There is no folder"):
        files(tmp_path / "gone")
