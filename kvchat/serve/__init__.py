"""``kvchat serve``: kvchat's engine for other programs, by the API that OpenAI's clients speak. No torch here."""
