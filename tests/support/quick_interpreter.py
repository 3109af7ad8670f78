"""Triton's interpreter, quicker: what it looks up anew at every call of a kernel's helper is looked up once.

It makes the functions of ``triton.language`` interpreted ones before a kernel runs, and again at every call of a helper
inside it, when they are already: most of the time of a small kernel. It finds them by inspecting all members.
"""

from __future__ import annotations

import functools
import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_PATCHED = (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base)
_BUILTIN = {id(owner): [name for name, it in inspect.getmembers(owner) if tl.core.is_builtin(it)] for owner in _PATCHED}
_patch_lang = interpreter._patch_lang
_get_np_dtype = interpreter._get_np_dtype


def install() -> None:
    """Make this process's interpreter quicker; the results are the same."""
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = _patch_lang_once
    interpreter._get_np_dtype = _np_dtype_once


def _patch_builtin(owner: Any, *scope: Any) -> None:
    for name in _BUILTIN[id(owner)]:
        member = getattr(owner, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(owner, name, member, *scope)


def _patch_lang_once(fn: Any) -> Any:
    seen = [it for it in fn.__globals__.values() if isinstance(it, ModuleType) and it in (tl, tl.core)]
    if seen and not any(tl.core.is_builtin(language.load) for language in seen):
        return SimpleNamespace(restore=lambda: None)  # inside a kernel: whoever began it restores them
    return _patch_lang(fn)


def _np_dtype_once(dtype: Any) -> np.dtype:
    return np.dtype(np.uint64) if dtype.scalar.is_ptr() else _np_dtype_of_scalars(dtype.scalar)


@functools.cache
def _np_dtype_of_scalars(dtype: Any) -> np.dtype:
    return _get_np_dtype(dtype)
