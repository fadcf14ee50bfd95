"""Reads README.md and the pages of docs/, for tests that compare them with the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README, DOCS = ROOT / "README.md", ROOT / "docs"
_FENCE = re.compile(r"^ {0,3}(```+|~~~+)(.*)$")
_HEADING = re.compile(r"^ {0,3}(#{1,6})\s+(.*?)\s*#*$")
_INLINE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.S)
_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_REFERENCE = re.compile(r"^ {0,3}\[[^\]]+\]:\s+<?(\S+?)>?\s*$", re.M)


def pages() -> list[Path]:
    """Return README.md and every page of docs/."""
    return [README, *sorted(DOCS.rglob("*.md"))]


@lru_cache(maxsize=64)
def _parts(page: Path) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the prose of a page, and its blocks of code with their languages ("" for indented blocks)."""
    prose: list[str] = []
    blocks: list[tuple[str, str]] = []
    fence, language, held = "", "", [""]
    for line in page.read_text(encoding="utf-8").split("\n"):
        found = _FENCE.match(line)
        if fence:
            if found and found[1].startswith(fence) and not found[2].strip():
                blocks.append((language, "\n".join(held)))
                fence = ""
            else:
                held.append(line)
        elif found:
            fence, language, held = found[1], found[2].strip(), []
        elif line.startswith("    ") and not (prose and prose[-1].lstrip()[:2] in ("- ", "* ")) and _opens(prose):
            blocks.append(("", line[4:]))
        else:
            prose.append(line)
    assert not fence, f"{page}: a block of code has no end"
    return "\n".join(prose), tuple(blocks)


def _opens(prose: list[str]) -> bool:
    """Return whether an indented line is code: it is, after an empty line or other code."""
    return not prose or not prose[-1].strip()


def prose(page: Path) -> str:
    """Return a page without its blocks of code."""
    return _parts(page)[0]


def blocks(page: Path) -> tuple[tuple[str, str], ...]:
    """Return the blocks of code of a page: language and text."""
    return _parts(page)[1]


def code(page: Path) -> list[str]:
    """Return all code in a page: spans in lines, and lines of blocks."""
    spans = [" ".join(found[2].split()) for found in _INLINE.finditer(prose(page))]
    return [*spans, *(line for _, block in blocks(page) for line in block.split("\n"))]


def links(page: Path) -> list[str]:
    """Return the targets of all links and images of a page."""
    text = _INLINE.sub("", prose(page))
    return [*_LINK.findall(text), *_REFERENCE.findall(text)]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for line in prose(page).split("\n"):
        heading = _HEADING.match(line)
        if heading:
            words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading[2]).replace("`", "")
            plain = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
            count = sum(name == plain or re.fullmatch(rf"{re.escape(plain)}-\d+", name) is not None for name in found)
            found.add(plain if not count else f"{plain}-{count}")
    return found


def tables(page: Path) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Return the tables of a page: the cells of the head, and of each row."""
    lines = prose(page).split("\n")
    at = 0
    while at < len(lines):
        end = at
        while end < len(lines) and lines[end].startswith("|"):
            end += 1
        if end - at > 2:
            rows = [_cells(line) for line in lines[at:end]]
            yield rows[0], rows[2:]
        at = max(end, at + 1)


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


# ------------------------------------------------------------------------------------------------ patches


def patches(page: Path) -> list[tuple[str, str]]:
    """Return the patches of a page: path of the file, and hunks."""
    found = []
    for language, block in blocks(page):
        if language == "diff":
            before, after, hunks = block.split("\n", 2)
            assert (before[:6], after[:6]) == ("--- a/", "+++ b/"), block
            assert before[6:] == after[6:], block
            found.append((before[6:], hunks))
    return found


def patched(text: str, hunks: str) -> str:
    """Apply all hunks of a patch. AssertionError if the old lines of a hunk do not occur exactly once."""
    for hunk in re.split(r"(?m)^@@ .*\n", hunks)[1:]:
        lines = hunk.removesuffix("\n").split("\n")
        assert {line[:1] for line in lines} <= {" ", "+", "-", ""}, hunk
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[:1] != other) for other in "+-")
        assert text.count(old) == 1, f"not there exactly once:\n{old}"
        text = text.replace(old, new)
    return text
