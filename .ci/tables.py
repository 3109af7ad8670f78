#!/usr/bin/env python3
"""Print the READMEs' tables, made from the committed results and the action table; a test compares them.

``.ci/tables.py --write`` puts each in place of what stands between ``<!-- its name -->`` and ``<!-- end -->``; a result
in a file of another name is the table of that name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvchat.bench.frame import load
from kvchat.bench.report import made_by, rendered
from kvchat.tui.actions import ACTIONS
from kvchat.tui.rebinding import describe_keys

ROOT = Path(__file__).parents[1]
READMES = tuple(ROOT / name for name in ("README.md", "kvchat/bench/README.md", "kvchat/tui/README.md"))
RESULTS = ROOT / "kvchat" / "bench" / "results"
BUDGET = "budget=256"  # of several the one that stands there
# Of a paper the table that stands in the README.
SHOWN = {
    "paper-asr-kf-egr": "table-1",
    "paper-freekv": "query-source",
    "paper-lazy-pruning": "table-1",
    "paper-synckv": "table-3",
}
# Results by the front table's columns, and how it calls a variant.
RECALLED = {
    "SmolLM2-135M": "recall-smollm2",
    "SmolLM2, 6,600 tokens": "recall-smollm2-long",
    "Gemma 3 270M": "recall-gemma",
    "Gemma, 8,000 tokens": "recall-gemma-long",
}
MODES = {
    "speculative:budget=256": "**speculative, 256 tokens**",
    "speculative:budget=128": "speculative, 128 tokens",
    "speculative:budget=256,profile=paper": "FreeKV, 256 tokens",
    "freeze": "freeze",
    "sync": "sync",
    "streaming:budget=512": "streaming, 512 tokens",
}
PLACE = re.compile(r"(?<=<!-- )(?!end)([\w-]+)( -->\n\n).*?(?=\n\n<!-- end -->)", re.DOTALL)


def keys() -> str:
    """The table of keys of the chat: the actions that have one, with their commands."""
    rows = [
        [describe_keys(action, {}), f"`{action.line}`" if action.command else "", action.doc.replace("|", "\\|")]
        for action in ACTIONS
        if action.keys and action.scope in ("app", "chat", "prompt", "transcript")
    ]
    return _table(["key", "command", "what it does"], rows, others="---")


def write() -> None:
    """Put all tables into the READMEs."""
    for readme in READMES:
        text = readme.read_text(encoding="utf-8")
        readme.write_text(PLACE.sub(lambda place: place[1] + place[2] + table(place[1]), text), encoding="utf-8")


def table(name: str) -> str:
    """The table of this name: one of ``TABLES``, or the report of a result."""
    if name not in TABLES:
        return report(name)
    return TABLES[name]()


def decode(name: str = "decode") -> str:
    """Time per token, and how many times as fast as ``generate``, a row per variant."""
    return _times(name, lambda row: f"{row['times_as_fast']['generate']:.2f}", "times as fast")


def beside() -> str:
    """Time per token, and what is kept of the speed beside busy processes."""
    return _times("decode-load", lambda row: f"{100 * row['kept']:.0f} %", "kept")


def recalled() -> str:
    """Of the facts that full recalls those that a mode does, a column for each of ``RECALLED``."""
    counts = [*map(_recalled, RECALLED.values())]
    rows = [[words, *(f"{found[at]} of {found[-1]}" for found in counts)] for at, words in enumerate(MODES.values())]
    return _table(["of the facts that full recalls", *RECALLED], rows)


def _recalled(name: str) -> list[int]:
    """How many questions of a result each of ``MODES`` answers of those that full does, and how many full does."""
    right: dict[str, set[tuple[Any, ...]]] = {variant: set() for variant in (*MODES, "full")}
    for row in load(RESULTS / f"{name}.json")["rows"]:
        if row["right"] and row["variant"] in right:
            right[row["variant"]].add((row["tokens"], row["depth"], row["case"]))
    return [len(found & right["full"]) for found in right.values()]


def _times(name: str, figure: Callable[[dict[str, Any]], str], head: str) -> str:
    result = load(RESULTS / f"{name}.json")
    cells = {(row["variant"], row["context"]): row for row in result["rows"]}
    contexts = sorted({context for _, context in cells})
    rows = []
    for variant in dict.fromkeys(variant for variant, _ in cells):
        row = [f"transformers `{variant}`" if variant == "generate" else variant]
        for context in contexts:
            found = cells[variant, context]
            row += [f"{found['ms']:.1f} ms", figure(found)]
        rows.append(row)
    heads = [text for context in contexts for text in (f"{context:,} tokens", head)]
    return _table(["mode", *heads], rows) + "\n\n" + made_by(result)


def report(name: str) -> str:
    """The tables of a result as ``kvchat bench report`` prints them."""
    result = load(RESULTS / f"{name}.json")
    if name in SHOWN:
        result["parts"] = {SHOWN[name]: result["parts"][SHOWN[name]]}
    if result["experiment"] == "coverage":
        result["summary"] = [row for row in result["summary"] if row["variant"].endswith(BUDGET)]
    return rendered([result])


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], others: str = "---:") -> str:
    ruler = ["---", *[others] * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ruler, *rows))


TABLES = {
    "keys": keys,
    "recalled": recalled,
    "decode": decode,
    "decode-bfloat16": partial(decode, "decode-bfloat16"),
    "decode-load": beside,
}

if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write()
    else:
        print("\n\n".join(made() for made in TABLES.values()))
