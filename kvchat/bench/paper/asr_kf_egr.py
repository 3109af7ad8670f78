"""ASR-KF-EGR (freeze mode): Tables 1 to 3."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvchat.bench.frame import Row, mean, parsed, wilson
from kvchat.bench.paper.study import Lab, Part, Study, row
from kvchat.bench.recall_tasks import inside_answer
from kvchat.engine.prompt import PromptEncoder, Stored
from kvchat.engine.synthetic_text import hide, passage, sentences
from kvchat.protocol.messages import Sampling, Turn

PAPER = "freeze:profile=paper,K=32,k=2"
OURS = "freeze"
PROMPT_TOKENS = 14  # the paper has 514 tokens after generating 500
EXPLANATION = "Explain quantum entanglement."
EXPLANATION_TOKENS = 269
SAMPLING = Sampling(temperature=0.7, top_k=40, top_p=0.9, seed=0)


@dataclass(frozen=True)
class Settings:
    """Table 1 generates ``tokens`` tokens; Table 2 asks for ``cases`` passkeys, ``inside`` tokens into an answer."""

    tokens: int = 500
    cases: int = 4
    prompt_tokens: int = 1500
    inside: int = 300


def _variants(settings: Settings) -> list[str]:
    return ["full", PAPER, OURS]


def _memory(lab: Lab) -> list[Row]:
    published = {
        "full": {"total tokens": 514, "active at the end": 514, "compression": 0.0, "seconds": 7.55},
        PAPER: {"total tokens": 514, "active at the end": 170, "compression": 0.6693, "seconds": 38.96},
    }
    text = passage(sentences(0), PROMPT_TOKENS, lab.model.tokenizer)
    asked, tokens = lab.model.tokenizer.encode(text)[:PROMPT_TOKENS], lab.settings.tokens
    return _each_generated(lab, asked, tokens, published)


def _explanation(lab: Lab) -> list[Row]:
    published = {
        "full": {"active at the end": 269, "compression": 0.0},
        PAPER: {"active at the end": 119, "compression": 0.5576},
    }
    asked = PromptEncoder(lab.model.tokenizer).encode((Turn("user", EXPLANATION),), Stored()).ids
    tokens = max(1, EXPLANATION_TOKENS - len(asked))
    rows = _each_generated(lab, asked, tokens, published)
    exact, *_ = (each["ids"] for each in rows)
    for each in rows:
        alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(exact, each["ids"], strict=False))
        each["measured"] |= {"tokens as full's": sum(1 for _ in alike)}
    return rows


def _each_generated(lab: Lab, prompt: Sequence[int], tokens: int, published: dict[str, dict[str, float]]) -> list[Row]:
    variants = _variants(lab.settings)
    return lab.each(variants, lambda variant: _generated(lab, variant, prompt, tokens, published.get(variant)))


def _generated(lab: Lab, variant: str, prompt: Sequence[int], tokens: int, published: dict[str, float] | None) -> Row:
    logits = lab.walk.begin(prompt, parsed(variant), tokens)
    seconds, active, ids, began = 0.0, [], [], time.perf_counter()
    for token in lab.generate(logits, tokens, SAMPLING):
        seconds += time.perf_counter() - began  # counting the tokens read is not timed
        ids.append(token)
        active.append(round(lab.walk.tokens_read(), 1))
        began = time.perf_counter()
    measured = {
        "total tokens": lab.walk.runner.kv.total,
        "active at the end": active[-1],
        "compression": 1 - active[-1] / lab.walk.runner.kv.total,
        "active, mean": mean(active),
        "seconds": seconds,
    }
    return row(variant, measured, published, ids=ids, text=lab.model.tokenizer.decode(ids))


def _passkeys(lab: Lab) -> list[Row]:
    asked = itertools.product(_variants(lab.settings), (0, lab.settings.inside))
    rows = {f"{variant}, asked after {inside} tokens": (variant, inside) for variant, inside in asked}

    def retrieved(label: str) -> Row:
        variant, inside = rows[label]
        right = list(_recalled(lab, variant, inside))
        low, high = wilson(sum(right), len(right)) or (0.0, 1.0)
        measured = {"retrieved": f"{sum(right)} of {len(right)}", "share": mean(right)}
        measured |= {"95 %": f"{100 * low:.0f} – {100 * high:.0f}"}
        return row(label, measured, {"retrieved": "1 of 1"} if variant == PAPER and not inside else {})

    return lab.each(rows, retrieved)


def _recalled(lab: Lab, variant: str, inside: int) -> Iterator[bool]:
    """Yield whether each case is answered: passkey in the prompt, ``inside`` decoded story tokens, the question."""
    tokenizer = lab.model.tokenizer
    for number in range(lab.settings.cases):
        case = hide(f"0/{number}", lab.settings.prompt_tokens, tokenizer)
        prompt, given = PromptEncoder(tokenizer).encode(case.turns, Stored()).ids, list[int]()
        if inside:
            prompt, story, question = inside_answer(case.turns, inside, int(case.answer), tokenizer)
            given = [*story, *question]
        yield case.answer in lab.answer(prompt, variant, given)


PARTS = {
    "table-1": Part(
        "Table 1: active K/V over a generation",
        'The paper ran LLaMA-3 8B on a GPU. "Active" counts the tokens that the last step read, before it froze any '
        "itself (mean over layers and KV heads). profile=paper flags every token outside the window, as the paper's "
        "counts imply. Plain freeze is kvchat's own rule, which freezes nothing in short texts. Times depend on what "
        "else runs on the machine.",
        _memory,
    ),
    "table-2": Part(
        "Table 2: passkey retrieval",
        "The paper asks for one passkey at the end of the prompt, where prefill has read everything. Asking in the "
        "middle of an answer is harder: by then, tokens are frozen.",
        _passkeys,
    ),
    "table-3": Part(
        "Table 3: active K/V of an explanation",
        "Prompt and answer together are as long as in the paper. Every row has the same prompt, seed and sampling; the "
        "result file has the texts. Do not expect physics from a 17M model.",
        _explanation,
    ),
}
STUDY = Study("asr-kf-egr", "freeze mode: active K/V and retrieval", PARTS, _variants)
