"""``python one_rank.py NUMBER COUNT MEETING FILE``: one rank of the bundled model, or all of it where COUNT is 1.

It prefills a text and decodes, in speculative mode, and writes to FILE the logits ``[steps, vocab]`` and what each of
its KV heads read at each step, as masks ``[steps, layers, heads, tokens]``.
"""

from __future__ import annotations

import sys

import torch
from torch.nn.functional import pad

from kvchat.config.modes import parse
from kvchat.engine.runner import ModelRunner, geometry_of, traits_of
from kvchat.engine.synthetic_text import sentences
from kvchat.kv.inspect import attended
from kvchat.kv.modes import build
from kvchat.models.load import load_model
from kvchat.models.ranks.group import Rank, join
from kvchat.protocol.messages import Load

STEPS, PROMPT = 24, 400


def main(number: int, count: int, meeting: str, file: str) -> None:
    asked = Load("bundled", "cpu", "float32", gpus=count, split="heads")
    meet = (lambda described: join(meeting, Rank(number, count), described.device)) if count > 1 else None
    model = load_model(asked, lambda _: None, meet)
    runner = ModelRunner(model, build(parse("speculative", {"budget": 128}), geometry_of(model), traits_of(model)))
    text = sentences(0)
    ids: list[int] = []
    while len(ids) < PROMPT + STEPS:
        ids += model.tokenizer(next(text))["input_ids"]
    *_, (_, logits) = runner.prefill(ids[:PROMPT])
    assert logits is not None
    told, read = [logits], []
    for step, token in enumerate(ids[PROMPT:][:STEPS], 1):
        told.append(runner.step(token))
        masks = torch.stack([attended(runner.kv.state, layer) for layer in range(model.layers)])
        read.append(pad(masks, (0, STEPS - step)))
    torch.save((torch.stack(told), torch.stack(read)), file)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
