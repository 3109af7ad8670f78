"""An engine whose events are hostile in every field that holds text; the prompt ``crash`` ends it with such a log."""

from __future__ import annotations

import os
import sys

from support.hostile import fill, hostile

from kvchat.protocol import wire
from kvchat.protocol.comparing import Compared, Comparing
from kvchat.protocol.details import Details
from kvchat.protocol.figures import Planned, Snapshot
from kvchat.protocol.messages import (
    Chat,
    Compare,
    Failed,
    Finished,
    HideNeedle,
    Load,
    Loaded,
    Loading,
    NeedleHidden,
    Noted,
    Peek,
    Peeked,
    Plan,
    Prefilled,
    Preparing,
    Rebuilt,
    Recovered,
    Started,
    Switched,
    SwitchRefused,
    Text,
    Watch,
    Withdrawn,
)

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


def answer() -> None:
    send(fill(Started), fill(Prefilled), fill(Preparing))
    send(*(Text(letter, 1) for letter in ANSWER), Text("take this back" + hostile("withdrawn"), 9))
    send(fill(Recovered), Withdrawn(len(hostile("withdrawn")), 3), fill(Switched), fill(SwitchRefused))
    send(fill(Snapshot), fill(Rebuilt), Finished("eos", ANSWER, fill(Finished).stats), fill(Failed, fatal=False))


def serve() -> None:
    while (body := wire.read(sys.stdin.buffer)) is not None:
        command = wire.decode_command(body)
        if isinstance(command, Load):
            send(fill(Loading), fill(Loaded), fill(Snapshot))
        elif isinstance(command, Peek):
            send(fill(Peeked, start=command.start))
        elif isinstance(command, Plan):
            send(fill(Planned, plan=None))
        elif isinstance(command, Watch):
            send(fill(Details), fill(Noted))
        elif isinstance(command, HideNeedle):
            send(fill(NeedleHidden))
        elif isinstance(command, Compare):
            send(fill(Comparing, index=0), fill(Compared))
        elif isinstance(command, Chat) and command.turns[-1].content == "crash":
            os.write(2, (hostile("log") + "\n").encode())
            os._exit(3)
        elif isinstance(command, Chat):
            answer()


if __name__ == "__main__":
    serve()
