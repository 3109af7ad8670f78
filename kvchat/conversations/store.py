"""The database of conversations: one SQLite file that several applications may use at once.

It uses WAL mode, so saved messages survive if the process ends at any moment. ``user_version`` counts the migrations.
Deleted conversations can be restored for ``RESTORABLE_S``. The engine writes files with K/V to a folder next to it;
deleting a conversation renames its file. Missing K/V are recomputed, so errors with these files are ignored.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unicodedata import category, normalize

from kvchat import files, paths
from kvchat.conversations.conversation import (
    Changes,
    Conversation,
    Header,
    Message,
    ModeChange,
    new_id,
    read_stats,
    shorten,
)
from kvchat.errors import KvchatError, UsageError

BUSY_S = 2.0  # the longest wait for another application's write
LOCKED, FULL = "locked", "is full"  # in SQLite's messages
RESTORABLE_S = 24 * 3600.0
LISTED = 200
MARK = ("\ue000", "\ue001")  # around the words found in an excerpt; private-use characters
_MESSAGE = tuple(field.name for field in dataclasses.fields(Message))
MUTABLE = ("text", "ending", "receipt", "stats", "pinned", "switch_lines", "model", "thought")
_SUMMARY = (
    "SELECT c.id, c.title, c.updated, (SELECT count(*) FROM message WHERE conversation = c.id) AS messages"
    " FROM conversation AS c"
)
_SEARCH = (
    "SELECT c.id, message.id AS message, snippet(message_text, 0, ?, ?, '…', 16) AS excerpt"
    " FROM message_text JOIN message ON message.row = message_text.rowid JOIN conversation AS c"
    " ON c.id = message.conversation WHERE message_text MATCH ? AND c.deleted IS NULL"
)
_SCAN = (
    "SELECT c.id, message.id AS message, '' AS excerpt, message.text"
    " FROM message JOIN conversation AS c ON c.id = message.conversation WHERE c.deleted IS NULL"
)
_HAS = "instr(lower(message.text), lower(?))"
# Scripts without spaces between words, and Korean, whose words have endings: the index sees a run of them as one word.
_UNSPACED = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u1980-\u19ff\u1a20-\u1aaf\u2e80-\u31ff\u3400-\u9fff\ua980-\ua9ff"
    "\uaa60-\uaaff\uac00-\ud7ff\uf900-\ufaff\uff00-\uffef\U0001b000-\U0001b16f\U00020000-\U0003ffff]"
)
LONGEST_EXCERPT = 2000  # characters, because a word of the index may be as long as a message
EXCERPT = (40, 100)  # characters before and after the first word found
# ``parent`` is not a foreign key, so that an answer can be saved even if another application withdrew its question.
# ``row`` joins the full-text index, which stores no text of its own.
MIGRATIONS = (
    (
        """CREATE TABLE conversation (
            id TEXT PRIMARY KEY,
            title TEXT NOT NULL,
            system TEXT,
            created REAL NOT NULL,
            updated REAL NOT NULL,
            leaf TEXT,
            deleted REAL
        )""",
        """CREATE TABLE message (
            row INTEGER PRIMARY KEY,
            id TEXT NOT NULL UNIQUE,
            conversation TEXT NOT NULL REFERENCES conversation ON DELETE CASCADE,
            parent TEXT,
            role TEXT NOT NULL CHECK (role IN ('user', 'assistant')),
            text TEXT NOT NULL,
            created REAL NOT NULL,
            ending TEXT NOT NULL,
            receipt TEXT NOT NULL,
            stats TEXT
        )""",
        "CREATE INDEX message_conversation ON message (conversation)",
        "CREATE VIRTUAL TABLE message_text USING fts5 (text, content = 'message', content_rowid = 'row')",
        """CREATE TRIGGER message_added AFTER INSERT ON message BEGIN
            INSERT INTO message_text (rowid, text) VALUES (new.row, new.text);
        END""",
        """CREATE TRIGGER message_removed AFTER DELETE ON message BEGIN
            INSERT INTO message_text (message_text, rowid, text) VALUES ('delete', old.row, old.text);
        END""",
        """CREATE TRIGGER message_changed AFTER UPDATE OF text ON message BEGIN
            INSERT INTO message_text (message_text, rowid, text) VALUES ('delete', old.row, old.text);
            INSERT INTO message_text (rowid, text) VALUES (new.row, new.text);
        END""",
    ),
    ("ALTER TABLE message ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0",),
    ("ALTER TABLE message ADD COLUMN switch_lines TEXT NOT NULL DEFAULT '[]'",),
    (
        "ALTER TABLE conversation ADD COLUMN mode TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE conversation ADD COLUMN params TEXT NOT NULL DEFAULT '{}'",
        "ALTER TABLE message ADD COLUMN model TEXT NOT NULL DEFAULT ''",
    ),
    ("ALTER TABLE message ADD COLUMN thought TEXT NOT NULL DEFAULT ''",),
    ("UPDATE message SET switch_lines = '[]' WHERE switch_lines LIKE '[[%'",),  # in old versions each was a list
)
ASIDE = ".deleted"


class StoreError(KvchatError):
    """The conversations cannot be read or written; ``is_passing`` if another program writes or the disk is full."""

    is_passing = False


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A conversation in a list. A search adds the ``message`` found and an ``excerpt``, with words between ``MARK``."""

    id: str
    title: str
    updated: float
    messages: int
    message: str = ""
    excerpt: str = ""


class ConversationStore:
    """Stores conversations at ``path``, or in memory if it is None. Only one thread may use it at a time.

    Every method raises StoreError if the database cannot be used.
    """

    def __init__(self, path: Path | None, busy_s: float | None = None) -> None:
        """Open, create or migrate the database, waiting up to ``busy_s`` (by default ``BUSY_S``) for a lock.

        Raises:
            StoreError: it cannot be opened, is damaged, or was made by a newer version.
        """
        self.path = path
        with self._errors("opened"):
            self._db = _open(path, BUSY_S if busy_s is None else busy_s)
            self._db.execute(f"PRAGMA busy_timeout = {round(1000 * BUSY_S)}")
            ids = [row["id"] for row in self._db.execute("SELECT id FROM conversation")]
        if path:
            known = {file for id in ids for pair in self._saved_kv(id) for file in pair}
            for file in (path.parent / paths.SAVED_KV_FOLDER).glob(f"*{paths.SAVED_KV}*"):
                if file not in known:  # the conversation was deleted for good, or its only question was withdrawn
                    with suppress(OSError):
                        file.unlink()

    def close(self) -> None:
        self._db.close()

    # ---- one conversation ------------------------------------------------------------------------

    def save(self, changes: Changes) -> None:
        """Write the changes, and the messages above them that are no longer stored, in one transaction.

        Another application may have written in the meantime. Its changes to anything else stay, a question that it
        answered is not deleted, and if both changed a text, its version is kept as a sibling. A conversation whose only
        question was withdrawn is deleted.
        """
        with self._errors("written"), self._db:  # rolls back on an error
            self._db.execute("BEGIN IMMEDIATE")
            is_new = self._save_header(changes)
            rows = self._db.execute("SELECT id FROM message WHERE conversation = ?", (changes.id,))
            stored = {row["id"] for row in rows}
            due = {message.id for message in changes.changed}
            needed = changes.messages.keys() if is_new else due | _ancestors(changes, due)
            for id, message in changes.messages.items():
                if id in stored and id in due:
                    self._update(message, changes.saved.get(id))
                elif id not in stored and id in needed:
                    self._insert("message", {"conversation": changes.id, **_values(message)})
            self._db.executemany(
                "DELETE FROM message WHERE id = ? AND id NOT IN (SELECT parent FROM message"
                " WHERE conversation = ? AND parent IS NOT NULL)",
                ((id, changes.id) for id in changes.removed),
            )
            self._db.execute(
                "DELETE FROM conversation AS c WHERE id = ?"
                " AND NOT EXISTS (SELECT 1 FROM message WHERE conversation = c.id)",
                (changes.id,),
            )

    def load(self, id: str) -> Conversation:
        """Read a conversation with all its branches.

        Raises:
            UsageError: there is no conversation with this id.
        """
        conversation = self._read(id)
        if (changes := conversation.changes()) is not None:
            conversation.mark_saved(changes)
        return conversation

    def _read(self, id: str) -> Conversation:
        """Return the conversation, not yet marked as saved."""
        with self._errors("read"):
            header = self._db.execute(
                "SELECT id, title, system, created, leaf, mode, params FROM conversation"
                " WHERE id = ? AND deleted IS NULL",
                (id,),
            ).fetchone()
            rows = self._db.execute(
                f"SELECT {', '.join(_MESSAGE)} FROM message WHERE conversation = ? ORDER BY row", (id,)
            ).fetchall()
        if header is None:
            raise UsageError(f'There is no conversation "{id}".', hint="It may have been deleted meanwhile.")
        with self._errors("read"):
            try:
                values = {**dict(header), "params": json.loads(header["params"])}
                conversation = Conversation(messages=map(_message, rows), **values)
            except (ValueError, TypeError):
                raise sqlite3.DatabaseError("a record in it is malformed") from None
        if conversation.leaf is None and conversation.messages:  # its first question or its leaf was withdrawn
            conversation.go_to([*conversation.messages][-1])
        return conversation

    def rename(self, id: str, title: str) -> None:
        """Change a conversation's title; its position in lists stays."""
        with self._errors("written"):
            self._db.execute("UPDATE conversation SET title = ? WHERE id = ?", (_storable(shorten(title)), id))

    def delete(self, id: str) -> None:
        """Delete a conversation; ``restore`` brings it back for a day."""
        with self._errors("written"):
            self._db.execute("UPDATE conversation SET deleted = ? WHERE id = ?", (time.time(), id))
        for kv, aside in self._saved_kv(id):
            with suppress(OSError):
                kv.rename(aside)

    def restore(self, id: str) -> bool:
        """Restore a deleted conversation; False if it no longer exists."""
        with self._errors("written"):
            found = self._db.execute("UPDATE conversation SET deleted = NULL WHERE id = ?", (id,)).rowcount > 0
        for kv, aside in self._saved_kv(id):
            with suppress(OSError):
                aside.rename(kv)
        return found

    # ---- finding one -----------------------------------------------------------------------------

    def latest(self) -> Summary | None:
        return next(iter(self.recent(limit=1)), None)

    def recent(self, limit: int = LISTED) -> list[Summary]:
        """Return the conversations, most recently changed first."""
        with self._errors("read"):
            rows = self._db.execute(f"{_SUMMARY} WHERE c.deleted IS NULL ORDER BY c.updated DESC LIMIT ?", (limit,))
            return [Summary(**dict(row)) for row in rows]

    def search(self, text: str, limit: int = LISTED) -> list[Summary]:
        """Return conversations whose title contains ``text``, or with a message that has all of its words, in any case.

        The last word may be a prefix. Signs, and words that the index does not split, match anywhere in a message.
        """
        words = text.replace("\0", " ").split()  # SQLite ends a query at NUL
        if not words:
            return self.recent(limit)
        with self._errors("read"):
            titled = self._db.execute(
                f"{_SUMMARY} WHERE c.deleted IS NULL AND instr(folded(c.title), folded(?))"
                " ORDER BY c.updated DESC LIMIT ?",
                (_storable(text.strip()), limit),
            )
            found = {row["id"]: Summary(**dict(row)) for row in titled}
            matches = self._matches([_storable(word) for word in words])
            for row in matches:  # best first; several messages of a conversation may match
                if len(found) >= limit:
                    break
                if (summary := found.get(row["id"])) is None:
                    summary = Summary(**dict(self._db.execute(f"{_SUMMARY} WHERE c.id = ?", (row["id"],)).fetchone()))
                if not summary.message:
                    excerpt = row["excerpt"][:LONGEST_EXCERPT] or _excerpt(row["text"], words)
                    found[summary.id] = replace(summary, message=row["message"], excerpt=excerpt)
            matches.close()
        return list(found.values())

    def _saved_kv(self, id: str) -> Iterator[tuple[Path, Path]]:
        """Yield the file of a conversation's K/V and its name while deleted; nothing without a ``path``."""
        if self.path:
            kv = paths.saved_kv(self.path.parent / paths.SAVED_KV_FOLDER, id)
            yield kv, kv.with_name(kv.name + ASIDE)

    def _save_header(self, changes: Changes) -> bool:
        """Write the changes of the header; True if the conversation was not stored, or no longer."""
        header = _columns(changes.header)
        found = self._db.execute("SELECT 1 FROM conversation WHERE id = ?", (changes.id,)).fetchone()
        saved = _columns(changes.saved_header) if found and changes.saved_header else {}
        due = {name: value for name, value in header.items() if name not in saved or saved[name] != value}
        if found:
            self._write("conversation", changes.id, {**due, "updated": time.time(), "deleted": None})
        else:
            times = {"created": changes.created, "updated": time.time()}
            self._insert("conversation", {"id": changes.id, **times, **header})
        return found is None

    def _update(self, message: Message, saved: Message | None) -> None:
        """Write the fields that differ from ``saved``; another application's version of the text becomes a sibling."""
        values, before = _values(message), _values(saved) if saved else {}
        due = {name: values[name] for name in MUTABLE if name not in before or before[name] != values[name]}
        if saved and "text" in due:
            text = self._db.execute("SELECT text FROM message WHERE id = ?", (message.id,)).fetchone()["text"]
            if text != before["text"] and not due["text"].startswith(text):
                copied = ", ".join(name for name in _MESSAGE if name != "id")
                self._db.execute(
                    f"INSERT INTO message (id, conversation, {copied}) SELECT ?, conversation, {copied} FROM message"
                    " WHERE id = ?",
                    (new_id(), message.id),
                )
        if due:
            self._write("message", message.id, due)

    def _insert(self, table: str, values: Mapping[str, Any]) -> None:
        marks = ", ".join("?" * len(values))
        self._db.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", tuple(values.values()))

    def _write(self, table: str, id: str, values: Mapping[str, Any]) -> None:
        columns = ", ".join(f"{name} = ?" for name in values)
        self._db.execute(f"UPDATE {table} SET {columns} WHERE id = ?", (*values.values(), id))

    def _matches(self, words: list[str]) -> sqlite3.Cursor:
        """Return messages with all the words, best first; newest first if the index has none of the words."""
        anywhere = [word for word in words if _is_unindexed(word)]
        forms = [sorted({normalize(form, word) for form in ("NFC", "NFD")}) for word in anywhere]
        has_all = "".join(f" AND ({' OR '.join([_HAS] * len(each))})" for each in forms)
        sought = [form for each in forms for form in each]
        if len(anywhere) == len(words):
            return self._db.execute(f"{_SCAN}{has_all} ORDER BY message.row DESC", sought)
        match = _match([word for word in words if word not in anywhere], is_last_prefix=words[-1] not in anywhere)
        return self._db.execute(f"{_SEARCH}{has_all} ORDER BY rank", (*MARK, match, *sought))

    @contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            reason = _reason(error)
            refused = StoreError(
                f"The conversations in {self.path} cannot be {action}.", f"{reason.capitalize()}.", _hint(reason)
            )
            refused.is_passing = LOCKED in reason or FULL in reason
            raise refused from error


def _open(path: Path | None, busy_s: float) -> sqlite3.Connection:
    if path is not None:
        files.make_folder(path.parent)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # SQLite's other files get its mode
        for each in (path, *(path.with_name(f"{path.name}-{kind}") for kind in ("wal", "shm", "journal"))):
            with suppress(FileNotFoundError, PermissionError):  # another user's file keeps its mode
                each.chmod(0o600)  # it may come from a backup, or from a crash
    db = sqlite3.connect(path or ":memory:", timeout=busy_s, isolation_level=None, check_same_thread=False)
    try:
        db.row_factory = sqlite3.Row
        db.create_function("folded", 1, folded, deterministic=True)
        db.text_factory = lambda text: text.decode("utf-8", "replace")
        for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON", "secure_delete = ON"):
            db.execute(f"PRAGMA {pragma}")
        _migrate(db)
        db.execute(
            "DELETE FROM conversation WHERE deleted < ? OR id NOT IN (SELECT conversation FROM message)",
            (time.time() - RESTORABLE_S,),
        )
    except BaseException:
        db.close()
        raise
    return db


def _migrate(db: sqlite3.Connection) -> None:
    """Bring the tables up to date in one transaction."""
    if _version(db) == len(MIGRATIONS):
        return
    db.execute("BEGIN IMMEDIATE")
    done = _version(db)  # another application may have migrated it first
    if done > len(MIGRATIONS):
        raise sqlite3.DatabaseError(f"it has version {done}, made by a newer kvchat")
    for statements in MIGRATIONS[done:]:
        for statement in statements:
            db.execute(statement)
    db.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
    db.execute("COMMIT")


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def _reason(error: sqlite3.Error | OSError) -> str:
    if isinstance(error, OSError):
        return "the disk is full" if error.errno in files.FULL else error.strerror or str(error)
    # SQLite reports an I/O error if its shared-memory file cannot grow. Errors that kvchat raises have no error name.
    is_full = getattr(error, "sqlite_errorname", "") == "SQLITE_IOERR_SHMSIZE"
    return "the disk is full" if is_full else str(error)


def _hint(reason: str) -> str:
    if "newer" in reason:
        return "Update kvchat, or set KVCHAT_DATA_DIR to another folder."
    if any(damage in reason for damage in ("malformed", "not a database")):
        return "Move the file away, or restore it from a backup: kvchat never deletes it."
    if "Not a directory" in reason:
        return "Set KVCHAT_DATA_DIR to a writable folder."
    if FULL in reason:
        return "Free some disk space."
    if LOCKED in reason:
        return "Another program is using it: close it, or wait."
    return "Check free space and permissions there."


def _ancestors(changes: Changes, ids: Iterable[str]) -> set[str]:
    """Return the ids of the messages ``ids`` and of the leaf, and of all messages above them."""
    above: set[str] = set()
    for id in (*ids, changes.header.leaf):
        message = changes.messages.get(id or "")
        while message is not None and message.id not in above:
            above.add(message.id)
            message = changes.messages.get(message.parent or "")
    return above


def _columns(header: Header) -> dict[str, Any]:
    return {name: _storable(value) for name, value in vars(header).items()} | {"params": json.dumps(header.params)}


def _values(message: Message) -> dict[str, Any]:
    values = {name: getattr(message, name) for name in _MESSAGE}
    values["stats"] = json.dumps(dataclasses.asdict(message.stats)) if message.stats else None
    values["switch_lines"] = json.dumps([vars(change) for change in message.switch_lines])
    return {name: _storable(value) for name, value in values.items()}


def _message(row: sqlite3.Row) -> Message:
    stats = read_stats(json.loads(row["stats"])) if row["stats"] else None
    lines = tuple(ModeChange(**change) for change in json.loads(row["switch_lines"]))
    return Message(**{**dict(row), "stats": stats, "pinned": bool(row["pinned"]), "switch_lines": lines})


def _storable(value: Any) -> Any:
    """Replace lone surrogates by ``?``, because UTF-8 cannot encode them."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def folded(text: str) -> str:
    """Normalize a text for comparing without regard to case and the encoding of accents."""
    return normalize("NFC", normalize("NFC", text).casefold())


def _is_unindexed(word: str) -> bool:
    """True if the index does not contain it as a word: signs are not indexed, and combining marks split words."""
    composed, is_sign = normalize("NFC", word), not any(map(str.isalnum, word))
    return is_sign or bool(_UNSPACED.search(composed)) or any(category(one)[0] == "M" for one in composed)


def _match(words: list[str], is_last_prefix: bool) -> str:
    """Return an FTS5 query for every word, in any case and Unicode form; the last a prefix if ``is_last_prefix``."""
    queries = []
    for number, word in enumerate(words, 1):
        end = "*" if is_last_prefix and number == len(words) else ""
        lower = word.casefold()
        cased = (word, lower, lower.replace("ss", "ß"), word.lower(), word.upper(), word.title())
        forms = dict.fromkeys(normalize(form, each) for each in cased for form in ("NFC", "NFD"))
        quoted = ('"' + each.replace('"', '""') + '"' + end for each in forms)
        queries.append(f"({' OR '.join(quoted)})")
    return " AND ".join(queries)


def _excerpt(text: str, words: list[str]) -> str:
    """Return the text around the first word found, with all words found between ``MARK``."""
    forms = {normalize(form, word) for word in words for form in ("NFC", "NFD")}
    pattern = re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True))), re.IGNORECASE)
    found = pattern.search(text)
    first, last = found.span() if found else (0, 0)
    start, end = max(first - EXCERPT[0], 0), last + EXCERPT[1]
    shown = pattern.sub(lambda match: match[0].join(MARK), text[start:end])
    return f"{'…' * (start > 0)}{shown}{'…' * (end < len(text))}"
