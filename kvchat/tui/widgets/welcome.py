"""The first screen: what the model is good for, and questions to begin with."""

from __future__ import annotations

from textual.content import Content
from textual.style import Style
from textual.widgets import Static

from kvchat.foreign_text import visible

BUNDLED = "bundled"
ABOUT_BUNDLED = (
    "The bundled model is tiny (17M): it remembers what it is told, finds facts in long texts, tells short stories and"
    " explains the KV modes. It knows nothing of the world and writes no code; -m MODEL loads another."
)
EXAMPLES = {
    True: (
        "My cat is called Biscuit. Tell me a story.",
        "Tell me a story about a lighthouse.",
        "How does speculative mode work?",
    ),
    False: (
        "My cat is called Biscuit. Tell me a short story.",
        "What is a KV cache? Answer in three sentences.",
        "Write four lines about a lighthouse.",
    ),
}


def example(typed: str, model: str) -> str | None:
    """The question that ``typed`` stands for on the first screen: a number, or nothing for the first."""
    examples = EXAMPLES[model == BUNDLED]
    return examples[int(typed or 1) - 1] if typed in ("", "1", "2", "3") else None


class Welcome(Static):
    """Stands in an empty conversation; a click on a question asks it."""

    DEFAULT_CSS = """
    Welcome { margin: 1 2; color: $text-muted; }
    """

    def __init__(self, model: str, keys: str) -> None:
        super().__init__(markup=False)
        self._model = model
        self._keys = keys
        self._offer = ""
        self.update(self._content())

    def offer(self, title: str, key: str) -> None:
        """Offer to go on with the conversation of this title."""
        self._offer = f"\n\n{key} goes on with “{visible(title)}”."
        self.update(self._content())

    def _content(self) -> Content:
        examples = EXAMPLES[self._model == BUNDLED]
        rows = [
            Content.assemble(
                (f" {number} ", "bold $accent"),
                (f" {text}\n", Style.from_meta({"@click": f"screen.ask_example('{number}')"})),
            ).stylize("$foreground")
            for number, text in enumerate(examples, 1)
        ]
        about = f"{ABOUT_BUNDLED}\n\n" if self._model == BUNDLED else ""
        return Content.assemble(about, *rows, f"\n{self._keys}{self._offer}")
