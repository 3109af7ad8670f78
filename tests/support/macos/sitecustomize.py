"""Imported by a Python that starts with this folder first on its path: hides what only Linux has.

``/proc``, ``/sys`` and Linux's own calls and constants are missing, and ``sys.platform`` is a Mac's. So code that needs
any of them fails as it would on a Mac. What libraries ask a real Mac for is imported or replaced before that.
"""

from __future__ import annotations

import asyncio  # noqa: F401  # on a Mac, importing these needs what Linux lacks
import builtins
import ctypes.util  # noqa: F401
import errno
import io
import mmap
import multiprocessing.util  # noqa: F401
import os
import platform
import signal
import subprocess  # noqa: F401
import sys
import sysconfig
import types
import uuid  # noqa: F401
from collections.abc import Callable
from typing import Any

import psutil

LINUX = {
    os: ("sched_getaffinity", "sched_setaffinity", "posix_fadvise", "posix_fallocate", "memfd_create", "pidfd_open"),
    signal: ("SIGRTMIN", "SIGRTMAX", "SIGPWR", "SIGPOLL", "sigtimedwait", "sigwaitinfo"),
    mmap: ("MADV_DONTFORK", "MADV_HUGEPAGE", "MADV_POPULATE_READ", "MAP_POPULATE", "MAP_NORESERVE"),
}


def is_hidden(path: Any) -> bool:
    return not isinstance(path, int) and os.fsdecode(path).startswith(("/proc", "/sys/"))


def without_system_files(call: Callable[..., Any]) -> Callable[..., Any]:
    def refusing(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        if is_hidden(path):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return call(path, *args, **kwargs)

    return refusing


for module, names in LINUX.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
for name in ("stat", "lstat", "listdir", "scandir", "open", "access", "readlink"):
    setattr(os, name, without_system_files(getattr(os, name)))
builtins.open = io.open = without_system_files(open)
psutil.virtual_memory = lambda: types.SimpleNamespace(available=2**34)
psutil.Process = lambda: types.SimpleNamespace(memory_info=lambda: types.SimpleNamespace(rss=2**29))
sys.modules["_scproxy"] = types.ModuleType("_scproxy")
sys.modules["_scproxy"]._get_proxy_settings = sys.modules["_scproxy"]._get_proxies = dict  # type: ignore[attr-defined]
sys.modules["numba"] = None  # type: ignore[assignment]  # it would compile every loop again, without OpenMP
sysconfig.get_config_vars()
platform.uname()
sys.platform = "darwin"
