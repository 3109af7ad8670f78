"""``kvchat plan``: what a model will take on this machine before it is loaded, and what fits."""

from __future__ import annotations

import json
from dataclasses import asdict

from kvchat import install
from kvchat.cli.output import echo, progress
from kvchat.protocol.messages import Load
from kvchat.tui.model_choice.plan_table import plan_lines


def plan(load: Load, context: int | None, as_json: bool) -> int:
    """Print the plan; return 0, or 3 where nothing fits.

    Raises:
        KvchatError: the model or an option is refused.
    """
    install.check(load.quantize, load.device)
    from kvchat.engine.plan import memory_plan  # torch: seconds

    made = memory_plan(load, context, progress)
    progress("")
    echo(json.dumps(asdict(made), indent=2) if as_json else "\n".join(plan_lines(made)))
    return 0 if made.proposal else 3
