"""Conversations on disk, and their branches."""
