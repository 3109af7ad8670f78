"""An engine that sends every event of the protocol, with a hostile text in every field that holds text.

The prompt ``everything`` gets all of them one after the other, and ``crash`` ends it with a hostile log. With
``SERVED`` in the environment the model is on a server.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

from support.hostile import fill, hostile

from kvchat.protocol import wire
from kvchat.protocol.figures import Planned, Run, Snapshot
from kvchat.protocol.messages import (
    Chat,
    Compare,
    Compared,
    Comparing,
    Details,
    Event,
    Failed,
    Finished,
    HideNeedle,
    Load,
    Loaded,
    Loading,
    NeedleHidden,
    Peek,
    Peeked,
    Plan,
    Prefilled,
    Preparing,
    Recovered,
    Resumed,
    Started,
    Switched,
    SwitchRefused,
    Text,
    Watch,
    Withdrawn,
)

LOCAL: dict[type, dict[str, Any]] = {Loaded: {"server": "", "offers": ""}, Snapshot: {"server": None}}
OVERRIDES = {} if "SERVED" in os.environ else LOCAL
DRAWN_S = 1.0  # to draw what the next event replaces on the screen
ANSWER = "\n\n".join(
    (
        hostile("prose"),
        "# " + hostile("heading"),
        "```" + hostile("info") + "\n" + hostile("fence") + "\n```",
        "| a | b |\n|---|---|\n| " + hostile("cell") + " | 1 |",
        "[" + hostile("link") + "](http://" + hostile("target") + ")",
        "an entity &#x202e; &#27;]0;hacked&#7; &#155;31m &rlm;",
        hostile("tail"),
    )
)


def send(*events: object) -> None:
    for event in events:
        sys.stdout.buffer.write(wire.encode(event))  # type: ignore[arg-type]
    sys.stdout.buffer.flush()


def everything(conversation: str) -> Iterator[Any]:
    """One of each event, whatever the application waits for."""
    plain = {"thought": "", "tags": ()}  # otherwise all that follows is a folded thought
    given = OVERRIDES | {Failed: {"fatal": False}, Resumed: {"conversation": conversation}, Started: plain}
    yield from (fill(cls, **given.get(cls, {})) for cls in get_args(Event))


def answer() -> None:
    send(fill(Started, thought="", tags=()), fill(Prefilled), fill(Preparing))
    send(*(Text(letter, 1) for letter in ANSWER), Text("take this back" + hostile("withdrawn"), 9))
    send(fill(Recovered), Withdrawn(len(hostile("withdrawn")), 3), fill(Switched), fill(SwitchRefused))
    snapshot = fill(Snapshot, **OVERRIDES.get(Snapshot, {}))
    send(snapshot, Finished("eos", ANSWER, fill(Finished).stats), fill(Failed, fatal=False))


def serve() -> None:
    while (body := wire.read(sys.stdin.buffer)) is not None:
        command = wire.decode_command(body)
        if isinstance(command, Load):
            send(fill(Loading))
            time.sleep(DRAWN_S)
            send(*(fill(cls, **OVERRIDES.get(cls, {})) for cls in (Loaded, Snapshot)))
        elif isinstance(command, Peek):
            send(fill(Peeked, start=command.start))
        elif isinstance(command, Plan):
            send(fill(Planned), fill(Planned, plan=None))
        elif isinstance(command, Watch):
            send(fill(Details))
        elif isinstance(command, HideNeedle):
            send(fill(NeedleHidden))
        elif isinstance(command, Compare):
            run = fill(Run)
            send(fill(Comparing, index=0))
            time.sleep(DRAWN_S)
            send(Compared((run, replace(run, refusal=""))))
        elif isinstance(command, Chat) and command.turns[-1].content == "crash":
            os.write(2, (hostile("log") + "\n").encode())
            os._exit(3)
        elif isinstance(command, Chat) and command.turns[-1].content == "everything":
            send(*everything(command.conversation))
        elif isinstance(command, Chat) and command.turns[-1].content.startswith("«Asked.text»"):
            send(fill(Finished, text=hostile("answered")))
        elif isinstance(command, Chat):
            answer()


if __name__ == "__main__":
    serve()
