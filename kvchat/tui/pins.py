"""The pinned messages of the conversation, and the limit that the engine has for them."""

from __future__ import annotations

from kvchat.config.modes import refuse_too_much
from kvchat.conversations.conversation import Message
from kvchat.tui import visibility
from kvchat.tui.answering.answers import Answers
from kvchat.tui.state import ChatState
from kvchat.tui.view import ChatView


class Pins:
    """Marks messages as pinned; the last one is unmarked where the engine says that it is too much."""

    def __init__(self, state: ChatState, answers: Answers, view: ChatView) -> None:
        self.state = state
        self.answers = answers
        self.view = view
        self._last = ""

    def pin(self, message: Message) -> None:
        """Pin a message.

        Raises:
            TooMuchPinnedError: with those that are pinned already it is more than the engine takes.
        """
        if self.state.info is not None:
            refuse_too_much(self.state.info.model, self.state.info.context, self._known_tokens(message))
        self._mark(message, True)
        self._last = message.id

    def unpin(self, message: Message) -> None:
        """Pin a message no longer."""
        self._mark(message, False)

    def take_back(self) -> None:
        """Unpin the message that was pinned last: the engine has refused it."""
        last = next((one for one in self.state.conversation.path if one.id == self._last), None)
        self._last = ""
        if last is not None and last.pinned:
            self._mark(last, False)
            self.view.toast("The message pinned last is unpinned again.")

    def _mark(self, message: Message, pinned: bool) -> None:
        changed = self.state.conversation.pin(message.id, pinned)
        self.view.show_footer(changed, self.state.footer(changed))
        self.answers.take_up()

    def _known_tokens(self, message: Message) -> int:
        """Tokens that will be pinned with ``message``, as far as they are known; the engine counts them all.

        Those of the first question are counted with the system prompt, which may not be pinned.
        """
        conversation, first = self.state.conversation, self.state.conversation.path[0]
        ranges = visibility.message_ranges(conversation.path, None, 0)
        if conversation.system and not self.state.params.get("pin_system", False):
            ranges.pop(first.id, None)
        pinned = {one.id for one in conversation.path if one.pinned} | {message.id}
        return sum(end - start for id, (start, end) in ranges.items() if id in pinned)
