"""A question before it is sent: history, files mentioned, commands and values offered, an editor."""
