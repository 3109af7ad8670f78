"""Conversations as files: the current path as Markdown, or the whole tree as JSON, which kvchat imports."""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, FailFast, ValidationError

from kvchat import files
from kvchat.conversations.conversation import Conversation, Message, in_words, new_id
from kvchat.errors import UsageError
from kvchat.protocol.figures import Params

SPEAKERS = {"user": "You", "assistant": "Model"}
NAME_CHARACTERS = 60  # of a file named by a title: they take up to four bytes each, and a name may have 255
MAX_BYTES = 64 * 2**20  # of an imported file
MARKDOWN = ".md"


def provenance(conversation: Conversation) -> str:
    """Return when the conversation began, the models that answered on its path, and its mode with parameters."""
    models = dict.fromkeys(message.model for message in conversation.path if message.model)
    mode = ", ".join((f"{conversation.mode} mode", *in_words(conversation.params))) if conversation.mode else ""
    return " · ".join(filter(None, (_moment(conversation.created), ", ".join(models), mode)))


def _moment(seconds: float) -> str:
    """Format seconds since the epoch as local time, ``2026-11-26 09:24``; "" for an invalid date."""
    with suppress(OverflowError, ValueError, OSError):
        return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
    return ""


def to_markdown(conversation: Conversation) -> str:
    """Return the path as Markdown: its provenance, each message under a heading, and each answer's cost below it."""
    parts = [f"# {conversation.title}", _italic(provenance(conversation))]
    if conversation.system:
        parts.append("## System\n\n" + conversation.system)
    for message in conversation.path:
        parts.append(f"## {SPEAKERS[message.role]}\n\n{message.marked_text.strip(chr(10))}")
        if message.role == "assistant":
            cost = " · ".join(filter(None, (_moment(message.created), message.model, message.receipt)))
            parts.append(_italic(cost))
    return "\n\n".join(filter(None, parts)) + "\n"


def _italic(text: str) -> str:
    return text and f"*{text}*"


class _File(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)
    format: Literal["kvchat-conversation"] = "kvchat-conversation"
    version: Literal[1] = 1
    title: str
    system: str | None
    created: float
    leaf: str | None
    mode: str = ""
    params: Params = {}
    messages: Annotated[list[Message], FailFast()]


def to_json(conversation: Conversation) -> str:
    file = _File(
        title=conversation.title,
        system=conversation.system,
        created=conversation.created,
        leaf=conversation.leaf.id if conversation.leaf else None,
        mode=conversation.mode,
        params=conversation.params,
        messages=[*conversation.messages.values()],
    )
    return json.dumps(file.model_dump(mode="json"), ensure_ascii=False, indent=2) + "\n"


def destination(conversation: Conversation, given: str) -> Path:
    """Return the file that the user means by ``given``: a path, a folder, or "" for the current folder.

    In a folder, or if only a format is given (``json``, ``.json``), the conversation's title names the file, with a
    number if that name is taken. A name without an ending gets Markdown's.
    """
    path = Path(os.path.expanduser(given))
    wanted = f".{given.lower().removeprefix('.')}"
    if wanted in FORMATS:
        path, ending = Path(), wanted
    elif not given or given.endswith("/") or os.path.isdir(path):
        ending = MARKDOWN
    else:
        return path if path.suffix else path.with_name(f"{path.name}{MARKDOWN}")
    name = _file_name(conversation.title)
    numbered = (path / f"{name}{f' {number}' if number > 1 else ''}{ending}" for number in count(1))
    return next(file for file in numbered if not os.path.lexists(file))


def _file_name(title: str) -> str:
    """Return a title as a file name that any system accepts, without an ending."""
    plain = re.sub(r'[\x00-\x1f\x7f/\\:*?"<>|]+', " ", title)
    return " ".join(plain.split())[:NAME_CHARACTERS].strip(" .") or "conversation"


def write(conversation: Conversation, path: Path) -> None:
    """Write a conversation to a new file, in the format of its ending.

    Raises:
        UsageError: the ending names no format, the conversation is empty, or the same as ``write_new``.
    """
    check_ending(path, FORMATS)
    if not conversation.path:
        raise UsageError("There is nothing to export yet.", hint="Ask something first.")
    write_new(path, FORMATS[path.suffix](conversation))


def write_new(path: Path, text: str) -> None:
    """Write ``text`` to a new file in an existing folder.

    Raises:
        UsageError: it exists, its folder does not, or it cannot be written.
    """
    files.check_new(path)
    files.save(path, text.encode("utf-8", "replace"), "Choose another place.")


def check_ending(path: Path, formats: Iterable[str]) -> None:
    """
    Raises:
        UsageError: the file's name has none of the endings of ``formats``.
    """
    if path.suffix not in formats:
        raise UsageError(f'"{path}" has no known file ending.', hint=f"Use one of {', '.join(formats)}.")


def read(path: Path) -> Conversation:
    """Read a conversation that was exported as JSON.

    Raises:
        UsageError: the file cannot be read or has another format; DoesNotFitError: it is too large.
    """
    return from_json(files.load(path, MAX_BYTES), str(path))


def from_json(data: bytes, name: str) -> Conversation:
    """Read the output of ``to_json``, with new ids; errors call the file ``name``.

    Raises:
        UsageError: it has another format, or its messages are not a tree of alternating questions and answers.
    """
    try:
        file = _File.model_validate_json(data.removeprefix(codecs.BOM_UTF8))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise _refusal(name, f"{where}: {first['msg']}.") from None
    ids: dict[str, str] = {}
    roles: dict[str | None, str] = {None: "assistant"}
    conversation = Conversation(file.system, title=file.title, created=file.created, mode=file.mode, params=file.params)
    for message in file.messages:
        if message.id in ids:
            raise _refusal(name, f"Two messages have the id {message.id}.")
        if message.parent not in roles or roles[message.parent] == message.role:
            raise _refusal(name, f"The message {message.id} does not follow one of the other role.")
        ids[message.id], roles[message.id] = new_id(), message.role
        parent = None if message.parent is None else ids[message.parent]
        conversation.add(replace(message, id=ids[message.id], parent=parent))
    if file.leaf is not None and file.leaf not in ids:
        raise _refusal(name, f"Its last message {file.leaf} is not in it.")
    conversation.go_to(None if file.leaf is None else ids[file.leaf])
    return conversation


def _refusal(name: str, detail: str) -> UsageError:
    return UsageError(f"{name} is not a kvchat conversation.", detail, "Import JSON that kvchat exported.")


FORMATS: dict[str, Callable[[Conversation], str]] = {MARKDOWN: to_markdown, ".json": to_json}
