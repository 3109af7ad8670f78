"""Writing a question: history, mentioned files, suggestions for commands and values, an editor."""
