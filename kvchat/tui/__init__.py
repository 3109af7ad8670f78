"""The terminal application: Textual on one side, the engine client on the other, no torch."""

import os

# Textual reads it when it is imported. At its own 60 frames a second a key waits for the next one while an answer
# grows: 29 ms instead of 5 at 120x40 until it is seen.
os.environ.setdefault("TEXTUAL_FPS", "120")
