"""Questions about facts hidden in a long text: the fact, its place, and the question.

A case is a conversation of about a given length with a fact at a given depth (0: beginning, 1: end) among filler
sentences. In tasks with several facts, the others are anywhere in the text. The wording is like the bundled model's
training data, except in ``fact``: its everyday facts between the sentences of a book suit any model that can answer
questions.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvchat.bench.texts import BOOKS, BREAK
from kvchat.engine.prompt import PromptEncoder, Stored
from kvchat.engine.synthetic_text import Case, hide, passage, sentences
from kvchat.protocol.messages import Turn

NAMES = ("Bija", "Koto", "Luma", "Tiso", "Rade", "Vano", "Sefi", "Nuro", "Pela", "Garo", "Hiva", "Modu")
CHAIN = 3  # variables
FILLER_TURNS = 4  # between the name and the question about it
# The fact, the question, and the text that the answer must contain.
FACTS = (
    ("The code of the garden gate is 73914.", "What is the code of the garden gate?", "73914"),
    ("Miss Taylor's parrot is called Pomponio.", "What is Miss Taylor's parrot called?", "Pomponio"),
    ("The train to Brighton leaves from platform 27.", "From which platform does the train to Brighton leave?", "27"),
    ("The new doctor of the village is Dr. Quillfeather.", "Who is the new doctor of the village?", "Quillfeather"),
    ("The spare key lies in the blue cabinet.", "Where does the spare key lie?", "blue cabinet"),
    ("The meeting room on the fifth floor is called Kestrel.", "What is the meeting room called?", "Kestrel"),
    ("The cook of the ship was born in Valparaiso.", "Where was the cook of the ship born?", "Valparaiso"),
    ("The treasure chest contains 316 gold coins.", "How many gold coins does the treasure chest contain?", "316"),
    ("The project Falcon was started by Margarethe Olsen.", "Who started the project Falcon?", "Olsen"),
    ("The phone number of the help desk is 6620418.", "What is the phone number of the help desk?", "6620418"),
    ("The office plants are watered by Leopold.", "Who waters the office plants?", "Leopold"),
    ("The number of the hotel room is 1408.", "What is the number of the hotel room?", "1408"),
    ("The sailing boat is called Esmeralda.", "What is the sailing boat called?", "Esmeralda"),
    ("The violin teacher lives in Marburg.", "Where does the violin teacher live?", "Marburg"),
    ("The bakery opens at half past five.", "When does the bakery open?", "half past five"),
    ("The winner of the chess tournament was Zoltan.", "Who was the winner of the chess tournament?", "Zoltan"),
)


@dataclass(frozen=True)
class Draw:
    """Draws the parts of a case: length in tokens, depth from 0 to 1, number of keys, a seeded generator."""

    tokens: int
    depth: float
    keys: int
    random_: random.Random
    tokenizer: Any

    def number(self) -> str:
        return str(self.random_.randrange(10_000, 100_000))

    def filler(self, tokens: int) -> list[str]:
        """Return synthetic sentences of about ``tokens`` tokens."""
        return self._of(sentences(self.random_.randrange(2**32)), tokens)

    def book(self, tokens: int) -> list[str]:
        """Return consecutive sentences of a bundled book, about ``tokens`` tokens, starting again after its end."""
        text = self.random_.choice(sorted(BOOKS.glob("*.txt"))).read_text("utf-8").replace(BREAK, " ")
        all_ = re.split(r"(?<=[.!?]) ", " ".join(text.split()))
        at = self.random_.randrange(len(all_))
        return self._of(itertools.chain(all_[at:], itertools.cycle(all_)), tokens)

    def _of(self, text: Iterator[str], tokens: int) -> list[str]:
        found, length = list[str](), 0
        while length < tokens:
            found.append(next(text))
            length += len(self.tokenizer.encode(f" {found[-1]}", add_special_tokens=False))
        return found


def case(task: str, tokens: int, depth: float, keys: int, seed: str, tokenizer: Any) -> Case:
    """Return the case of a task; the same ``seed`` gives the same case."""
    return TASKS[task](Draw(tokens, depth, keys, random.Random(f"{seed}/{task}/{tokens}/{depth}"), tokenizer))


def inside_answer(
    turns: Sequence[Turn], tokens: int, seed: int, tokenizer: Any
) -> tuple[list[int], list[int], list[int]]:
    """Return the ids of a prompt that asks for a story, of ``tokens`` tokens of a story, and of the last turn."""
    begun = (*turns[:-1], Turn("user", "Tell me a story."))
    told = (*begun, Turn("assistant", passage(sentences(seed), tokens, tokenizer)))
    encoder = PromptEncoder(tokenizer)
    prompt, story, whole = (list(encoder.encode(each, Stored()).ids) for each in (begun, told, (*told, turns[-1])))
    end = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(story, whole, strict=False)))
    return prompt, whole[len(prompt) : end], whole[end:]


def _passkey(draw: Draw) -> Case:
    number = draw.number()
    return _document(draw, f"The passkey is {number}. Remember it.", "What is the passkey?", number)


def _keys(draw: Draw) -> Case:
    """Ask for the value of one of several keys."""
    names, numbers = draw.random_.sample(NAMES, draw.keys), [draw.number() for _ in range(draw.keys)]
    others = [_value(name, number) for name, number in zip(names[1:], numbers[1:], strict=True)]
    question = f"What is the value of {names[0]}?"
    return _document(draw, _value(names[0], numbers[0]), question, numbers[0], others)


def _chain(draw: Draw) -> Case:
    """Ask for a variable that is set from a variable that is set from a number."""
    names, number = draw.random_.sample(NAMES, CHAIN), draw.number()
    told = [f"Let {names[0]} = {number}."]
    told += [f"Let {name} = {before}." for before, name in itertools.pairwise(names)]
    return _document(draw, " ".join(told), f"What is the value of {names[-1]}?", number)


def _fact(draw: Draw) -> Case:
    """Ask for one of several facts between the sentences of a book."""
    (told, question, answer), *others = draw.random_.sample(FACTS, draw.keys)
    return _document(draw, told, question, answer, [sentence for sentence, _, _ in others], draw.book(draw.tokens))


def _name(draw: Draw) -> Case:
    """Ask for the model's name, which the system prompt gives, after turns about something else."""
    name = draw.random_.choice(NAMES)
    between = [
        turn
        for _ in range(FILLER_TURNS)
        for turn in (Turn("user", " ".join(draw.filler(draw.tokens // FILLER_TURNS))), Turn("assistant", "I see."))
    ]
    return Case((Turn("system", f"Your name is {name}."), *between, Turn("user", "What is your name?")), name)


def _switches(draw: Draw) -> Case:
    """Ask in another mode for a passkey from an early turn."""
    return hide(draw.number(), draw.tokens, draw.tokenizer)


TASKS: dict[str, Callable[[Draw], Case]] = {
    "passkey": _passkey,
    "keys": _keys,
    "chain": _chain,
    "fact": _fact,
    "name": _name,
    "switches": _switches,
}
# Their facts are in the system prompt or in an early turn.
WITHOUT_DEPTH = ("name", "switches")


def _value(name: str, number: str) -> str:
    return f"The value of {name} is {number}."


def _document(
    draw: Draw,
    told: str,
    question: str,
    answer: str,
    others: Sequence[str] = (),
    filler: Sequence[str] | None = None,
) -> Case:
    """Make a text with the fact ``told`` at the depth and ``others`` anywhere, then ask in another turn."""
    text = list(draw.filler(draw.tokens) if filler is None else filler)
    length = len(text)
    places = [(draw.depth, told), *((draw.random_.random(), sentence) for sentence in others)]
    for depth, sentence in sorted(places, reverse=True):  # from the end, so that earlier places stay valid
        text.insert(round(depth * length), sentence)
    return Case((Turn("user", " ".join(text)), Turn("assistant", "I see."), Turn("user", question)), answer)
