"""Fixtures: folders of tiny models, a machine without a network, a small GPU."""

import socket
from contextlib import nullcontext

import pytest
import torch
from support import tiny_models, tiny_multimodal

from kvchat import libraries
from kvchat.models import description
from kvchat.models.load import load_model
from kvchat.models.support import import_transformers
from kvchat.protocol.messages import Load

import_transformers()  # before tests import parts of it together with torch's compiler, sympy and torchao


@pytest.fixture(scope="session")
def model():
    return load_model(Load("bundled", "cpu", "float32"), lambda stage: None)


@pytest.fixture
def folder(tmp_path):
    """A complete model folder: a tiny Llama in two shards, with the bundled tokenizer."""
    tiny_multimodal.save(tiny_models.model("llama"), tmp_path / "model", max_shard_size="300KB")
    return tmp_path / "model"


@pytest.fixture
def llama_folder(tmp_path):
    """A tiny Llama in one file, with the bundled tokenizer."""
    tiny_multimodal.save(tiny_models.model("llama"), tmp_path)
    return tmp_path


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr(libraries, "absent", lambda name: [name])


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a network connection")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def small_gpu(monkeypatch):
    """A fake GPU with 2 MB free."""
    monkeypatch.setattr(description, "resolve_device", lambda device: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2_000_000, 24_000_000_000))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU X")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
