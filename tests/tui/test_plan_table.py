"""The words of a plan."""

from __future__ import annotations

import shlex
from dataclasses import replace

from kvchat.protocol.figures import MemoryPlan, ModeNeed, Proposal
from kvchat.tui.models import PLANNED, plan_lines

MADE = MemoryPlan(
    "org/model", "qwen3", "cuda:0", "bfloat16", 4096, {"none": 2**30}, {"full": ModeNeed(2**20, {}, "", 2**10)},
    1, 2**20, 2**20, 1, 2**30, 2**30, unpacked=2**30, proposal=Proposal("none", "full", None, ()),
)  # fmt: skip


def test_every_row_is_explained():
    table = "\n".join(plan_lines(MADE, {"stored": 1})).split("\n\n")[1]
    heading, *rows = (line.strip() for line in table.split("\n"))
    assert heading.split()[-1] in PLANNED
    assert [row for row in rows if not row.startswith(tuple(PLANNED))] == []
    assert [word for word in PLANNED if not any(row.startswith(word) for row in (*rows, "measured"))] == []


def test_the_commands_quote_a_folder_and_repeat_what_was_given():
    made = replace(MADE, model="/my models/it's", given={"dtype": "float16", "host_dtype": "int8"})
    start = ["kvchat", "-m", made.model, "--dtype", "float16", "--host-dtype", "int8"]
    *_, proposed, _ = plan_lines(made)
    assert shlex.split(proposed) == [*start, "--mode", "full"]
    *_, unquantized, _ = plan_lines(replace(made, given=made.given | {"quantize": "int8"}))
    assert shlex.split(unquantized) == [*start, "--mode", "full", "--quantize", "none"]
    *_, anyway = plan_lines(replace(made, proposal=None))
    assert shlex.split(anyway)[: len(start) + 1] == [*start, "--force"]
