"""Text that is final, for readers that cannot take back what they have shown (a pipe, ``Session.chat``)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from kvchat.protocol.messages import Event, Finished, Text, Withdrawn


def hold_back(events: Iterable[Event], withdrawable: Callable[[], int]) -> Iterator[Event]:
    """The events of an answer without ``Withdrawn``: text is held back as long as recovery may still withdraw it.

    ``withdrawable()`` is the number of last tokens that may still be withdrawn (0 holds nothing back); a token has at
    most one ``Text``. Other events pass at once, so they may precede older text.
    """
    held: deque[Text] = deque()
    for event in events:
        if isinstance(event, Text):
            held.append(event)
            while len(held) > withdrawable():
                yield held.popleft()
        elif isinstance(event, Withdrawn):
            _cut(held, event.chars)
        else:
            if isinstance(event, Finished):
                yield from held
            yield event


def _cut(held: deque[Text], chars: int) -> None:
    """Take ``chars`` characters off the end."""
    while chars and held:
        last = held.pop()
        kept = max(len(last.text) - chars, 0)
        chars -= len(last.text) - kept
        if kept:
            held.append(Text(last.text[:kept], last.tokens))
