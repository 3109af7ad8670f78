"""Tokens that decode steps of a session read."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from kvchat.engine.session import Session
from kvchat.protocol.messages import Finished, Sampling, Turn


def tokens_read(session: Session) -> float:
    """Stored tokens that the last decoded token read, mean over layers and KV heads; waits for the device."""
    layers = range(session.info.layers)
    return statistics.fmean(session.attended(layer).float().sum(1).mean().item() for layer in layers)


def answered(session: Session, turns: Sequence[Turn], tokens: int) -> Finished:
    """The greedy answer of at most ``tokens`` tokens to the last turn, with its figures."""
    *_, finished = session.answer(turns, Sampling(temperature=0, max_new_tokens=tokens))
    assert isinstance(finished, Finished)
    return finished


@dataclass(frozen=True)
class Answer:
    """A greedy answer, and the tokens that each of its steps and those before it read."""

    text: str
    read: tuple[float, ...]


def decode(session: Session, given: Sequence[int], tokens: int) -> Answer:
    """Decode the ids ``given`` one by one, then greedily up to ``tokens`` more, as the session's mode lets them read.

    ``given`` has at least one id; the answer ends before one that ends the model's turns.
    """
    answer, read = list[int](), list[float]()
    for token in given:
        logits = session.step(token)
        read.append(tokens_read(session))
    while len(answer) < tokens and (token := int(logits.argmax())) not in session.model.eos_ids:
        answer.append(token)
        logits = session.step(token)
        read.append(tokens_read(session))
    return Answer(session.model.tokenizer.decode(answer), tuple(read))
