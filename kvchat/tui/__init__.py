"""The terminal application: Textual on one side, the engine client on the other, no torch."""

import os

# Textual reads it when it is imported; ``app``, which does that, takes it out again: an editor is to see the
# environment as it was. At its own 60 frames a second a key waits for the next one while an answer grows: 29 ms
# instead of 5 at 120x40 until it is seen.
FRAMES = "TEXTUAL_FPS"
ARE_FRAMES_CHOSEN = FRAMES in os.environ
os.environ.setdefault(FRAMES, "120")
