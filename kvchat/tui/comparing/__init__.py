"""Modes side by side: one question answered in several, a fact looked for in each."""
