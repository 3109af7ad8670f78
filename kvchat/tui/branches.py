"""The branches of a conversation (edit, answer again, continue, undo, select) and its pinned messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvchat.config.modes import refuse_too_much
from kvchat.conversations.conversation import Message
from kvchat.errors import UsageError
from kvchat.tui.answers import Answers
from kvchat.tui.state import ChatState, Footed, Phase, message_ranges, no_engine
from kvchat.tui.view import ChatView


@dataclass(eq=False)
class Branches:
    """Acts on the message chosen in the transcript, else on the last one; refuses while the engine is busy."""

    state: ChatState
    answers: Answers
    view: ChatView

    async def regenerate(self) -> None:
        """Answer a question again; earlier answers stay as siblings."""
        self.require_ready()
        question = self.chosen_question()
        self.state.conversation.go_to(question.id)
        await self.answers.begin(question.id)

    async def resume(self) -> None:
        self.require_ready()
        answer = self.state.conversation.leaf
        if answer is None or answer.role != "assistant":
            raise UsageError("There is no answer to continue.", hint="Ask something first.")
        await self.answers.begin(answer.parent, answer)

    def edit(self) -> None:
        """Put the chosen message or the last question into the prompt; the next text sent replaces it."""
        if not self.view.restore_prompt(self._editable().text):
            raise UsageError("The prompt holds another text.", hint="Send it or delete it first.")
        self.begin_editing()

    def begin_editing(self) -> None:
        """Let the next text sent replace the chosen message or the last question."""
        self.state.edited = self._editable().id
        self.view.show_state(self.state)

    def _editable(self) -> Message:
        self.require_ready()
        return self.state.conversation.messages.get(self.view.chosen or "") or self.chosen_question()

    async def resume_edited(self, text: str) -> None:
        """Replace the edited answer by ``text`` and continue it."""
        self.require_ready()
        edited = self.state.conversation.messages[self.state.edited or ""]
        self.state.edited = None
        self.state.conversation.go_to(edited.parent)
        answer = self.state.conversation.pin(self.state.conversation.answer(text).id, edited.pinned)
        await self.answers.begin(edited.parent, answer)

    def stop_editing(self) -> None:
        """Append the next question to the conversation again."""
        self.state.edited = None
        self.view.show_state(self.state)

    async def leave_edited(self) -> bool:
        """End the path before the edited question, so that the next question becomes its sibling.

        Without an edited question, the next one replaces a last question whose answer had not begun when the
        conversation was left. Return whether the edited question was pinned; its sibling is then pinned too.
        """
        edited = self.state.conversation.messages.get(self.state.edited or "")
        if edited is not None and (self.answers.is_asking or self.answers.answer is not None):
            self.require_ready()  # the answer being written is on that path
        self.state.edited = None
        if edited is None:
            last, is_asked = self.state.conversation.leaf, self.state.phase.busy or self.answers.is_asking
            if last is not None and last.role == "user" and not is_asked:
                await self._end_before(last)
            return False
        await self._end_before(edited)
        return edited.pinned

    async def undo(self) -> None:
        """Return the last question to the prompt and end the path before it; it stays as a branch."""
        self.require_ready()
        question = self.chosen_question()
        await self._end_before(question)
        self.view.restore_prompt(question.text)

    async def select_sibling(self, step: int) -> None:
        """Show the sibling ``step`` after the chosen message, or after the last message before it that has siblings."""
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
        await self._show_below(message.parent, shown[place:])

    def require_ready(self) -> None:
        """Refuse unless the engine is ready and idle."""
        if self.state.phase is Phase.DOWN:
            raise no_engine()
        if self.state.phase is not Phase.READY:
            raise UsageError("The engine is busy.", hint="/stop stops the answer; then try again.")

    async def _end_before(self, question: Message) -> None:
        self.state.conversation.go_to(question.parent)
        await self._show_below(question.parent)

    async def _show_below(self, parent: str | None, messages: Sequence[Footed] = ()) -> None:
        """Replace everything shown below a message; without ``parent`` replace all, and forget what is stored."""
        if parent is None:
            self.state.forget_stored()
            self.view.show_snapshot(self.state.snapshot)
        await self.view.show_messages(messages, parent)

    def chosen_question(self) -> Message:
        """Return the question chosen in the transcript, or the chosen answer's question, or else the last one."""
        conversation = self.state.conversation
        path = conversation.path_to(self.view.chosen) or conversation.path
        found = next((message for message in reversed(path) if message.role == "user"), None)
        if found is None:
            raise UsageError("There is no question yet.", hint="Ask one first.")
        return found


@dataclass(eq=False)
class Pins:
    """Pins messages; ``last`` is the id of the latest, which is unpinned if the engine refuses to pin that much."""

    state: ChatState
    answers: Answers
    view: ChatView
    last: str = ""

    def pin(self, message: Message) -> None:
        """Pin a message.

        Raises:
            UsageError: too much would be pinned, or the model runs on a server.
        """
        self.state.refuse_served()
        if self.state.info is not None:
            refuse_too_much(self.state.info.model, self.state.info.context, self._known_tokens(message))
        self._mark(message, True)
        self.last = message.id

    def unpin(self, message: Message) -> None:
        self._mark(message, False)

    def take_back(self) -> None:
        """Unpin the message pinned last, which the engine has refused."""
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
        """Return the number of tokens known to be pinned with ``message``; only the engine can count all of them.

        Unless the system prompt is pinned, the first question is left out: its known tokens include that prompt.
        """
        conversation, first = self.state.conversation, self.state.conversation.path[0]
        ranges = message_ranges(conversation.path, None, 0)
        if conversation.system and not self.state.params.get("pin_system", False):
            ranges.pop(first.id, None)
        pinned = {one.id for one in conversation.path if one.pinned} | {message.id}
        return sum(end - start for id, (start, end) in ranges.items() if id in pinned)
