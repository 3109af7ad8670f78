"""Recall of one fact told in an earlier turn, mode against mode, on the same stored prompts.

Each case is a conversation of a given length: passages of text, a passkey in one early turn, the question at the end.
The prompt is prefilled once, exactly; then every variant answers greedily from it, so that variants differ only in the
tokens that their decode steps read. With ``inside`` the question comes after so many tokens of an answer, decoded in
the variant's mode as the question is: what left by then must be found again.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import kvchat
from kvchat import units
from kvchat.bench.environment import fingerprint
from kvchat.bench.reading import tokens_read
from kvchat.bench.variant import enter
from kvchat.engine.generate.prompt import PromptEncoder
from kvchat.engine.generate.stored import Stored
from kvchat.engine.session import Session
from kvchat.engine.synthetic_text import sentences
from kvchat.protocol.messages import Finished, Sampling, Turn

PASSAGES = 8
ANSWER_TOKENS = 24
STANDARD = (
    "full",
    "freeze",
    "streaming:budget=512",
    "speculative:budget=512",
    "sync",
    "sync:representatives=centroid",
    "sync:clusters=2,mem=0.7",
    "sync:clusters=2,mem=0.7,representatives=centroid",
    "sync:budget=260",
)


@dataclass(frozen=True)
class Case:
    """A conversation that ends with the question, and what the answer must contain."""

    turns: tuple[Turn, ...]
    answer: str


def cases(seed: int, n: int, tokens: int, tokenizer: Any) -> Iterator[Case]:
    """``n`` conversations of about ``tokens`` tokens, the same for the same seed."""
    for index in range(n):
        random_ = random.Random(f"{seed}/{index}")
        passkey = str(random_.randrange(10_000, 100_000))
        told = random_.randrange(PASSAGES - 2)
        turns = [Turn("user", "I will read you a story in parts."), Turn("assistant", "Go on.")]
        text = sentences(random_.randrange(2**32))
        for part in range(PASSAGES):
            passage = _passage(text, tokens // PASSAGES, tokenizer)
            turns += [Turn("user", passage), Turn("assistant", "I see.")]
            if part == told:
                turns += [Turn("user", f"The passkey is {passkey}. Remember it."), Turn("assistant", "Got it.")]
        yield Case((*turns, Turn("user", "What is the passkey?")), passkey)


@dataclass
class Row:
    """One variant's results over the cases."""

    variant: str
    right: int = 0
    read_tokens: float = 0.0
    kv_device_bytes: int = 0
    wrong: list[str] = field(default_factory=list)


def run(
    variants: Sequence[str] = STANDARD,
    *,
    model: str = "bundled",
    device: str = "auto",
    seed: int = 0,
    n: int = 40,
    tokens: int = 3000,
    inside: int = 0,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure and return plain data, ready for JSON. A variant is ``MODE[:KEY=VALUE[,KEY=VALUE...]]``.

    ``inside`` is how many tokens of an answer precede the question, 0 for a question that is a turn of its own.

    Raises:
        KvchatError: the model cannot be loaded, or a mode refuses.
    """
    session = kvchat.load(model, device=device)
    rows = [Row(name) for name in variants]
    prompt_tokens = 0
    for done, case in enumerate(cases(seed, n, tokens, session.model.tokenizer), 1):
        for row in rows:
            enter(session, row.variant)
            prompt_tokens += _answer_inside(session, case, row, inside) if inside else _answer(session, case, row)
        report(f"{done} of {n}: " + ", ".join(str(row.right) for row in rows))
    for row in rows:
        row.read_tokens /= n
        size = units.size(row.kv_device_bytes)
        report(f"{row.variant:<48} {row.right:>3} of {n} {row.read_tokens:7.0f} tokens read  {size} on the device")
    return {
        "what": "passkeys recalled; tokens read are the mean over layers, KV heads, steps and cases",
        "settings": {"model": session.info.model, "seed": seed, "cases": n, "tokens": prompt_tokens / n / len(rows)}
        | {"inside": inside},
        "environment": fingerprint(torch.device(session.info.device)),
        "rows": [asdict(row) | {"recall": row.right / n} for row in rows],
    }


def _answer(session: Session, case: Case, row: Row) -> int:
    """Answer, add the result to ``row`` and return the number of tokens of the prompt."""
    sampling = Sampling(temperature=0, max_new_tokens=ANSWER_TOKENS)
    finished = next(event for event in session.answer(case.turns, sampling) if isinstance(event, Finished))
    right = case.answer in finished.text
    row.right += right
    row.wrong += [] if right else [f"{case.answer}: {finished.text}"]
    row.read_tokens += finished.stats.active_tokens or 0
    row.kv_device_bytes = finished.stats.kv_device_bytes
    return finished.stats.prompt_tokens


def _answer_inside(session: Session, case: Case, row: Row, inside: int) -> int:
    """As ``_answer``, but the prompt asks for a story, and ``inside`` tokens of one precede the question."""
    tokenizer = session.model.tokenizer
    encoder, begun = PromptEncoder(tokenizer), (*case.turns[:-1], Turn("user", "Tell me a story."))
    story = _passage(sentences(int(case.answer)), inside, tokenizer)
    prompt, whole = (
        encoder.encode(turns, Stored()).ids for turns in (begun, (*begun, Turn("assistant", story), case.turns[-1]))
    )
    session.truncate(0)
    session.prefill(prompt)
    given, answer = whole[len(prompt) :], list[int]()
    read: list[float] = []
    while len(answer) < ANSWER_TOKENS:
        logits = session.step((given + answer)[len(read)])
        read.append(tokens_read(session))
        if len(read) >= len(given):
            answer.append(int(logits.argmax()))
    text = tokenizer.decode(answer)
    row.right += case.answer in text
    row.wrong += [] if case.answer in text else [f"{case.answer}: {text}"]
    row.read_tokens += statistics.fmean(read)
    row.kv_device_bytes = session.snapshot().kv_device_bytes
    return len(prompt)


def _passage(text: Iterator[str], tokens: int, tokenizer: Any) -> str:
    passage = ""
    while len(tokenizer.encode(passage)) < tokens:
        passage += " " * bool(passage) + next(text)
    return passage
