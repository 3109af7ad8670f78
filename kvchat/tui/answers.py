"""The answer in progress, and the questions and commands queued for the engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from time import monotonic

from kvchat import thoughts
from kvchat.conversations.conversation import CUT_OFF, Conversation, Message, ModeChange
from kvchat.protocol.client import EngineClient
from kvchat.protocol.messages import Finished, Started, Stop, Switched, Text
from kvchat.tui.state import ChatState, Phase, SwitchLine
from kvchat.tui.view import AnswerView, ChatView, QuestionView

NO_TEXT = Message(parent=None, role="assistant", text="")


@dataclass(eq=False)
class Answers:
    """At most one answer in progress, and the ``queue`` of questions after it.

    ``answer`` is None between answers, and after ``detach`` until the engine has finished the detached one.
    ``save`` writes the conversation to disk; speeds are measured only while it ``is_real_time``.
    """

    state: ChatState
    client: EngineClient
    view: ChatView
    save: Callable[[], Awaitable[None]]
    is_real_time: Callable[[], bool] = lambda: True

    def __post_init__(self) -> None:
        self._continued = NO_TEXT
        self._tags: tuple[str, ...] = ()
        self.is_asking = self._is_stop_due = False
        self.answer: AnswerView | None = None
        self.queue = QuestionQueue(self.view)
        self._question: QuestionView | None = None
        self._switch: SwitchLine | None = None
        self._marks: list[tuple[int, SwitchLine]] = []  # the answer's switches, and the characters before each
        self._between: tuple[str, SwitchLine] | None = None  # the last switch between answers; the answer before it

    async def begin(self, below: str | None, continued: Message = NO_TEXT) -> None:
        """Request an answer to the last question, or the rest of the last answer, ``continued``.

        It replaces everything ``below`` a message in the transcript, as in ``ChatView.show_messages``.
        """
        conversation = self.state.conversation
        self._begin_asking(continued)
        await self.view.show_messages((), below)
        await self._request(conversation)

    async def _request(self, conversation: Conversation) -> None:
        """Request the answer that was begun in this conversation."""
        answer = await self.view.add_answer()
        if await self._is_dropped(conversation):
            await answer.remove()
            return
        self.answer = answer
        self.answer.resume(self._continued)
        self.is_asking = False
        self.client.send(conversation.command(self.state.sampling))
        if self._is_stop_due:
            self.client.send(Stop())

    async def ask(self, text: str) -> None:
        """Ask a question from a recording, without queuing it."""
        await self.send(await self.view.add_question(text, queued=False))

    def resume_kv(self) -> None:
        """Let the engine restore the conversation's K/V before the next question."""
        if self.state.info is not None and self.state.phase is not Phase.DOWN and self.state.conversation.leaf:
            self.client.send(self.state.conversation.to_resume())

    @property
    def is_free(self) -> bool:
        """True if the engine is ready and no queued question is to be sent first."""
        return self.state.phase is Phase.READY and not self.queue.is_active

    def mark_pending(self) -> None:
        """Let a stop from now on end the coming answer, even if it is not requested yet."""
        if not self.is_asking:
            self.is_asking, self._is_stop_due = True, False

    def stop(self) -> None:
        """Stop the answer, a pending one as soon as it is requested, and hold the queue."""
        self.queue.hold()
        if self.state.phase is Phase.PREFILL:
            self.wait("stopping …")  # the chunk being processed may take seconds
        if self.is_asking:
            self._is_stop_due = True
        else:
            self.client.send(Stop())

    def begun(self, started: Started) -> None:
        """Note that the prompt is being processed; its end may begin a thought, unless an answer is continued."""
        self._tags = started.tags
        if self.answer is not None and not self._continued.text:
            self.answer.thought = started.thought

    def wait(self, words: str) -> None:
        """Show the progress of the prompt in place of its answer; without an answer, the progress of ``/rebuild``."""
        if self.answer is not None:
            self.answer.wait(words)
        elif self.state.phase is Phase.PREFILL:
            self.show_phase(Phase.PREFILL, words)

    def feed(self, piece: Text) -> None:
        """Append decoded text; drop the text of a detached answer."""
        if self.answer is None:
            return
        if self.state.phase is not Phase.ANSWERING:
            self.show_phase(Phase.ANSWERING)
        self.answer.feed(piece.text)
        if not self.answer.thought and (tag := thoughts.begun_with(self.answer.text, self._tags)):
            self.answer.thought = thoughts.end_of(tag)
        if self._switch is not None and self.is_real_time():
            self._switch.count(piece.tokens, monotonic())

    async def withdraw(self, chars: int) -> None:
        """Remove the end of the answer and show it in a note, struck through."""
        if self.answer is not None and chars:
            struck = await self.answer.withdraw(chars)
            self.view.add_note("withdrawn by recovery: ", struck.strip())

    async def add_switch(self, switched: Switched, speed: float | None) -> None:
        """Add a line for a switch; it shows the speed after the switch once enough tokens are generated.

        Switches without a token between them are merged into one.
        """
        self._close_switch()
        last, self._switch = self._switch, None
        if last is not None and last.is_idle and last.switched.total == switched.total:
            await last.remove()
            self._forget(last)
            moved, speed = last.switched.moved_bytes + switched.moved_bytes, last.speed
            if switched.mode == last.switched.before != last.switched.mode:
                self.view.add_way_back(switched)
                return
            switched = replace(switched, before=last.switched.before, moved_bytes=moved)
        self._switch = await self.view.add_switch(switched, speed)
        is_mounting = self.is_asking and self.state.phase is Phase.PREFILL
        if self.answer is not None or is_mounting:
            self._marks.append((len((self.answer or self._continued).text), self._switch))
        elif (answer := self.state.conversation.leaf) is not None and answer.role == "assistant":
            self._between = answer.id, self._switch
            change = _change(len(answer.text), self._switch)
            self.state.conversation.mark_switches(answer.id, (*answer.switch_lines, change))

    @property
    def switch_positions(self) -> tuple[int, ...]:
        """The number of tokens stored at each mode switch on the path shown, including the answer in progress."""
        path = self.state.conversation.path
        changes = [change for message in path for change in message.switch_lines]
        changes += [_change(chars, switch) for chars, switch in self._marks] if self.answer is not None else []
        return tuple(dict.fromkeys(change.position for change in changes if change.mode and change.position))

    def _forget(self, switch: SwitchLine) -> None:
        """Remove a switch that is merged into the next one."""
        self._marks = [mark for mark in self._marks if mark[1] is not switch]
        if self._between is not None and self._between[1] is switch:
            id, messages = self._between[0], self.state.conversation.messages
            if id in messages:
                self.state.conversation.mark_switches(id, messages[id].switch_lines[:-1])

    async def finish(self, finished: Finished) -> None:
        """Complete the answer; if it was stopped before its first word, return its question to the prompt."""
        answer, self.answer = self.answer, None
        switch_lines = self._take_lines()
        if answer is None:
            return
        if self._continued.text or finished.text or finished.reason != "stopped":
            receipt = self.state.receipt(finished)
            message = self.state.conversation.answer(
                self._continued.text + finished.text,
                finished.reason,
                receipt,
                finished.stats,
                switch_lines,
                self.state.model_name,
                answer.thought,
            )
            await answer.finish(message, self.state.footer(message))
            await self.save()
        else:
            await answer.remove()
            await self._return_question()

    def checkpoint(self) -> None:
        """Put the text so far into the conversation, to be saved with it."""
        conversation = self.state.conversation
        if self.answer is not None and self.answer.text and conversation.last_text() != self.answer.text:
            self._keep(self.answer, "", self._lines())

    async def abandon(self) -> bool:
        """Keep the text of the answer in progress and return True; without text return its question to the prompt."""
        answer, self.answer = self.answer, None
        if answer is None:
            return False
        self.queue.hold()
        switch_lines = self._take_lines()
        if answer.text:
            message = self._keep(answer, CUT_OFF, switch_lines)
            await answer.finish(message, self.state.footer(message))
            await self.save()
        else:
            await answer.remove()
            await self._return_question()
        return bool(answer.text)

    def detach(self) -> None:
        """Leave the conversation: keep the text of its answer in progress, and return its queue to the prompt."""
        if self.answer is not None and self.answer.text:
            self._keep(self.answer, "stopped", self._lines())
        if queued := self.queue.take_texts():
            self._restore(queued, "The queued text")
        self.answer = self._question = self._switch = None

    async def ready(self) -> None:
        """Note that the engine is ready: run the queued commands up to the first question, and send that."""
        self.show_phase(Phase.READY)
        while self.state.phase is Phase.READY and (waiting := self.queue.take_next()) is not None:
            await waiting.run()

    def defer(self, command: QuestionView, run: Callable[[], Awaitable[None]]) -> None:
        """Queue a command; it leaves the transcript when it runs."""

        async def leave_and_run() -> None:
            gone = command.remove()
            await run()  # before anything else can be asked
            await gone

        self.queue.add(Waiting(command, leave_and_run, is_question=False))

    async def send(self, question: QuestionView, pinned: bool = False) -> None:
        """Put a question into the conversation and request its answer."""
        self._question = question
        conversation = self.state.conversation
        message = conversation.ask(question.text, pinned)
        question.send(message, self.state.footer(message))
        self._begin_asking()
        await self.save()
        if not await self._is_dropped(conversation):
            await self._request(conversation)

    async def down(self) -> None:
        """Note that no engine runs: return a single queued question to the prompt, or hold several."""
        self.show_phase(Phase.DOWN)
        self.queue.hold()
        if len(self.queue) == 1:
            self._restore(await self.queue.take_back(), "The queued text")

    def _keep(self, answer: AnswerView, ending: str, switch_lines: tuple[ModeChange, ...]) -> Message:
        """Put the answer so far into the conversation."""
        return self.state.conversation.answer(
            answer.text, ending, switch_lines=switch_lines, model=self.state.model_name, thought=answer.thought
        )

    async def _return_question(self) -> None:
        """Return the unanswered question to the prompt; if it has earlier answers, show the newest."""
        conversation = self.state.conversation
        if text := conversation.withdraw():
            self._restore(text, "The answer had not started; the question")
            if self._question is not None:
                await self._question.remove()
            else:  # it came with the conversation
                await self.view.show_messages((), below=conversation.leaf.id if conversation.leaf else None)
        elif conversation.leaf is not None:
            await self.view.show_messages(self.state.footed()[-1:], below=conversation.leaf.parent)
        self._question = None
        await self.save()

    def _restore(self, text: str, what: str) -> None:
        """Return a sent text to the prompt; if the prompt holds another one, leave it in the prompt history."""
        place = "back in the prompt" if self.view.restore_prompt(text) else "in the prompt history"
        self.view.toast(f"{what} is {place}.")

    def _begin_asking(self, continued: Message = NO_TEXT) -> None:
        self.mark_pending()
        self._continued, self._marks = continued, []
        self.state.note_mode()
        self.state.first_mode, self.state.is_stored, self.state.prompt_tokens = "", True, None
        self.show_phase(Phase.PREFILL)

    async def _is_dropped(self, conversation: Conversation) -> bool:
        """Return whether to drop the answer, because the user changed the conversation or the engine has ended.

        Then return its question to the prompt, unless that belongs to the previous conversation.
        """
        is_other = self.state.conversation is not conversation
        has_ended = self.state.phase is not Phase.PREFILL  # it may be ready again
        if not (is_other or has_ended):
            return False
        self.is_asking = False
        if not has_ended:
            self.show_phase(Phase.READY)
        elif not is_other:
            self.queue.hold()
            await self._return_question()
        return True

    def _lines(self) -> tuple[ModeChange, ...]:
        return (*self._continued.switch_lines, *(_change(chars, switch) for chars, switch in self._marks))

    def _take_lines(self) -> tuple[ModeChange, ...]:
        """Return the final switches of a finished answer."""
        self._close_switch()
        if self._marks:
            self._switch = None
        return self._lines()

    def _close_switch(self) -> None:
        if self._switch is not None:
            self._switch.close(monotonic())

    def show_phase(self, phase: Phase, stage: str = "") -> None:
        self.state.enter_phase(phase, stage)
        self.view.show_state(self.state)


def _change(chars: int, switch: SwitchLine) -> ModeChange:
    """Return the record of a switch after ``chars`` characters of an answer."""
    switched = switch.switched
    mode = switched.mode if switched.mode != switched.before else ""
    return ModeChange(chars, switch.line, switched.total, mode)


@dataclass(frozen=True)
class Waiting:
    """A queued question or command in the transcript; ``run`` sends or executes it."""

    view: QuestionView
    run: Callable[[], Awaitable[None]]
    is_question: bool = True


class QuestionQueue:
    """Questions and commands, sent one by one whenever the engine is ready, unless the queue ``is_held``.

    A stopped or failed answer holds the queue, because the questions may have assumed a complete answer.
    """

    def __init__(self, view: ChatView) -> None:
        self._view = view
        self._waiting: list[Waiting] = []
        self.is_held = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def has_questions(self) -> bool:
        return any(one.is_question for one in self._waiting)

    @property
    def is_active(self) -> bool:
        """True if the first item is sent as soon as the engine is ready."""
        return bool(self._waiting) and not self.is_held

    @property
    def last(self) -> str:
        """The text queued last; "" if the queue is empty."""
        return self._waiting[-1].view.text if self._waiting else ""

    def add(self, waiting: Waiting) -> None:
        self._waiting.append(waiting)
        self._show()

    def take_next(self) -> Waiting | None:
        """Remove and return the first item; None if the queue is empty or held."""
        if not self.is_active:
            return None
        waiting = self._waiting.pop(0)
        self._show()
        return waiting

    async def take_back(self) -> str:
        """Remove the last item, also from the transcript, and return its text; "" if the queue is empty."""
        if not self._waiting:
            return ""
        view = self._waiting.pop().view
        self._show()
        await view.remove()
        return view.text

    def hold(self) -> None:
        """Send nothing until ``release``."""
        self.is_held = True
        self._show()

    def release(self) -> None:
        self.is_held = False
        self._show()

    def take_texts(self) -> str:
        """Empty the queue and return its texts; the widgets disappear with the conversation."""
        texts = "\n\n".join(one.view.text for one in self._waiting)
        self._waiting.clear()
        self._show()
        return texts

    async def clear(self) -> None:
        while self._waiting:
            await self.take_back()

    def _show(self) -> None:
        self.is_held = self.is_held and bool(self._waiting)
        self._view.show_queue(len(self._waiting), self.is_held)
