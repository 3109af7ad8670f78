"""The chat with a server's model: the server decides, its figures are shown, the conversation is saved locally."""

from dataclasses import replace

import pytest
from support.app_driver import answers, ask, choices, drawn, is_finished, is_open, press, receipts, submit, toasts
from support.fake_server import BREAK, HELLO, WAIT, FakeServer, delta

from kvchat.errors import UsageError
from kvchat.protocol import wire
from kvchat.protocol.figures import ServerFigures, Snapshot, Stats
from kvchat.protocol.messages import Finished, Load, Switch
from kvchat.remote import servers
from kvchat.tui.actions import parse_command
from kvchat.tui.screens import choosing
from kvchat.tui.screens.choosing import ModelsScreen
from kvchat.tui.state import Phase
from kvchat.tui.widgets.panels import KvColumn, Timeline
from kvchat.tui.widgets.ribbon import Ribbon

SERVED = {"server": "vLLM", "offers": "Started with --kv-cache-dtype fp8 it keeps K/V in 8 bits.", "mode": "server"}
METRICS = '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0"} 3.0\n'


@pytest.fixture
def server():
    with FakeServer() as started:
        started.routes["/metrics"] = METRICS
        yield started


@pytest.fixture
def served(config, server):
    """Settings of a chat with the server's model, in its own engine."""
    return replace(config, engine_command=None, load=Load(model=server.url))


# ---- What the server decides


@pytest.mark.parametrize(
    "line", ["/mode streaming", "/next", "/budget 128", "/needle", "/compare", "/rebuild", "/pin", "/pin system"]
)
async def test_mode_commands_explain_that_the_server_decides(chat, line):
    await chat.load(**SERVED)
    await chat.ask("Hi.")
    await chat.controller.handle(Finished("eos", "Hello.", stats=_stats()))
    chat.controller.state.conversation.system = "Be kind."
    action, argument = parse_command(line)
    sent = len(chat.client.sent)
    with pytest.raises(UsageError) as refused:
        await action.run(chat.controller, argument)
    assert "vLLM decides" in refused.value.title
    assert "--kv-cache-dtype" in refused.value.detail
    assert "/model" in refused.value.hint
    assert len(chat.client.sent) == sent
    assert chat.phase is Phase.READY


async def test_the_mode_list_explains_that_the_server_decides(chat):
    await chat.load(**SERVED)
    action, argument = parse_command("/mode")
    await action.run(chat.controller, argument)
    assert "vLLM decides" in chat.view.notes[-1]
    assert "streaming" not in chat.view.notes[-1]


async def test_a_conversation_keeps_its_local_mode(chat):
    conversation = chat.controller.state.conversation
    conversation.mode, conversation.params = "streaming", {"budget": 256}
    await chat.load(**SERVED)
    await chat.ask("Hi.")
    assert not [command for command in chat.client.sent if isinstance(command, Switch)]
    assert (conversation.mode, conversation.params) == ("streaming", {"budget": 256})
    await chat.controller.handle(Finished("eos", "Hello.", stats=_stats()))
    await chat.load()  # a local model again
    assert Switch("streaming", {"budget": 256}) in chat.client.sent


async def test_the_next_local_model_uses_the_configured_mode(chat):
    await chat.load(**SERVED)
    await chat.controller.models.choose("bundled", {})
    load = next(command for command in reversed(chat.client.sent) if isinstance(command, Load))
    assert load.mode == "full"


async def test_presets_of_a_server_skip_only_the_mode(chat, tmp_path, monkeypatch):
    monkeypatch.setenv("KVCHAT_CONFIG", str(tmp_path / "config.toml"))
    await chat.load(**SERVED)
    saved = chat.controller.save_preset("served")
    assert "[kv" not in saved.read_text()
    preset = tmp_path / "other.toml"
    preset.write_text('[kv]\nmode = "streaming"\n[sampling]\ntemperature = 0.25\n')
    with pytest.raises(UsageError, match="vLLM decides"):
        chat.controller.use_preset(preset)
    assert chat.controller.state.sampling.temperature == 0.25


@pytest.mark.parametrize("line", ["/template enable_thinking=false", "/template a=1 b=2"])
async def test_unsupported_template_variables_are_not_sent(chat, line):
    await chat.load(**SERVED, takes_variables=False)
    sent = len(chat.client.sent)
    action, argument = parse_command(line)
    with pytest.raises(UsageError, match="accepts no chat template variables"):
        await action.run(chat.controller, argument)
    assert len(chat.client.sent) == sent
    assert chat.controller.models.in_use.template_args == ()


async def test_an_unknown_context_allows_large_files(chat):
    await chat.load(**SERVED, context=0)
    assert chat.controller.state.file_limit > 2**20


def _stats():
    return Stats(prompt_tokens=11, reused_tokens=8, generated_tokens=2, total_tokens=13)


async def test_receipts_show_reused_tokens(chat):
    await chat.load(**SERVED)
    receipt = chat.controller.state.receipt(Finished("eos", "Hello.", _stats()))
    assert receipt == "2 tok · server · not read again 8 of 11"
    await chat.load()
    assert "not read again" not in chat.controller.state.receipt(Finished("eos", "Hello.", _stats()))


# ---- The application with a server


async def test_a_server_answers_without_offering_modes(running, served, server):
    async with running(served) as (app, _, until):
        assert "SERVER" in drawn(app)
        assert "vLLM at 127.0.0.1" in drawn(app)
        assert "Hide a fact" not in drawn(app)
        submit(app, "4")  # starts a needle search with a local model
        await until(lambda: is_finished(app))
        assert app.controller.state.conversation.turns[0].content == "4"
        assert answers(app)[0].text == "Hello."
        assert "server" in receipts(app)[0]
        press(app, "f6")
        await until(lambda: "vLLM decides" in toasts(app))
        assert app.controller.state.mode == "server"
        press(app, "f5")
        await until(lambda: len(server.asked) == 2 and is_finished(app, 2))
        assert server.asked[0]["messages"] == server.asked[1]["messages"]
        assert len(app.controller.state.conversation.messages) == 3  # a question and two sibling answers


async def test_a_stop_keeps_the_text_and_the_chat_continues(running, served, server):
    server.frames = [delta(content="Once upon"), WAIT]
    async with running(served) as (app, _, until):
        submit(app, "A story.")
        await until(lambda: answers(app) and "Once upon" in answers(app)[-1].text)
        press(app, "escape")
        await until(lambda: is_finished(app))
        assert receipts(app)[0].endswith("stopped")
        assert server.left.wait(5)
        server.frames = HELLO
        await ask(app, "Hi.")
        assert [one["content"] for one in server.asked[-1]["messages"]] == ["A story.", "Once upon", "Hi."]


async def test_a_lost_connection_keeps_the_text(running, served, server):
    server.frames = [delta(content="Once upon"), BREAK]
    async with running(served) as (app, _, until):
        submit(app, "A story.")
        await until(lambda: "did not say" in drawn(app))
        assert "Once upon" in drawn(app)
        assert "cut off" in drawn(app)
        server.frames = HELLO
        submit(app, "/continue")
        await until(lambda: answers(app)[-1].finished and "Hello." in answers(app)[-1].text)
        assert answers(app)[-1].text == "Once uponHello."


async def test_metrics_are_requested_only_while_shown(running, served, server):
    async with running(served, size=(120, 40)) as (app, _, until):
        assert not app.chat.query_one(Ribbon).display
        assert not app.chat.query_one(Timeline).display
        press(app, "f7")  # all of them
        await until(lambda: "for all its users" in drawn(app) and "3 now" in drawn(app))
        press(app, "f7")  # none
        await until(lambda: not app.chat.query_one(KvColumn).display and not app.controller.details._watching)
        seen = server.seen.count("/metrics")
        await ask(app, "Hi.")
        assert server.seen.count("/metrics") <= seen + 1  # one request may have been in flight


async def test_the_api_key_is_written_nowhere(running, served, server, tmp_path, monkeypatch):
    monkeypatch.setenv("KVCHAT_API_KEY", "geheim")
    server.key = "geheim"
    async with running(served, size=(80, 24)) as (app, _, until):
        await ask(app, "Hi.")
        submit(app, f"/export {tmp_path / 'chat.json'}")
        await until((tmp_path / "chat.json").exists)
    assert "/metrics" not in server.seen
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(written) >= 2
    assert not [file for file in written if b"geheim" in file.read_bytes()]


async def test_the_picker_lists_server_models(running, config, server, monkeypatch):
    monkeypatch.setattr(choosing.catalog, "find", lambda folders: [])
    listed = replace(config, servers=(server.url, "http://127.0.0.1:1"))
    async with running(listed) as (app, _, until):
        press(app, "ctrl+o")
        await until(lambda: is_open(app, ModelsScreen) and len(choices(app)) == 2)
        rows = choices(app)
        assert "Qwen/Qwen3-4B" in rows[0]
        assert "vLLM" in rows[0]
        assert "✖" in rows[1]
        assert "127.0.0.1:1" in rows[1]
        press(app, "enter")
        wanted = f"{server.url}#Qwen/Qwen3-4B"
        await until(lambda: app.controller.models.in_use.model == wanted)


async def test_servers_on_usual_ports_are_listed_on_request(running, config, server, monkeypatch):
    monkeypatch.setattr(choosing.catalog, "find", lambda folders: [])
    monkeypatch.setattr(servers, "USUAL", (server.url, "http://127.0.0.1:1"))
    async with running(config) as (app, _, until):
        submit(app, "/servers")
        await until(lambda: is_open(app, ModelsScreen) and len(choices(app)) == 1)
        assert "Qwen/Qwen3-4B" in choices(app)[0]


async def test_an_unreachable_server_is_reported(running, config):
    lost = replace(config, engine_command=None, load=Load(model="http://127.0.0.1:1"))
    async with running(lost, ready=False) as (app, _, until):
        await until(lambda: "No server answers" in drawn(app))
        assert app.controller.state.phase is Phase.DOWN


def test_a_server_snapshot_survives_encoding():
    snapshot = Snapshot("server", {}, 0, 0, 0, 0, 0, server=ServerFigures("vLLM", "h:1", used_share=0.5))
    message = wire.encode(snapshot)
    assert wire.decode_event(message[4:]) == snapshot
