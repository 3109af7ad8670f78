"""``kvchat chats``: saved conversations, without a screen."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from kvchat import paths
from kvchat.cli.output import echo, note, write
from kvchat.conversations import export
from kvchat.conversations.store import MARK, ConversationStore, Summary
from kvchat.errors import UsageError
from kvchat.units import count

ID_CHARACTERS = 8  # of 32: enough to tell conversations apart

Chat = Annotated[str, typer.Argument(metavar="CHAT", help="its number in `kvchat chats list`, or the start of its id")]

app = typer.Typer(rich_markup_mode=None, help="Manage saved conversations.", no_args_is_help=True)


@app.command("list")
def list_chats(
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="only conversations that contain this text")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON list")] = False,
) -> None:
    """List the conversations, the latest first. The other commands and /open take their numbers."""
    with _store() as store:
        found = store.search(text or "")
        numbers = {summary.id: number for number, summary in enumerate(store.recent(limit=-1), 1)}
    if as_json:
        write(json.dumps([dataclasses.asdict(summary) for summary in found], indent=2) + "\n")
        return
    for summary in found:
        echo(_line(summary, numbers[summary.id]))
    if not found:
        note("no conversation contains this." if text else "no conversation has been saved yet.")


@app.command("export")
def export_chat(
    id: Chat,
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help=".md or .json, or a folder; default: Markdown on stdout")
    ] = None,
) -> None:
    """Print a conversation, or write it to a file."""
    with _store() as store:
        conversation = store.load(_find(store, id))
    if file is None:
        write(export.to_markdown(conversation))
    else:
        path = export.destination(conversation, file)
        export.write(conversation, path)
        echo(str(path))


@app.command("import")
def import_chat(file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON that kvchat exported")]) -> None:
    """Add a conversation from a file; `kvchat -c` then continues it."""
    conversation = export.read(file)
    changes = conversation.changes()
    if changes is None:
        raise UsageError(f"{file} has no messages.", hint="Use a conversation exported by kvchat.")
    with _store() as store:
        store.save(changes)
    echo(conversation.id[:ID_CHARACTERS])


@app.command("delete")
def delete_chat(id: Chat) -> None:
    """Delete a conversation; restore brings it back within a day."""
    with _store() as store:
        found = _find(store, id)
        store.delete(found)
    echo(f"deleted {found}")


@app.command("restore")
def restore_chat(id: Annotated[str, typer.Argument(metavar="ID", help="its whole id")]) -> None:
    """Bring a deleted conversation back."""
    with _store() as store:
        if not store.restore(id):
            raise UsageError(
                f'No conversation "{id}" was deleted within a day.', hint="`kvchat chats delete` printed its whole id."
            )
    echo(f"restored {id}")


@contextmanager
def _store() -> Iterator[ConversationStore]:
    store = ConversationStore(paths.database())
    try:
        yield store
    finally:
        store.close()


def _find(store: ConversationStore, named: str) -> str:
    """Return the id of the conversation with this number (shorter than ``ID_CHARACTERS``) or start of an id."""
    ids = [summary.id for summary in store.recent(limit=-1)]
    if named.isdecimal() and len(named) < ID_CHARACTERS:
        found = ids[int(named) - 1 : int(named)] if int(named) else []
    else:
        found = [id for id in ids if id.startswith(named)]
    if not found:
        raise UsageError(f'There is no conversation "{named}".', hint="`kvchat chats list` shows them all.")
    if len(found) > 1:
        raise UsageError(f'{len(found)} conversations have an id that begins with "{named}".', hint="Type more of it.")
    return found[0]


def _line(summary: Summary, number: int) -> str:
    when = datetime.fromtimestamp(summary.updated).strftime("%Y-%m-%d %H:%M")
    which = f"{number:>3}  {summary.id[:ID_CHARACTERS]}"
    line = f"{which}  {when}  {count(summary.messages, 'message'):>14}  {summary.title}"
    excerpt = " ".join(summary.excerpt.replace(MARK[0], "").replace(MARK[1], "").split())
    return f"{line}\n{' ' * (len(which) + 2)}{excerpt}" if excerpt else line
