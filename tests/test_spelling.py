"""US spelling, as in every interface used here."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
BRITISH = re.compile(
    r"cancell(ed|ing)|labell|modell(ed|ing)|travell|signall|totall(ed|ing)|colour|behaviour|favour|honour|neighbour"
    r"|harbour|humour|labour|\bcentre|\bmetre|licence|defence|grey|artefact|analys(e\b|ed|ing)|catalogue|dialogue"
    r"|whilst|judgement|focuss|fulfil\b"
    r"|(initial|optim|normal|real|organ|serial|synchron|summar|recogn|util|minim|maxim|token|special|general|character"
    r"|visual|priorit|capital|vector|random|custom|author|local|final|quant)is(e|ing|ation)",
    re.IGNORECASE,
)
# Not ours: names of libraries, the words of models and books, and texts that were measured as they are.
OTHERS = re.compile(r"CancelledError|\.cancelled\(\)|quantise=int8|the harbour")
FOLDERS = ("kvchat", "tests", "themes", ".ci")


def written() -> list[Path]:
    files = [
        path for folder in FOLDERS for suffix in ("py", "md", "toml") for path in (ROOT / folder).rglob(f"*.{suffix}")
    ]
    return [*files, *ROOT.glob("*.md"), *ROOT.glob("*.toml")]


def test_spelling_is_american() -> None:
    files = [path for path in written() if path != Path(__file__)]
    assert len(files) > 500
    assert not [
        f"{path.relative_to(ROOT)}: {found[0]}"
        for path in files
        for found in BRITISH.finditer(OTHERS.sub("", path.read_text("utf-8")))
    ]
