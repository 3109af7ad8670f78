"""Triton's interpreter, faster: what it looks up at every call of a kernel's helper is looked up once.

Triton's own replaces the functions of ``triton.language`` before a kernel runs, and needlessly again at every call of a
helper inside it, which takes most of a small kernel's time: it finds them by inspecting all members. For every result
it recomputes the shape, in a tuple class of its own that describes its members' types. It computes each sum of integers
a second time in 64 bits, to detect an overflow.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_PATCHED = (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base)
_BUILTIN = {id(owner): [name for name, it in inspect.getmembers(owner) if tl.core.is_builtin(it)] for owner in _PATCHED}
_patch_lang = interpreter._patch_lang
_get_np_dtype = interpreter._get_np_dtype
_make_block_type = tl.block_type.__init__
_are_equal = tl.tuple.__eq__
_convert_float = interpreter._convert_float
_check_types, _broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
_UNCHANGED = {"fp32", "int32", "int64"}  # the result of an operation on two of these has their type
_known: dict[Any, dict[str, Any]] = {}  # the attributes of a block type, by element type and shape


def install() -> None:
    """Make this process's interpreter faster; the results are the same."""
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = _patch_lang_once
    interpreter._get_np_dtype = _np_dtype_once
    interpreter._convert_float = _convert_bfloat16_by_shift
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    TritonSemantic.binary_op_type_checking_impl = _check_unlike_types
    TritonSemantic.broadcast_impl_value = _broadcast_unlike_shapes
    tl.block_type.__init__ = _block_type_once
    tl.tensor.__init__ = _tensor_of_known_shape
    tl.tuple.__eq__ = _are_equal_once


def _patch_builtin(owner: Any, *scope: Any) -> None:
    for name in _BUILTIN[id(owner)]:
        member = getattr(owner, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(owner, name, member, *scope)


def _patch_lang_once(fn: Any) -> Any:
    seen = _languages(fn)
    if seen and not any(tl.core.is_builtin(language.load) for language in seen):
        return _NOTHING  # inside a kernel: its start restores them
    return _patch_lang(fn)


_NOTHING = SimpleNamespace(restore=lambda: None)


@functools.cache
def _languages(fn: Any) -> list[ModuleType]:
    return [it for it in fn.__globals__.values() if isinstance(it, ModuleType) and it in (tl, tl.core)]


def _check_unlike_types(self: Any, lhs: Any, rhs: Any, *rest: Any, **options: Any) -> Any:
    if type(lhs) is tl.tensor and lhs.dtype.name in _UNCHANGED:
        if type(rhs) is tl.tensor and lhs.dtype is rhs.dtype:
            return self.broadcast_impl_value(lhs, rhs)
        if type(rhs) is int or (type(rhs) is float and lhs.dtype.name == "fp32"):
            return lhs, _constant(lhs.type, lhs.dtype.name, tuple(getattr(lhs.type, "sizes", ())), str(rhs))
    return _check_types(self, lhs, rhs, *rest, **options)


_constants: dict[Any, Any] = {}


def _constant(type: Any, *key: Any) -> Any:
    """A tensor of ``type`` filled with the number that is written as the last item of ``key``."""
    if key not in _constants:
        name, sizes, number = key
        data = np.full(sizes or 1, float(number) if name == "fp32" else int(number), interpreter._get_np_dtype(type))
        _constants[key] = interpreter.TensorHandle(data, type.scalar)
    return tl.tensor(_constants[key], type)


def _broadcast_unlike_shapes(self: Any, lhs: Any, rhs: Any) -> Any:
    one, other = lhs.type, rhs.type
    if one.is_block() and other.is_block() and one.sizes == other.sizes:
        return lhs, rhs
    return _broadcast(self, lhs, rhs)


def _convert_bfloat16_by_shift(data: np.ndarray, from_type: Any, to_type: Any, rounding: Any) -> np.ndarray:
    """Bfloat16 is the upper half of float32; the lower half is cut off."""
    if rounding is None and (from_type.name, to_type.name) == ("bf16", "fp32"):
        return data.astype(np.uint32) << 16
    if rounding is None and (from_type.name, to_type.name) == ("fp32", "bf16"):
        return (data.view(np.uint32) >> 16).astype(np.uint16)
    return _convert_float(data, from_type, to_type, rounding)


def _np_dtype_once(dtype: Any) -> np.dtype:
    return np.dtype(np.uint64) if dtype.scalar.is_ptr() else _np_dtype_of_scalars(dtype.scalar)


@functools.cache
def _np_dtype_of_scalars(dtype: Any) -> np.dtype:
    return _get_np_dtype(dtype)


def _block_type_once(self: Any, element_ty: Any, shape: Any) -> None:
    key = element_ty.name, *map(_size, shape)
    if key not in _known:
        _make_block_type(self, element_ty, shape)
        _known[key] = vars(self) | {
            "of_tensors": tl.tuple([tl.constexpr(size) for size in self.shape]),
            "sizes": [*self.shape],
        }
    vars(self).update(_known[key])


def _size(given: Any) -> Any:
    return given.value if isinstance(given, tl.constexpr) else given


def _are_equal_once(self: Any, other: Any) -> Any:
    if self is other:
        return tl.constexpr(True)
    return tl.constexpr(self.values == [*map(_size, other)]) if type(other) is list else _are_equal(self, other)


def _tensor_of_known_shape(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape = type.of_tensors if type.is_block() else tl.tuple([])
    self.numel = tl.constexpr(type.numel if type.is_block() else 1)
