"""Tell a command from a question by the first word, and end a command that cannot print."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import typer
from typer.core import TyperGroup

from kvchat.config.validation_errors import refused_by_pydantic
from kvchat.errors import KvchatError, UsageError
from kvchat.foreign_text import visible

CHAT = "chat"
MEANT = {"help": "--help", "version": "--version"}  # what other programs have as commands


class Commands(TyperGroup):
    """Opens the chat with a question in place of a command. Ends quietly when stdout is closed (``| head -1``)."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        with _made_visible():
            return super().make_context(*args, **extra)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse; a question, and the options around it, are those of the chat."""
        _, words, _ = self.make_parser(ctx).parse_args(args=list(args))
        return super().parse_args(ctx, [CHAT, *args] if words and self._is_question(words[0]) else args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command; one with a slip is refused."""
        word = args[0]
        if word not in self.commands and not ctx.resilient_parsing:
            meant = MEANT.get(word) or get_close_matches(word, self.commands, n=1)[0]
            ctx.fail(f'There is no command "{word}". Did you mean {meant}? As a question: kvchat chat "{word}"')
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            with _made_visible():
                return super().invoke(ctx)
        except typer.BadParameter as error:
            if (refused := refused_by_pydantic(error.__cause__)) is None:
                raise
            raise _refusal(error, *refused) from None
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python still flushes at its exit
            raise typer.Exit(0) from None
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise KvchatError(
                "The output cannot be written.", f"{error.strerror}.", "Free space on the disk, or write elsewhere."
            ) from None

    def _is_question(self, word: str) -> bool:
        """True if a first word is no command, not even one with a slip."""
        is_near = word in MEANT or get_close_matches(word, self.commands, n=1)
        return len(word.split()) > 1 or not is_near


@contextmanager
def _made_visible() -> Iterator[None]:
    """Make control characters visible in typer's errors: they quote the command line, and typer itself prints them."""
    try:
        yield
    except typer.TyperException as error:
        error.message = visible(error.message)
        raise


def _refusal(error: typer.BadParameter, value: object, wanted: str) -> UsageError:
    """The value of an option or argument that typer had pydantic refuse, in kvchat's words."""
    named = error.param.opts[-1] if error.param and error.param.opts else "An argument"
    return UsageError(f'{named} "{value}" is refused.', f"It must be {wanted}.", "`-h` describes the options.")
