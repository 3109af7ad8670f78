"""Builds a mode from its parameters. A built-in mode is a file here and a class in ``kvchat.config.modes``."""

from __future__ import annotations

from importlib import import_module

from kvchat.config.modes import AUTO, ModeParameters
from kvchat.errors import UsageError
from kvchat.kv.geometry import Geometry
from kvchat.kv.modes.base import Mode, ModelTraits


def build(parameters: ModeParameters, geometry: Geometry, traits: ModelTraits, system_tokens: int = 0) -> Mode:
    """Build the mode of these parameters; this imports its implementation.

    Raises:
        UsageError: parameters contradict each other, or the implementation cannot be imported.
        DoesNotFitError: the model cannot run in this mode.
    """
    return implementation(parameters)(parameters, geometry, traits, system_tokens)


def implementation(parameters: ModeParameters) -> type[Mode]:
    """Import and return the class of the mode of these parameters.

    Raises:
        UsageError: it cannot be imported, or is not a mode.
    """
    if parameters.name == AUTO:
        raise UsageError("auto is not a mode itself.", "It chooses one of the other modes.", "Use one of those.")
    module, _, name = parameters.implemented_by.partition(":")
    try:
        mode = getattr(import_module(module), name)
    except Exception as error:  # another package's code may raise anything
        raise UsageError(
            f"The {parameters.name} mode cannot be imported.",
            f"{parameters.implemented_by}: {type(error).__name__}: {error}.",
            "Repair or remove the package that provides it.",
        ) from error
    if not (isinstance(mode, type) and issubclass(mode, Mode)):
        raise UsageError(
            f"The {parameters.name} mode cannot be used.",
            f"{parameters.implemented_by} is not a subclass of {Mode.__name__}.",
            "Repair or remove the package that provides it.",
        )
    return mode
