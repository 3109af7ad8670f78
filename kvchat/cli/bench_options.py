"""The options of ``kvchat bench``: one type for each that several commands have, and what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvchat.bench.texts import check
from kvchat.bench.variant import with_budgets
from kvchat.cli.completion import complete_model
from kvchat.cli.options import NamedDevice, setting
from kvchat.config.schema import KvSection, ModelSettings
from kvchat.protocol.messages import HostDtype

BUDGET = 512  # of modes where neither they nor it are named

Model = Annotated[str, setting(ModelSettings, "name", "-m", "--model", complete=complete_model)]
Device = NamedDevice
Dtype = Annotated[str, setting(ModelSettings, "dtype")]
HostPages = Annotated[HostDtype, setting(KvSection, "host_dtype")]
Quantize = Annotated[str, setting(ModelSettings, "quantize")]
Shape = Annotated[
    str, typer.Option(help="random weights in the shape of llama-3.1-8b, qwen2.5-7b, ... instead of a model")
]
Variants = Annotated[list[str] | None, typer.Option(metavar="MODE[:KEY=VALUE,...]", help="a variant; repeatable")]
Mode = Annotated[str, typer.Option(metavar="MODE[:KEY=VALUE,...]", help="the KV mode")]
Budget = Annotated[int, typer.Option(help="tokens per KV head")]
Budgets = Annotated[
    list[int] | None, typer.Option(help="tokens per KV head, for modes that name no budget; repeatable")
]
Texts = Annotated[list[Path] | None, typer.Option(exists=True, dir_okay=False, help="a text file, UTF-8; repeatable")]
Seed = Annotated[int, typer.Option(help="the same seed gives the same cases")]
Cases = Annotated[int, typer.Option(min=1, help="conversations")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="draw it to .svg or .png (needs matplotlib)")]
Out = Annotated[
    Path | None, typer.Option(help="keep the rows in this file, as JSON; one that is there is gone on with")
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object, with what was run on")]

# Of bench paper alone.
Parts = Annotated[list[str] | None, typer.Option(help="only this table or figure, as table-1; repeatable")]
StudySizes = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="one of the study's sizes; repeatable")
]

# Of bench decode alone.
Contexts = Annotated[list[int] | None, typer.Option(min=1, help="tokens before the measured ones; repeatable")]
ChangeRates = Annotated[
    list[str] | None,
    typer.Option(help="share of speculative's pages that is new at each step, or natural; repeatable"),
]
Corrections = Annotated[
    list[float] | None,
    typer.Option(
        min=0, max=1, help="share of heads that speculative corrects at each step, as one row more; repeatable"
    ),
]
Steps = Annotated[int, typer.Option(min=1, help="tokens of a round that count")]
Rounds = Annotated[int, typer.Option(min=1, help="rounds in which every variant has its turn")]
Baselines = Annotated[
    str | None, typer.Option(help="dynamic, static, compile, offloaded, generate, llama.cpp; by commas, or none")
]
ReadsPrompt = Annotated[bool, typer.Option("--prefill", help="read a prompt with random weights too")]
OtherLoad = Annotated[int, typer.Option(min=0, help="busy processes beside which all is measured once more")]
SaveProfile = Annotated[
    bool, typer.Option("--save-profile", help="keep the device's measured roofline as your GPU profile")
]


def standard_variants(modes: Sequence[str], budgets: list[int] | None) -> tuple[str, ...]:
    """The modes that are measured where none is named."""
    return with_budgets(modes, budgets or (BUDGET,))


def baseline_names(baselines: str | None) -> tuple[str, ...] | None:
    """The baselines named, by commas; None where nothing was said."""
    return None if baselines is None else tuple(name for name in baselines.split(",") if name not in ("", "none"))


def file_names(texts: list[Path] | None) -> tuple[str, ...]:
    """Files as a result names them.

    Raises:
        UsageError: one cannot be read, or is empty.
    """
    names = tuple(str(path) for path in texts or ())
    check(names)
    return names
