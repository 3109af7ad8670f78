"""The branches of the conversation, and its pinned messages within the limit that the engine has for them.

Edit a question, answer it again, go on with an answer, walk between siblings.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvchat.config.modes import refuse_too_much
from kvchat.conversations.conversation import Message
from kvchat.errors import UsageError
from kvchat.tui.answers import Answers
from kvchat.tui.state import ChatState, Phase, message_ranges, no_engine
from kvchat.tui.view import ChatView


@dataclass(eq=False)
class Branches:
    """Each needs an engine that is ready. They act on the message chosen in the transcript, else on the last one."""

    state: ChatState
    answers: Answers
    view: ChatView

    async def regenerate(self) -> None:
        """Answer a question again; its answers so far stay as siblings."""
        self.require_ready()
        question = self.chosen("user")
        self.state.conversation.go_to(question.id)
        await self.view.show_messages((), below=question.id)
        await self.answers.begin()

    async def resume(self) -> None:
        """Go on with the last answer."""
        self.require_ready()
        answer = self.state.conversation.leaf
        if answer is None or answer.role != "assistant":
            raise UsageError("There is no answer to continue.", hint="Ask something first.")
        await self.view.show_messages((), below=answer.parent)
        await self.answers.begin(answer)

    def edit(self) -> None:
        """Put the chosen message or the last question into the prompt; the next one sent takes its place."""
        if not self.view.restore_prompt(self._editable().text):
            raise UsageError("The prompt holds another text.", hint="Send it or delete it first.")
        self.begin_editing()

    def begin_editing(self) -> None:
        """Let the next text sent take the place of the chosen message or the last question."""
        self.state.edited = self._editable().id
        self.view.show_state(self.state)

    def _editable(self) -> Message:
        self.require_ready()
        return self.state.conversation.messages.get(self.view.chosen or "") or self.chosen("user")

    async def resume_edited(self, text: str) -> None:
        """Go on with ``text`` in place of the answer that is edited."""
        self.require_ready()
        edited = self.state.conversation.messages[self.state.edited or ""]
        self.state.edited = None
        self.state.conversation.go_to(edited.parent)
        answer = self.state.conversation.pin(self.state.conversation.answer(text).id, edited.pinned)
        await self.view.show_messages((), below=edited.parent)
        await self.answers.begin(answer)

    def stop_editing(self) -> None:
        """Send the next question at the end again."""
        self.state.edited = None
        self.view.show_state(self.state)

    async def leave_edited(self) -> bool:
        """End the path before the edited question, if there is one: the next question is its sibling.

        Whether it was pinned, which its sibling then is too.
        """
        edited = self.state.conversation.messages.get(self.state.edited or "")
        if edited is not None and (self.answers.is_asking or self.answers.answer is not None):
            self.require_ready()  # the answer being written is on that path
        self.state.edited = None
        if edited is None:
            return False
        await self._end_before(edited)
        return edited.pinned

    async def undo(self) -> None:
        """End the path before the last question, which is given back to the prompt; it stays as a branch."""
        self.require_ready()
        question = self.chosen("user")
        await self._end_before(question)
        self.view.restore_prompt(question.text)

    async def select_sibling(self, step: int) -> None:
        """Show the sibling ``step`` further on of the chosen message, else of the last message that has one."""
        self.require_ready()
        conversation = self.state.conversation
        path = conversation.path_to(self.view.chosen) or conversation.path
        message = next((one for one in reversed(path) if len(conversation.siblings(one.id)) > 1), None)
        if message is None:
            raise UsageError(
                "There is only one branch here.", hint="Edit a question or answer it again to make another."
            )
        siblings = conversation.siblings(message.id)
        conversation.select(siblings[(siblings.index(message) + step) % len(siblings)].id)
        shown = self.state.footed()
        place = next(index for index, (one, _) in enumerate(shown) if one.parent == message.parent)
        await self.view.show_messages(shown[place:], below=message.parent)

    def require_ready(self) -> None:
        """Refuse what needs an engine at rest."""
        if self.state.phase is Phase.DOWN:
            raise no_engine()
        if self.state.phase is not Phase.READY:
            raise UsageError("The engine is busy.", hint="/stop stops the answer; then try again.")

    async def _end_before(self, question: Message) -> None:
        self.state.conversation.go_to(question.parent)
        await self.view.show_messages((), below=question.parent)

    def chosen(self, role: str) -> Message:
        """The message chosen in the transcript or the last one; of a role, the nearest at or before it."""
        conversation = self.state.conversation
        path = conversation.path_to(self.view.chosen) or conversation.path
        found = next((message for message in reversed(path) if message.role == role), None)
        if found is None:
            raise UsageError("There is no question yet.", hint="Ask one first.")
        return found


@dataclass(eq=False)
class Pins:
    """Marks messages as pinned; ``last``, an id, is unmarked where the engine says that it is too much."""

    state: ChatState
    answers: Answers
    view: ChatView
    last: str = ""

    def pin(self, message: Message) -> None:
        """Pin a message."""
        self.state.refuse_served()
        if self.state.info is not None:
            refuse_too_much(self.state.info.model, self.state.info.context, self._known_tokens(message))
        self._mark(message, True)
        self.last = message.id

    def unpin(self, message: Message) -> None:
        self._mark(message, False)

    def take_back(self) -> None:
        """Unpin the message that was pinned last: the engine has refused it."""
        last = next((one for one in self.state.conversation.path if one.id == self.last), None)
        self.last = ""
        if last is not None and last.pinned:
            self._mark(last, False)
            self.view.toast("The last message you pinned is unpinned again.")

    def _mark(self, message: Message, pinned: bool) -> None:
        changed = self.state.conversation.pin(message.id, pinned)
        self.view.show_footer(changed, self.state.footer(changed))
        self.answers.resume_kv()

    def _known_tokens(self, message: Message) -> int:
        """Tokens that will be pinned with ``message``, as far as they are known; the engine counts them all.

        Those of the first question are counted with the system prompt, which may not be pinned.
        """
        conversation, first = self.state.conversation, self.state.conversation.path[0]
        ranges = message_ranges(conversation.path, None, 0)
        if conversation.system and not self.state.params.get("pin_system", False):
            ranges.pop(first.id, None)
        pinned = {one.id for one in conversation.path if one.pinned} | {message.id}
        return sum(end - start for id, (start, end) in ranges.items() if id in pinned)
