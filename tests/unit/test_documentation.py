"""The README is short, its commands stay, and the pages name what there is: links, keys, panels, options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpmon.cli.options import COMMANDS, _run_parser
from dpmon.config import _SETTINGS, THEMES
from dpmon.ui.keys import BINDINGS, DEEDS, PLAYED
from dpmon.ui.layout import MIN_HEIGHT, MIN_WIDTH, arrange, is_wide
from dpmon.ui.scene import NAMES, PANELS, RANK_NAMES

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").glob("*.md")))
TESTS = "pytest -n 2 --dist loadfile"
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_readme_stays_short() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 120] == []


def test_the_two_commands_of_the_readme_stay() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert "    pip install -e '.[torch]' -c constraints.txt && dpmon examples/linear.py" in lines
    assert f"    pip install -e '.[torch,test]' -c constraints.txt && {TESTS}" in lines
    assert TESTS in text_of(".ci/run"), "what is checked is what the README says"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(page: Path) -> Iterator[str]:
    """What the page links to, outside of code."""
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    yield from (link for link in _LINK.findall(prose) if "://" not in link)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.is_file() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {link.partition("#")[0] for link in links(README)}
    assert {f"docs/{page.name}" for page in PAGES if page != README} <= linked


def test_the_page_about_the_screen_has_every_key_and_panel() -> None:
    screen = text_of("docs/screen.md")
    named = set(re.findall(r"`([^`\n]+)`", screen))
    ours = {key for deed in (*DEEDS, *PLAYED) for key in (deed.key.split() if len(deed.key) > 1 else [deed.key])}
    assert ours - {"1-5", "end"} <= named
    assert {"end", "home", "tab", "shift+tab", "ctrl+c", "ctrl+q", "ctrl+z", "ctrl+p"} <= named
    keys = {name for binding in BINDINGS for name in binding.key.split(",")}  # type: ignore[union-attr]
    assert {key for key in keys if key.startswith(("ctrl+", "shift+"))} <= named
    for panel in (*NAMES.values(), *RANK_NAMES.values()):
        assert panel in screen
    assert all(name in text_of("README.md") for name in NAMES.values())


def test_the_page_about_the_screen_knows_when_panels_have_room() -> None:
    rows = re.findall(
        r"^\| (\d+)(?: to (\d+)| or more) \| (\d+)(?: to (\d+)| or more) \| (.*) \|$",
        text_of("docs/screen.md"),
        re.MULTILINE,
    )
    assert len(rows) == 7
    for low, high, least, most, says in rows:
        for width in (int(low), int(high or 300)):
            assert is_wide(width) == ("two columns" in says or "110" in low)
            for height in (int(least), int(most or 100)):
                slots = arrange(width, height)
                opened = {panel for panel in PANELS if panel in slots and not slots[panel].folded}
                assert len(opened) == (5 if "all five" in says else 4 if "all but" in says else 3 if "3" in says else 2)
    assert f"Below {MIN_WIDTH} columns or {MIN_HEIGHT} rows" in text_of("docs/screen.md")


def test_getting_started_has_every_option_and_setting() -> None:
    page = text_of("docs/getting-started.md")
    options = {option for action in _run_parser()._actions for option in action.option_strings}
    assert [option for option in options - {"-h", "--help", "--version"} if option not in page] == []
    assert [name for name in (*_SETTINGS, *THEMES) if f"`{name}" not in page] == []
    assert [name for name in _SETTINGS if f"`DPMON_{name.upper()}`" not in page] == []
    everything = page + README.read_text(encoding="utf-8")
    assert [command for command in COMMANDS if command != "run" and f"dpmon {command}" not in everything] == []


@pytest.mark.parametrize("picture", ["main-job", "ranks"])
def test_pictures_are_small_and_ask_for_nothing(picture: str) -> None:
    text = text_of(f"docs/pictures/{picture}.svg")
    assert len(text.encode()) < 300_000
    assert not re.search(r"(href|src|url\()", text)
    assert not re.search(r"/(home|root|tmp|Users)/", text), "no path of the machine on which it was taken"
