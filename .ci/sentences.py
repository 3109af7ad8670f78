#!/usr/bin/env python3
"""Print the READMEs' sentences with figures, made from the committed results; a test finds each in its README.

``SENTENCES`` says which each must have. A figure that no kept result has is marked *not kept* there.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from kvchat import paths
from kvchat.bench.frame import load
from kvchat.config.modes import SpeculativeParameters
from kvchat.engine.calibration import load as load_calibration

ROOT = Path(__file__).parents[1]
FRONT, BENCH = (ROOT / name for name in ("README.md", "kvchat/bench/README.md"))
RESULTS = BENCH.parent / "results"
BASELINE = "sliding window, recomputed"
WANTED = 0.2  # of the head-steps, for which kvchat calibrate proposes tau


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
    told = []
    for name in ("decode-load-1", "decode-load"):
        kept = [row["kept"] for row in _rows(_read(name)) if row["variant"] != "generate"]
        told.append(f"{100 * min(kept):.0f} to {100 * max(kept):.0f} %")
    one, two = told
    return f"Beside one busy process on the same two cores the modes keep {one} of their quiet speed, beside two {two}"


def longer() -> str:
    """How much longer a token of speculative mode takes after twice the tokens, and what of that is the first layer."""
    times = {
        (name, row["variant"]): row["times_shortest"]
        for name in ("lengths", "lengths-bfloat16")
        for row in _rows(_read(name))
    }  # of the longest context, which comes last
    ours, without = (times["lengths", f"speculative{rest}"] for rest in ("", ":first_full=false"))
    return (
        f"After twice the tokens a token of speculative takes {100 * (ours - 1):.0f} % longer in float32, "
        f"{100 * (without - 1):.0f} % where the first layer is not read whole, and "
        f"{100 * (times['lengths-bfloat16', 'speculative'] - 1):.0f} % in bfloat16"
    )


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


def proposed() -> str:
    """The front README's sentence on the tau that the shipped calibration gives."""
    (file,) = paths.bundled_calibration_dir().glob("*.json")
    default = SpeculativeParameters().tau
    return f"{default:g} is the default, {load_calibration(file).tau_for(WANTED):.2f} what `kvchat calibrate` proposes"


def at_the_end() -> str:
    """What freeze reads of the whole text, beside the mean over all steps."""
    rows = _by_variant("perplexity")
    stored = rows["full"]["read_end"]
    return (
        f"at the end of a passage it reads {100 * rows['freeze']['read_end'] / stored:.0f} % of the text, and "
        f"{100 * rows['freeze']['read_share']:.0f} % in the mean. The paper's setting reads "
        f"{100 * rows['freeze:profile=paper']['read_share']:.0f} %"
    )


def retrieval() -> str:
    """What retrieval is worth beside a window of the same budget."""
    kl = _divergences("agreement")
    told = (
        f"{kl[f'speculative:budget={budget}']:.3f} nats and streaming by {kl[f'streaming:budget={budget}']:.3f}"
        for budget in (256, 512)
    )
    return "With 256 tokens speculative diverges by " + ", with 512 by ".join(told)


def published() -> str:
    """What the papers' own settings are worth beside kvchat's, at one budget."""
    kl = _divergences("agreement")
    told = [
        f"{mode} by {kl[f'{mode}:profile=paper,{budget}'.rstrip(',')]:.3f} nats instead of "
        f"{kl[f'{mode}:{budget}'.rstrip(':')]:.3f}"
        for mode, budget in {**dict.fromkeys(("streaming", "speculative", "sync"), "budget=512"), "freeze": ""}.items()
    ]
    return f"with `profile=paper` {', '.join(told[:-1])} and {told[-1]}"


def found_as_published() -> str:
    """What the papers' own settings find, beside kvchat's."""
    right: Counter[tuple[str, bool]] = Counter()
    for row in _rows(_read("recall")):
        right[row["variant"].partition(":")[0], "profile=paper" in row["variant"]] += row["right"]
    told = [
        f"{mode} {right[mode, True]} instead of {right[mode, False]}"
        for mode in ("streaming", "speculative", "sync", "freeze")
    ]
    return f"with `profile=paper` {', '.join(told[:-1])} and {told[-1]}"


def rounded() -> str:
    """What weights and pages in 8 bits change."""
    exact, packed = (_by_variant(f"perplexity-{name}")["full"]["perplexity"] for name in ("float32", "int8-weights"))
    kl = _divergences("agreement-int8-pages")
    return (
        f"Weights in 8 bits change the bundled model's perplexity by {100 * (packed / exact - 1):+.1f} %, pages in "
        f"8 bits (`--host-dtype int8`) full's next-token distributions by {kl['full']:.4f} nats, where the choice of "
        f"pages in speculative mode counts {kl['speculative:budget=512']:.4f}"
    )


def missed() -> str:
    """That no tau finds what another one misses."""
    by_budget: dict[str, dict[str, set[tuple[Any, ...]]]] = {}
    for row in _read("recall-tau")["rows"]:
        tau, _, budget = row["variant"].partition(",budget=")
        wrong = by_budget.setdefault(budget, {}).setdefault(tau, set())
        wrong |= set() if row["right"] else {(row["task"], row["depth"], row["case"])}
    few, enough = (list(by_budget[budget].values()) for budget in ("128", "256"))
    same = "the same" if all(wrong == few[0] for wrong in few) else "other"
    return (
        f"with 128 tokens {same} {len(few[0])} questions are missed at each, with 256 {sum(map(len, enough)) or 'none'}"
    )


def sinks() -> str:
    """What is won by a window that has what sinks beyond the fourth took."""
    told = []
    for budget, name in ((256, ""), (512, "-512"), (1024, "-1024"), (256, "-4000"), (2048, "-2048")):
        rows, quarter = _by_variant(f"sweep-sinks{name}"), budget // 4
        ours, other = (
            rows[f"speculative:budget={budget},window={window},sink={sink}"]
            for window, sink in ((quarter, 32), (quarter + 28, 4))
        )
        assert ours["right"] == other["right"]
        told.append(f"{_less(other, ours)} at {budget:,}")
    return (
        f"they find the same facts and diverge less, by {told[0]} tokens, {told[1]} and {told[2]}, after 4,000 tokens "
        f"by {told[3]}; at 2,048 both diverge by {ours['kl_mean']:.4f} nats"
    )


def of_tau() -> str:
    """What corrections are worth: facts found at every budget, and divergence at the usual one."""
    rows = _by_variant("sweep-speculative-budget")
    assert len({(variant.split(",")[0], row["right"]) for variant, row in rows.items()}) == len(rows) / 4
    never, calibrated, ours = (rows[f"speculative:budget=512,tau={tau}"]["kl_mean"] for tau in ("-2", "0.49", "0.8"))
    return (
        f"at each budget every tau finds the same, and at 512 tokens 0.8 diverges by {ours:.4f} nats where -2 and 0.49 "
        f"diverge by {never:.4f} and {calibrated:.4f}"
    )


def split() -> str:
    """What a larger window and a quarter for sinks change at 1,024 tokens."""
    rows = _by_variant("sweep-speculative-split")
    quarter, half, sinks = (
        rows[f"speculative:budget=1024,{params}"]
        for params in ("sink=32,window=256", "sink=32,window=512", "sink=256,window=256")
    )
    return (
        f"Of 1,024 tokens a quarter for sinks diverges by {sinks['kl_mean']:.4f} nats where a page of them diverges by "
        f"{quarter['kl_mean']:.4f}, and a window of a half by {half['kl_mean']:.4f}"
    )


def windows() -> str:
    """What windows find in a longer text, where they leave fewer pages to retrieve."""
    rows = _by_variant("sweep-windows")
    found = [
        " and ".join(
            str(rows[f"speculative:budget={budget},window={budget * part // 4}"]["right"]) for budget in (256, 512)
        )
        for part in (1, 2, 3)
    ]
    cases = next(iter(rows.values()))["cases"]
    return f"a quarter finds {found[0]} of {cases}, a half {found[1]}, three quarters {found[2]}"


def sinks_of_streaming() -> str:
    """What more sinks are worth in streaming mode."""
    rows = _by_variant("sweep-streaming-sink")
    small, large = (
        _less(*(rows[f"streaming:budget={budget},sink={sink}"] for sink in (4, 32))) for budget in (256, 512)
    )
    return f"four sinks diverge {small} less at 256 tokens and {large} less at 512 than a page of them"


def floors() -> str:
    """What freeze's floor trades."""
    rows = _by_variant("sweep-freeze-floor")
    low, ours, high = (rows[f"freeze:floor={floor},k=2"] for floor in (0, 400, 800))
    return (
        f"without a floor {ours['read_mean'] - low['read_mean']:.0f} tokens fewer are read and the divergence is "
        f"{low['kl_mean'] / ours['kl_mean']:.1f} times as large, with one of 800 "
        f"{high['read_mean'] - ours['read_mean']:.0f} more for {_less(high, ours)} less"
    )


def of_freeze() -> str:
    """The price of freeze's default beside one that reads less."""
    rows = _by_variant("sweep-freeze")
    ours, other = rows["freeze:tau=0.5,k=2"], rows["freeze:tau=1,k=2"]
    more = ours["read_mean"] - other["read_mean"]
    return f"(tau = 0.5, k = 2) reads {more:.0f} tokens more than tau = 1, k = 2 and diverges {_less(ours, other)} less"


def recomputed() -> str:
    """What a bounded cache wins over a window that is read again, and what it costs."""
    found = [row for row in _rows(_read("paper-lazy-pruning")) if row["part"] != "table-2"]
    speed = [row["measured"]["speedup"] for row in found if row["row"] != BASELINE]
    lines = {row["row"]: row["measured"]["PPL"] for row in found if row["part"] == "table-1"}
    dearest = max(lines.values()) / lines[BASELINE] - 1
    apart = abs(lines["StreamingLLM"] - lines["Ours (Lazy, Slack, Max_Drop)"])
    return (
        f"a bounded cache is {min(speed):.0f} to {max(speed):.0f} times as fast, and costs {100 * dearest:.1f} % of "
        f"perplexity beyond the cap, none within it. Dropping one token at every step or 32 at once differs by "
        f"{apart:.2f} in perplexity"
    )


def of_streaming() -> str:
    """The price of streaming's default beside a prune at every token."""
    rows = [row for name, row in _by_variant("sweep-streaming").items() if "budget=512" in name]
    ours = min(rows, key=lambda row: row["kl_mean"])
    least = min(row["read_mean"] for row in rows)
    R, delta = (part.partition("=")[2] for part in ours["variant"].split(",")[1:])
    more = ours["read_mean"] - least
    return f"(R = {R}, delta = {delta}) diverges least at both budgets, and reads {more:.0f} tokens more"


def of_sync() -> str:
    """What sync's default costs beside others."""
    rows = _by_variant("sweep-sync")
    ours, dynamic, always = (
        rows[f"sync:budget=256,{params}"] for params in ("rho=0.5,m=5", "rho=0,m=5", "rho=0.5,m=1")
    )
    return (
        f"rho = 0 diverges {_less(dynamic, ours)} less at the same number of tokens, but fetches all of a follower's "
        "tokens at an anticipation where half of them stay. m = 1 chooses five times as often for "
        f"{_less(always, ours)} less"
    )


def _less(one: dict[str, Any], other: dict[str, Any]) -> str:
    return f"{100 * (1 - one['kl_mean'] / other['kl_mean']):.0f} %"


def _read(name: str) -> dict[str, Any]:
    return load(RESULTS / f"{name}.json")


def _rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = result.get("summary", result["rows"])
    return rows


def _by_variant(name: str) -> dict[str, dict[str, Any]]:
    return {row["variant"]: row for row in _rows(_read(name))}


def _divergences(name: str) -> dict[str, float]:
    return {variant: row["kl_mean"] for variant, row in _by_variant(name).items()}


SENTENCES = {
    FRONT: (claim, asked, saved, busy, proposed),
    BENCH: (
        longer,
        *(at_the_end, retrieval, published, found_as_published, rounded, corrected, missed, speculation, all_turns),
        *(
            of_tau,
            split,
            windows,
            sinks,
            frontier,
            of_freeze,
            floors,
            of_streaming,
            sinks_of_streaming,
            of_sync,
            recomputed,
        ),
    ),
}

if __name__ == "__main__":
    print("\n\n".join(sentence() for of_readme in SENTENCES.values() for sentence in of_readme))
