"""What is offered while a command is typed: names, then values with the current one marked."""

from __future__ import annotations

import pytest
from support.message import lacks

from kvchat.conversations.conversation import Conversation
from kvchat.protocol.messages import Sampling
from kvchat.tui.actions import COMMANDS
from kvchat.tui.prompt.arguments import Surroundings
from kvchat.tui.state import ChatState
from kvchat.tui.widgets import composer

STATE = ChatState(Conversation(), Sampling(temperature=0.5), "streaming", {"budget": 512, "sigma": 64})
NOW = Surroundings(STATE, ("kvchat-dark", "kvchat-light"), "kvchat-light")


def offered(before: str) -> list[str]:
    offer = composer.offer(before, NOW)
    return [suggestion.text for suggestion in offer.suggestions] if offer else []


def test_a_slash_lists_all_commands_with_their_use():
    offer = composer.offer("/", NOW)
    assert {one.label for one in offer.suggestions} == {action.line for action in COMMANDS.values()}
    assert all(one.doc for one in offer.suggestions)
    assert [one.text.strip() for one in offer.suggestions][:4] == ["/mode", "/budget", "/new", "/model"]
    assert offer.takes_by_enter


@pytest.mark.parametrize(
    ("typed", "takes"), [("/", True), ("/mo", True), ("/mode", False), ("/exi", False), ("/bud", False)]
)
def test_enter_takes_what_is_selected_where_no_one_command_is_named(typed, takes):
    assert composer.offer(typed, NOW).takes_by_enter == takes


@pytest.mark.parametrize(
    ("before", "texts"),
    [
        ("/exi", ["/quit"]),
        ("/uild", ["/rebuild"]),
        ("/BUD", ["/budget "]),
        ("/mode s", ["streaming", "sync", "speculative"]),
        ("/mo spec t", ["tau="]),
        ("/mode speculative tau=0.7 fir", ["first_full="]),
        ("/set temp", ["temperature "]),
        ("/set recovery ", ["true", "false"]),
        ("/set temperature ", ["0.5"]),
        ("/budget ", ["512"]),
        ("/theme ", ["kvchat-dark", "kvchat-light"]),
        ("/system ", ["none"]),
        ("/nothing ", []),
        ("/stats ", []),
        ("//mode ", []),
        ("what is /mode", []),
    ],
)
def test_what_may_follow(before, texts):
    assert offered(before) == texts


def test_present_values_are_marked_and_ranges_told():
    modes = composer.offer("/mode ", NOW)
    assert [one.label for one in modes.suggestions if one.is_current] == ["streaming"]
    assert modes.usage.startswith("/mode NAME")
    rows = {one.label: one.doc for one in composer.offer("/set ", NOW).suggestions}
    assert not lacks(rows["temperature 0.5"], "0 to 100", "unset")
    assert not lacks(rows["budget 512"], "whole number", "64")
    assert [one.is_current for one in composer.offer("/theme ", NOW).suggestions] == [False, True]


def test_paths_are_offered_to_commands_and_files_in_a_question(tmp_path):
    (tmp_path / "b c.json").touch()
    assert offered(f"/import {tmp_path}/") == [f"{tmp_path}/b c.json"]
    assert offered(f"read @{tmp_path}/") == [f'@"{tmp_path}/b c.json" ']
