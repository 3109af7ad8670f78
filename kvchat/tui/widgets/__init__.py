"""Widgets own what they show; they know neither the engine nor the conversation."""
