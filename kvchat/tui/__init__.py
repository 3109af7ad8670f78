"""The terminal application: Textual on one side, the engine client on the other, no torch."""
