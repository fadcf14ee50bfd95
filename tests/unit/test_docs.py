"""The documentation agrees with itself and with the code: links, pages, options, keys, paths, patches."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest

from dpmon.cli import options
from dpmon.config import SETTINGS, THEMES
from dpmon.ui.keys import ACTIONS, COMMANDS, PLAYBACK_COMMANDS
from dpmon.ui.panel_layout import MIN_HEIGHT, MIN_WIDTH
from dpmon.ui.screen_data import NAMES as PANEL_NAMES
from dpmon.ui.screen_data import RANK_NAMES
from support.format_readers import DOCS, README, ROOT, anchors, apply_patch, code, links, pages, patches, prose, tables

SCREEN = DOCS / "screen.md"
MOST_LINES = 150
TESTS = "pytest -n 2 --dist loadfile"
NAMES = {
    "escape": "esc",
    "slash": "/",
    "colon": ":",
    "question_mark": "?",
    "full_stop": ".",
    "comma": ",",
    "greater_than_sign": ">",
    "less_than_sign": "<",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "plus": "+",
    "equals_sign": "=",
    "minus": "-",
    "underscore": "_",
}
"""Names of keys in the documentation, by Textual's names."""
WORDS = {
    **dict.fromkeys(("up", "down", "left", "right"), "arrow"),
    **dict.fromkeys(("pageup", "pagedown"), "page key"),
}
"""Words that stand for several keys."""
ALIASES = {"escape": "esc", "return": "enter", "pgup": "pageup", "pgdn": "pagedown", "page up": "pageup"}
ALIASES |= {"page down": "pagedown", "pgdown": "pagedown", "↑": "up", "↓": "down", "←": "left", "→": "right"}


# ------------------------------------------------------------------------------------------------ links


def relative(page: Path) -> list[str]:
    """Return the links of a page to files of the repository, or within the page."""
    return [link for link in links(page) if not re.match(r"[a-z][a-z0-9+.-]*:", link)]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_relative_links_resolve(page: Path) -> None:
    wrong = []
    for link in relative(page):
        path, _, heading = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or ROOT not in target.parents:
            wrong.append(f"{link}: there is no such file")
        elif heading and (target.suffix != ".md" or heading not in anchors(target)):
            wrong.append(f"{link}: there is no such heading")
    assert not wrong, wrong


# ------------------------------------------------------------------------------------------------ options


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Return the parser of each command ("" for a run)."""
    yield "", options.run_parser()
    for command in options.COMMANDS:
        if command != "run":
            yield command, options.command_parser(command)


OPTIONS = [
    (command, name)
    for command, parser in parsers()
    for action in parser._actions
    for name in action.option_strings
    if name.startswith("--") or len(action.option_strings) == 1
    if command == "" or name != "--help"
]


def named(page: Path, option: str) -> bool:
    """Return whether a page has the option as code."""
    return any(re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text) for text in code(page))


@pytest.mark.parametrize(("command", "option"), OPTIONS)
def test_every_option_is_described(command: str, option: str) -> None:
    """An option of a command is in a page that also has the command."""
    words = f"dpmon {command}".strip()
    commands = re.compile(rf"(?<![\w-]){re.escape(words)}(?![\w-])")
    assert any(named(page, option) and any(map(commands.search, code(page))) for page in pages())


@pytest.mark.parametrize("command", [command for command, _ in parsers() if command])
def test_every_command_is_described(command: str) -> None:
    assert any(re.search(rf"(?<![\w-])dpmon {command}(?![\w-])", text) for page in pages() for text in code(page))


# ------------------------------------------------------------------------------------------------ the screen


def binding_names() -> list[list[str]]:
    """Return the keys of each action, as the documentation writes them."""
    return [[NAMES.get(name, name) for name in ACTIONS if ACTIONS[name] == action] for action in set(ACTIONS.values())]


KEYS = {name for names in binding_names() for name in names}


def written(text: str) -> set[str]:
    """Return the keys in a span of code: `d`, `[ ]`, `1-6`, `ctrl+c`, `page up`."""
    if text in KEYS:
        return {text}
    plain = ALIASES.get(text.lower(), text.lower())
    if plain in KEYS:
        return {plain}
    numbers = re.fullmatch(r"(\d)\s*[-–]\s*(\d)", text)
    if numbers:
        return set(map(str, range(int(numbers[1]), int(numbers[2]) + 1)))
    parts = text.replace(",", " , ").split() if " " in text else [text]
    return {one for part in parts for one in written(part)} if len(parts) > 1 else {text}


def keys_in(cell: str) -> set[str]:
    """Return the keys that a cell or a page names as code; `1-6` stands for all keys from 1 to 6."""
    spans = re.findall(r"`([^`]+)`", re.sub(r"`(\d)`\s*(?:-|–|to)\s*`(\d)`", r"`\1-\2`", cell))
    return {key for span in spans for key in written(span)}


def test_the_keys_are_those_of_the_screen() -> None:
    assert len(KEYS) > 35
    shown = {key for command in (*COMMANDS, *PLAYBACK_COMMANDS) if command.action for key in written(command.key)}
    assert len(shown) > 20
    assert shown - {command.key for command in PLAYBACK_COMMANDS} <= KEYS


def test_every_key_is_named() -> None:
    text = prose(SCREEN)
    there = keys_in(text)
    missing = [
        names
        for names in binding_names()
        if not there & set(names) and not any(name in WORDS and WORDS[name] in text.lower() for name in names)
    ]
    assert not missing
    assert not {command.key for command in PLAYBACK_COMMANDS} - there


def test_every_key_in_a_table_exists() -> None:
    rows = [row for head, rows in tables(SCREEN) if "key" in head[0].lower() for row in rows]
    found = {key for row in rows for key in keys_in(row[0])}
    assert len(found) > 20
    assert not found - KEYS - {command.key for command in PLAYBACK_COMMANDS}


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_page_names_the_panels_and_the_smallest_screen() -> None:
    screen = text_of("docs/screen.md")
    assert all(panel in screen for panel in (*PANEL_NAMES.values(), *RANK_NAMES.values()))
    assert f"Below {MIN_WIDTH} columns or {MIN_HEIGHT} rows" in screen


def test_the_picture_has_a_number_for_each_entry_of_its_list() -> None:
    picture = text_of("docs/pictures/screen.svg")
    entries = re.findall(r"(?m)^(\d+)\. ", text_of("docs/screen.md"))
    assert entries == [str(number) for number in range(1, len(entries) + 1)]
    texts = {unescape(text).strip() for text in re.findall(r">([^<]*)</text>", picture)}
    assert set(entries) <= texts


# ------------------------------------------------------------------------------------------------ README, first steps


def test_the_readme_is_short() -> None:
    lines = text_of("README.md").splitlines()
    assert len(lines) <= MOST_LINES
    assert [line for line in lines if len(line) > 120] == []
    assert all(name in text_of("README.md") for name in PANEL_NAMES.values())


def test_the_readme_links_to_every_page() -> None:
    linked = {link.partition("#")[0] for link in relative(README)}
    assert {f"docs/{page.name}" for page in pages() if page != README} <= linked


def test_the_two_commands_of_the_readme_stay() -> None:
    lines = text_of("README.md").splitlines()
    assert "    pip install -e '.[torch]' -c constraints.txt && dpmon examples/linear.py" in lines
    assert f"    pip install -e '.[torch,test]' -c constraints.txt && {TESTS}" in lines
    assert TESTS in text_of(".ci/run"), "what is checked is what the README says"


def test_getting_started_has_every_option_and_setting() -> None:
    page = text_of("docs/getting-started.md")
    found = {option for action in options.run_parser()._actions for option in action.option_strings}
    assert [option for option in found - {"-h", "--help", "--version"} if option not in page] == []
    assert [name for name in (*SETTINGS, *THEMES) if f"`{name}" not in page] == []
    assert [name for name in SETTINGS if f"`DPMON_{name.upper()}`" not in page] == []


@pytest.mark.parametrize("picture", ["main-job", "ranks", "screen", "stall", "toggle"])
def test_pictures_are_small_and_ask_for_nothing(picture: str) -> None:
    text = text_of(f"docs/pictures/{picture}.svg")
    assert len(text.encode()) < 500_000
    assert not re.search(r"(href|src|url\()", text)
    assert not re.search(r"/(home|root|tmp|Users)/", text), "no path of the machine on which it was taken"


# ------------------------------------------------------------------------------------------------ paths and patches

PATHS = sorted(
    {
        (page.name, found)
        for page in pages()
        for text in code(page)
        for found in re.findall(r"(?<![\w/.~-])(?:dpmon|tests|examples|docs)/[\w./-]*[\w/](?![\w<*])", text)
    }
)


@pytest.mark.parametrize("page", sorted({page for page, _ in PATHS}))
def test_every_path_exists(page: str) -> None:
    assert not [path for name, path in PATHS if name == page and not (ROOT / path).exists()]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_every_patch_fits(page: Path) -> None:
    """If one does not fit, the code that it shows has changed."""
    for path, hunks in patches(page):
        text = (ROOT / path).read_text(encoding="utf-8")
        assert apply_patch(text, hunks) != text
