"""Details are asked for only while somebody shows them, also of an engine that was started anew."""

from __future__ import annotations

from kvchat.protocol.details import Details, Watch


async def test_details_are_asked_for_while_somebody_shows_them(chat):
    watch, sent = chat.controller.details, chat.client.sent
    watch.end("column")
    await chat.load()
    assert Watch(False) not in sent
    assert Watch(True) not in sent
    watch.begin("column")
    watch.begin("screen")
    watch.end("screen")
    assert [command for command in sent if isinstance(command, Watch)] == [Watch(True), Watch(True)]
    await chat.load()  # perhaps in a new process
    assert sent[-1] == Watch(True)
    watch.end("column")
    assert sent[-1] == Watch(False)


async def test_what_is_stored_of_another_conversation_is_not_shown(chat):
    await chat.load()
    shown = Details(7, ((7,),), ((7,),))
    await chat.controller.handle(shown)
    assert chat.view.details == [Details(0)]
    chat.controller.state.is_stored = True
    await chat.controller.handle(shown)
    assert chat.controller.state.details == shown == chat.view.details[-1]
