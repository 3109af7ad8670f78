"""``python one_rank.py NUMBER COUNT MEETING FILE``: one rank of the bundled model, or all of it where COUNT is 1.

It prefills a text and decodes, in speculative mode, and writes to FILE a ``Told``.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvchat.config.modes import parse
from kvchat.engine.runner import ModelRunner, geometry_of, traits_of
from kvchat.engine.synthetic_text import sentences
from kvchat.kv.inspect import attended
from kvchat.kv.modes import build
from kvchat.kv.modes.speculative import Speculative
from kvchat.models.load import load_model
from kvchat.models.ranks.group import Rank, join
from kvchat.protocol.messages import Load

STEPS, PROMPT, BUDGET = 24, 400, 128


@dataclass
class Told:
    """What this rank did with its heads.

    Attributes:
        logits: after the prompt and after each step, ``[steps + 1, vocab]``.
        read: the tokens that each KV head read at each step, bool ``[steps, layers, heads, tokens]``.
        queries: of each step, ``[steps, layers, q_heads, d]``.
        keys: all that are stored, ``[layers, heads, tokens, d]``.
        index: by which the tokens were chosen, ``[layers - 1, heads, pages, words]``: the first layer reads all.
    """

    logits: Tensor
    read: Tensor
    queries: Tensor
    keys: Tensor
    index: Tensor


def main(number: int, count: int, meeting: str, file: str) -> None:
    asked = Load("bundled", "cpu", "float32", gpus=count, split="heads")
    meet = (lambda described: join(meeting, Rank(number, count), described.device)) if count > 1 else None
    model = load_model(asked, lambda _: None, meet)
    runner = ModelRunner(model, build(parse("speculative", {"budget": BUDGET}), geometry_of(model), traits_of(model)))
    text = sentences(0)
    ids: list[int] = []
    while len(ids) < PROMPT + STEPS:
        ids += model.tokenizer(next(text))["input_ids"]
    *_, (_, logits) = runner.prefill(ids[:PROMPT])
    assert logits is not None
    state, told, read, queries = runner.kv.state, [logits], [], []
    for step, token in enumerate(ids[PROMPT:][:STEPS], 1):
        told.append(runner.step(token))
        masks = torch.stack([attended(state, layer) for layer in range(model.layers)])
        read.append(pad(masks, (0, STEPS - step)))
        queries.append(state.query.clone())
    keys = torch.stack([state.host.dense(layer, state.total)[0] for layer in range(model.layers)])
    assert isinstance(runner.kv.mode, Speculative)
    index = runner.kv.mode.index.data
    torch.save(asdict(Told(torch.stack(told), torch.stack(read), torch.stack(queries), keys, index)), file)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
