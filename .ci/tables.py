#!/usr/bin/env python3
"""Print the READMEs' tables, made from the committed results and the action table; a test compares them.

``.ci/tables.py --write`` puts each in place of what stands between ``<!-- its name -->`` and ``<!-- end -->``; a result
in a file of another name is the table of that name. Sentences with figures stand in a README's own paragraphs;
``SENTENCES`` says which each must have.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from kvchat import units
from kvchat.bench.frame import load
from kvchat.bench.report import rendered
from kvchat.tui.actions import ACTIONS
from kvchat.tui.rebinding import describe_keys

ROOT = Path(__file__).parents[1]
READMES = tuple(ROOT / name for name in ("README.md", "kvchat/bench/README.md", "kvchat/tui/README.md"))
RESULTS = ROOT / "kvchat" / "bench" / "results"
PLACE = re.compile(r"(?<=<!-- )(?!end)([\w-]+)( -->\n\n).*?(?=\n\n<!-- end -->)", re.DOTALL)
SUMMARIZED = ("full", "freeze", "streaming:budget=512", "speculative:budget=512", "sync")


def claim() -> str:
    """The front README's sentence: what speculative mode recalls, and what it reads for that."""
    result = _read("passkey")
    rows = {row["variant"]: row for row in _rows(result)}
    full, speculative = rows["full"], rows["speculative:budget=512"]
    return (
        f"recalls {speculative['right']} of {result['settings']['cases']} facts, as many as full attention "
        f"({full['right']}), reading {speculative['read_tokens']:,.0f} of {full['read_tokens']:,.0f} stored tokens"
    )


def asked() -> str:
    """The front README's sentence on freeze: what it recalls where tokens have frozen before the question."""
    rows = {row["variant"]: row for row in _rows(_read("passkey-inside"))}
    cases, inside = (_read("passkey-inside")["settings"][name] for name in ("cases", "inside"))
    full, ours, paper = (rows[name] for name in ("full", "freeze", "freeze:profile=paper"))
    return (
        f"asked {inside} tokens into the answer, freeze recalls {ours['right']} of {cases} facts reading "
        f"{ours['read_tokens']:,.0f} of {full['read_tokens']:,.0f} tokens, its paper's own rule {paper['right']} "
        f"reading {paper['read_tokens']:,.0f}"
    )


def saved() -> str:
    """The front README's sentence on freeze: what it saves at equal lengths, and at what price, beside its paper."""
    result = _read("perplexity")
    rows = {row["variant"]: row for row in _rows(result)}
    prices = [
        f"{100 * (1 - row['read_share']):.0f} % fewer tokens than full at {100 * (row['ratio'] - 1):+.1f} % perplexity"
        for row in (rows["freeze"], rows["freeze:profile=paper"])
    ]
    return (
        f"Over {result['settings']['tokens']:,} tokens of books it reads {prices[0]}; "
        f"with its paper's setting {prices[1]}"
    )


def busy() -> str:
    """The front README's sentence on other load: what the modes keep of their quiet speed."""
    kept = [row["kept"] for row in _rows(_read("decode-load")) if row["variant"] != "generate"]
    return f"the modes keep {100 * min(kept):.0f} to {100 * max(kept):.0f} % of their quiet speed"


def corrected() -> str:
    """The sentence on the calibrated tau: what it corrects, beside the default."""
    share = {row["variant"]: row["corrections"] for row in _read("decode-tau")["rows"]}
    every = max(share.values())
    ours, default = (100 * share[f"speculative:tau={tau}"] / every for tau in ("0.49", "0.8"))
    return f"tau = 0.49 corrected {ours:.0f} % of the head-steps, 0.8, the default, {default:.1f} %"


def speculation() -> str:
    """The sentence on what corrections are worth in divergence, and cost in time."""
    kl = {row["row"]: row["measured"]["KL"] for row in _read("paper-freekv")["summary"] if row["part"] == "accuracy"}
    times = _read("decode")
    context = max(row["context"] for row in times["rows"])
    ms = {row["variant"]: row["ms"] for row in times["rows"] if row["context"] == context}
    return (
        f"({kl['tau -2']:.3f} nats without any, {kl['tau 2']:.3f} with all, see FreeKV below) and hardly in the time "
        f"of a CPU, which chooses once a layer whatever tau is: on the quiet machine (first table) a token takes "
        f"{ms['speculative:tau=-2']:.1f} ms at tau = -2 and {ms['speculative']:.1f} at 0.8 after {context:,} tokens"
    )


def all_turns() -> str:
    """The sentence on ten questions over one text: right answers of all turns, the best mode first."""
    right: dict[str, int] = {}
    for row in _rows(_read("turns")):
        mode = row["variant"].partition(":")[0]
        right[mode] = right.get(mode, 0) + row["right"]
    (mode, most), *others = sorted(right.items(), key=lambda pair: -pair[1])
    *several, last = (f"{name} {number}" for name, number in others)
    asked = sum(row["cases"] for row in _rows(_read("turns"))) // len(right)
    return f"Over all turns {mode} finds {most} of {asked}, {', '.join(several)} and {last}"


def frontier() -> str:
    """The sentence on freeze's sweep: how many settings no other one beats in both."""
    rows = _rows(_read("sweep-freeze"))
    beaten = [row for row in rows if any(_beats(other, row) for other in rows)]
    return f"{len(rows) - len(beaten)} of {len(rows)} settings are on the frontier"


def _beats(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["kl_mean"] < other["kl_mean"] and one["read_mean"] < other["read_mean"]


def summary() -> str:
    """The front README's table: recall, counts and speed of the modes in their usual settings."""
    passkeys, times = _read("passkey"), _read("decode")
    rows = {row["variant"]: row for row in _rows(passkeys)}
    context = max(row["context"] for row in times["rows"])
    fast = {row["variant"]: row["times_as_fast"]["generate"] for row in times["rows"] if row["context"] == context}
    lines = [
        [
            variant.replace(":budget=", ", budget "),
            f"{rows[variant]['right']} of {passkeys['settings']['cases']}",
            f"{rows[variant]['read_tokens']:,.0f}",
            f"{rows['full']['read_tokens']:,.0f}",
            _copied(rows[variant]),
            f"{fast[variant.partition(':')[0]]:.2f}",
        ]
        for variant in SUMMARIZED
    ]
    heads = ["mode", "facts recalled", "read", "stored", "on the device", f"speed at {context:,} tokens"]
    return _table(heads, lines)


def taus() -> str:
    """The front README's table of speculative mode by tau: recall, corrections and time, in its tightest budget."""
    recall, times = _read("recall-tau"), _read("decode-tau")
    timed = [row for row in times["rows"] if row["variant"] != "full"]
    every = max(row["corrections"] for row in timed)
    budget = min(m["parameters"]["budget"] for m in recall["methods"].values() if m["mode"] != "full")
    lines = []
    for row in timed:
        found = [each for each in _rows(recall) if each["variant"] == f"{row['variant']},budget={budget}"]
        right, cases = (sum(each[name] for each in found) for name in ("right", "cases"))
        share = f"{100 * row['corrections'] / every:.0f} %"
        lines.append([row["variant"].partition(":")[2], share, f"{right} of {cases}", f"{row['ms']:.1f} ms"])
    heads = ["with", "heads corrected", f"facts recalled with {budget} tokens", f"a token of {timed[0]['context']:,}"]
    return "\n\n".join(filter(None, (_table(heads, lines), _beside(times))))


def _beside(times: dict[str, Any]) -> str:
    """Says of times that other programs took most of the processors; "" where they did not."""
    others = statistics.median(row["others"] for row in times["rows"])
    return f"*Timed while other programs took {100 * others:.0f} % of the processors.*" if others > 0.1 else ""


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
    return TABLES[name]() if name in TABLES else report(name)


def decode() -> str:
    """Time per token, and how many times as fast as ``generate``, a row per variant."""
    return _times("decode", lambda row: f"{row['times_as_fast']['generate']:.2f}", "times as fast")


def beside() -> str:
    """Time per token, and what is kept of the speed beside busy processes."""
    return _times("decode-load", lambda row: f"{100 * row['kept']:.0f} %", "kept")


def _times(name: str, figure: Callable[[dict[str, Any]], str], head: str) -> str:
    result = _read(name)
    cells = {(row["variant"], row["context"]): row for row in _rows(result)}
    contexts = sorted({context for _, context in cells})
    rows = []
    for variant in dict.fromkeys(variant for variant, _ in cells):
        row = [f"transformers `{variant}`" if variant == "generate" else variant]
        for context in contexts:
            found = cells[variant, context]
            row += [f"{found['ms']:.1f} ms", figure(found)]
        rows.append(row)
    heads = [text for context in contexts for text in (f"{context:,} tokens", head)]
    return _table(["mode", *heads], rows) + "\n\n" + _environment(result)


def report(name: str) -> str:
    """The tables of a result as ``kvchat bench report`` prints them."""
    file = RESULTS / f"{name}.json"
    return rendered([load(file)]) if file.exists() else "*Not measured yet.*"


def inside() -> str:
    """Recall of what is asked inside a long answer, a row per variant."""
    return passkey("passkey-inside")


def passkey(name: str = "passkey") -> str:
    """Recall and what it cost, a row per variant."""
    result = _read(name)
    cases = result["settings"]["cases"]
    rows = [
        [
            row["variant"].replace(":", ", ", 1).replace(",", ", ").replace(",  ", ", "),
            f"{row['right']} of {cases}",
            f"{row['read_tokens']:,.0f}",
            _copied(row),
        ]
        for row in _rows(result)
    ]
    heads = ["mode", "recalled", "tokens read", "K/V on the device"]
    return _table(heads, rows) + "\n\n" + _environment(result)


def long_run() -> str:
    """The first, middle and last tenth of a long generation."""
    result = _read("long-run")
    chosen = [result["rows"][i] for i in (0, len(result["rows"]) // 2, -1)]
    rows = [
        [
            f"{r['stored']:,}",
            f"{r['ms']:.1f} ms",
            units.size(r["kv_device_bytes"]),
            units.size(r["kv_host_bytes"]),
        ]
        for r in chosen
    ]
    heads = ["tokens stored", "step", "K/V on the device", "K/V on the host"]
    return _table(heads, rows)


def perplexity() -> str:
    """Perplexity, tokens read and time against full's, a row per variant."""
    result = _read("perplexity")
    rows = [
        [
            ", ".join(re.split("[:,]", row["variant"])),
            f"{row['perplexity']:.2f}",
            f"{100 * (row['ratio'] - 1):+.1f} %",
            f"{100 * row['ratio_standard_error']:.1f} %",
            f"{row['read_mean']:,.0f}",
            f"{100 * (1 - row['read_share']):.0f} %",
            f"{row['read_end']:,.0f}",
            f"{row['wall_ratio']:.2f}",
        ]
        for row in _rows(result)
    ]
    heads = [
        "mode",
        "perplexity",
        "over full",
        "std. error",
        "tokens read",
        "fewer",
        "read at the end",
        "times full's time",
    ]
    return _table(heads, rows) + "\n\n" + _environment(result)


def _read(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


def _rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each variant."""
    rows: list[dict[str, Any]] = result.get("summary", result["rows"])
    return rows


def _copied(row: dict[str, Any]) -> str:
    """K/V on the device; full reads what is stored where that is the same memory."""
    return units.size(row["kv_device_bytes"]) if row["kv_device_bytes"] else "none"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], others: str = "---:") -> str:
    ruler = ["---", *[others] * (len(heads) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ruler, *rows))


def _environment(result: dict[str, Any]) -> str:
    e = result["environment"]
    device = e["gpu"] or f"{e['processor']}, {e['threads']} threads"
    return f"{device}; torch {e['torch']}, transformers {e['transformers']}."


TABLES = {
    "summary": summary,
    "taus": taus,
    "keys": keys,
    "decode": decode,
    "decode-load": beside,
    "passkey": passkey,
    "passkey-inside": inside,
    "long-run": long_run,
    "perplexity": perplexity,
}

SENTENCES = {
    READMES[0]: (claim, asked, saved, busy),
    READMES[1]: (corrected, speculation, all_turns, frontier),
}

if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write()
    else:
        sentences = (sentence for of_readme in SENTENCES.values() for sentence in of_readme)
        print("\n\n".join(made() for made in (*sentences, *TABLES.values())))
