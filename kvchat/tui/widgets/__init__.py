"""Widgets hold what they show; they use neither the engine nor the controller, and report by messages."""
