"""Save a conversation, as the application does."""

from __future__ import annotations

from kvchat.conversations.conversation import Conversation
from kvchat.conversations.store import ConversationStore


def keep(store: ConversationStore, conversation: Conversation) -> None:
    """Save what changed in a conversation, as the application does."""
    changes = conversation.changes()
    assert changes is not None
    store.save(changes)
    conversation.mark_saved(changes)
