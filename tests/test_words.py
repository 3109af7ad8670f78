"""The words of kvchat: US spelling, as in every interface used here, and one word for one thing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvchat.config import modes

ROOT = Path(__file__).parents[1]
BRITISH = re.compile(
    r"cancell(ed|ing)|labell|modell(ed|ing)|travell|signall|totall(ed|ing)|colour|behaviour|favour|honour|neighbour"
    r"|harbour|humour|labour|\bcentre|\bmetre|licence|defence|grey|artefact|analys(e\b|ed|ing)|catalogue|dialogue"
    r"|whilst|judgement|focuss|fulfil\b"
    r"|(initial|optim|normal|real|organ|serial|synchron|summar|recogn|util|minim|maxim|token|special|general|character"
    r"|visual|priorit|capital|vector|random|custom|author|local|final|quant)is(e|ing|ation)",
)
# Not ours: names of libraries, the words of models and books, and texts that were measured as they are.
OTHERS = re.compile(r"CancelledError|\.cancelled\(\)|quantise=int8|the harbour")
FOLDERS = ("kvchat", "tests", "themes", ".ci")


def written() -> list[Path]:
    files = [
        path for folder in FOLDERS for suffix in ("py", "md", "toml") for path in (ROOT / folder).rglob(f"*.{suffix}")
    ]
    return [*files, *ROOT.glob("*.md"), *ROOT.glob("*.toml")]


def words(path: Path) -> set[str]:
    return set(re.findall(r"[a-z]+", OTHERS.sub("", path.read_text("utf-8")).lower()))


def test_spelling_is_american() -> None:
    files = [path for path in written() if path != Path(__file__)]
    assert len(files) > 500
    assert not [
        (path.relative_to(ROOT).as_posix(), word)
        for path in files
        for word in sorted(words(path))
        if BRITISH.search(word)
    ]


# The words that were replaced: two for one thing, or one for several.
OLD_NAMES = {
    *("Accelerated", "Aside", "Decoder", "Digests", "Guard", "KeyValueManager", "LayerFacts", "Merged", "Meter"),
    *("ModeControl", "Pieces", "Region", "Slots", "StepGraphs", "Store", "Verbs", "admit", "catch_up", "covers"),
    *("evict", "facts", "filler", "limited_by_context", "loose", "newest_slot", "outgrown", "relax", "renew", "seam"),
    *("settle", "settled", "tally", "torn", "turned", "uncalibrated", "vacant", "verbs", "verbs_for", "weighs"),
    "why_pageable",
}


def names(path: Path) -> Iterator[str]:
    """Every name that a file defines or uses."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.arg | ast.Attribute):
            yield node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else node.attr


@pytest.mark.parametrize("room", ["kv", "models", "engine"])
def test_one_word_for_one_thing(room: str) -> None:
    files = (ROOT / "kvchat" / room).rglob("*.py")
    assert not [(path.name, name) for path in files for name in names(path) if name.lstrip("_") in OLD_NAMES]


# Who names a mode: the registry, what is measured, and the mode that a session starts in.
NAMING_MODES = re.compile(r"config/modes\.py|bench/.*|cli/bench.*|protocol/messages\.py")


def test_only_the_registry_knows_modes_by_their_names() -> None:
    built_in = {cls.name for cls in modes.BUILT_IN}
    files = {path.relative_to(ROOT / "kvchat").as_posix(): path for path in (ROOT / "kvchat").rglob("*.py")}
    named = {
        name
        for name, path in files.items()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and node.value in built_in
    }
    assert "config/modes.py" in named
    assert not sorted(name for name in named if not NAMING_MODES.fullmatch(name))
