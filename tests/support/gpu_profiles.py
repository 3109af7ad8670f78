"""A user's own GPU profiles, and the settings that result from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from support.fake_nvml import FakeGpu, GiB

from kvchat import paths
from kvchat.config import profiles, sources
from kvchat.config.sources import SettingsSource

Install = Callable[..., None]


def gpu(name: str, gib: float) -> FakeGpu:
    return FakeGpu(name, gib * GiB)


RTX = gpu("NVIDIA GeForce RTX 4060", 7.996)


def own(name: str, text: str) -> Path:
    file = paths.user_profiles_dir() / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def resolved() -> sources.Resolved:
    return sources.load(environ={}, profiles=active)


def active(device: str) -> tuple[SettingsSource, ...]:
    return profiles.find(device).sources


def shown(key: str) -> str:
    return next(line for line in resolved().lines() if line.startswith(f"{key} "))
