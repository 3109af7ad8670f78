"""Handlers of slash commands; ``tui.actions`` lists the commands."""
