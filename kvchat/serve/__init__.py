"""``kvchat serve``: kvchat's engine for other programs, over OpenAI's API; without torch."""
