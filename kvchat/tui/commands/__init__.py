"""What slash commands do with their arguments; ``tui.actions`` lists the commands."""
