"""Which slot of llama-server is whose, where a server at work on another's prompt has none that is free."""

import asyncio

import httpx2
import pytest

from kvchat.remote.servers import parse
from kvchat.remote.slots import Slots


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("KVCHAT_DATA_DIR", str(tmp_path))


def test_what_could_not_be_saved_is_not_saved_as_the_next_conversation():
    busy, saved = True, []

    def answer(request):
        if request.method == "GET":
            return httpx2.Response(200, json=[{"id": 0, "is_processing": busy, "n_prompt_tokens": 100}])
        saved.append(request.content)
        return httpx2.Response(200, json={"n_saved": 100})

    slots = Slots(parse("http://127.0.0.1:8080"), httpx2.AsyncClient(transport=httpx2.MockTransport(answer)))

    async def go():
        nonlocal busy
        await slots.go_to("cat")
        slots.note(100)
        await slots.go_to("dog")
        busy = False
        await slots.go_to("bird")
        assert saved == []
        slots.note(100)
        await slots.save()
        assert [b"kvchat-bird" in body for body in saved] == [True]

    asyncio.run(go())
