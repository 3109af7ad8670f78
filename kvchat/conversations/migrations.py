"""The tables of the database, one migration a version; a released one is never changed."""

from __future__ import annotations

# ``parent`` is no foreign key: a branch that another application withdrew must not keep an answer from being saved.
# ``row`` joins the full-text index, which keeps no text of its own.
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
)
