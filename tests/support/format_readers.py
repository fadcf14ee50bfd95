"""Strict readers of the documentation, of Chrome's trace event format, and of reports."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import lru_cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from dpmon.report.plain_text import text_lines
from dpmon.report.report_data import ReportData, open_report_data
from dpmon.report.report_json import report_as_json
from dpmon.report.sections import build_document

ROOT = Path(__file__).resolve().parents[2]
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
def _split_page(page: Path) -> tuple[str, tuple[tuple[str, str], ...]]:
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
        elif line.startswith("    ") and not (prose and prose[-1].lstrip()[:2] in ("- ", "* ")) and _begins_code(prose):
            blocks.append(("", line[4:]))
        else:
            prose.append(line)
    assert not fence, f"{page}: a block of code has no end"
    return "\n".join(prose), tuple(blocks)


def _begins_code(prose: list[str]) -> bool:
    """Return whether an indented line is code: it is, after an empty line or other code."""
    return not prose or not prose[-1].strip()


def prose(page: Path) -> str:
    """Return a page without its blocks of code."""
    return _split_page(page)[0]


def blocks(page: Path) -> tuple[tuple[str, str], ...]:
    """Return the blocks of code of a page: language and text."""
    return _split_page(page)[1]


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


def apply_patch(text: str, hunks: str) -> str:
    """Apply all hunks of a patch. AssertionError if the old lines of a hunk do not occur exactly once."""
    for hunk in re.split(r"(?m)^@@ .*\n", hunks)[1:]:
        lines = hunk.removesuffix("\n").split("\n")
        assert {line[:1] for line in lines} <= {" ", "+", "-", ""}, hunk
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[:1] != other) for other in "+-")
        assert text.count(old) == 1, f"not there exactly once:\n{old}"
        text = text.replace(old, new)
    return text


# ------------------------------------------------------------------------------------------------ Chrome traces

_COMMON_MEMBERS = {"ph", "name", "pid", "tid", "args"}
_MEMBERS = {"X": {"ts", "dur"}, "C": {"ts"}, "i": {"ts", "s"}, "M": set()}
_METADATA_MEMBERS = {"process_name": "name", "process_sort_index": "sort_index", "thread_name": "name",
         "thread_sort_index": "sort_index"}  # fmt: skip


class ChromeTrace:
    """Contents of a trace: slices by track name, counters by process and name, instants."""

    def __init__(self) -> None:
        self.processes: dict[int, str] = {}
        self.threads: dict[tuple[int, int], str] = {}
        self.slices: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        self.counters: dict[tuple[str, str], list[tuple[float, dict[str, float]]]] = defaultdict(list)
        self.instants: list[dict[str, Any]] = []

    def tracks(self, process: str) -> list[str]:
        """Return the names of the tracks of one process with slices."""
        return sorted(track for name, track in self.slices if name == process)


def read_trace(text: str) -> ChromeTrace:
    """Return the trace in `text`. AssertionError if it violates the format, or a viewer could not place an event."""

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is not JSON")

    events = json.loads(text, parse_constant=refuse)
    assert isinstance(events, list)
    trace = ChromeTrace()
    owners: dict[int, int] = {}
    found: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        _check_event(event)
        pid, tid = event["pid"], event["tid"]
        if event["ph"] == "M":
            _add_metadata(trace, event)
            continue
        assert pid in trace.processes, f"process {pid} has no name yet"
        if event["ph"] == "C":
            assert event["args"], "a counter without a value"
            assert all(_is_number(value) for value in event["args"].values()), event
            trace.counters[trace.processes[pid], event["name"]].append((event["ts"], event["args"]))
            continue
        assert (pid, tid) in trace.threads, f"track {tid} has no name yet"
        assert owners.setdefault(tid, pid) == pid, "one thread id in two processes"
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
            trace.instants.append(event)
        else:
            found[pid, tid].append(event)
    for (pid, tid), slices in found.items():
        _check_nesting(slices)
        trace.slices[trace.processes[pid], trace.threads[pid, tid]] += slices
    return trace


def _check_event(event: Any) -> None:
    assert isinstance(event, dict)
    assert event["ph"] in _MEMBERS, event
    assert set(event) == _COMMON_MEMBERS | _MEMBERS[event["ph"]], event
    assert isinstance(event["name"], str)
    assert event["name"]
    assert type(event["pid"]) is int
    assert type(event["tid"]) is int
    assert 0 <= event["pid"] < 1 << 31
    assert 0 <= event["tid"] < 1 << 31
    assert isinstance(event["args"], dict)
    for member in ("ts", "dur"):
        assert member not in event or (_is_number(event[member]) and event[member] >= 0), event


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _add_metadata(trace: ChromeTrace, event: dict[str, Any]) -> None:
    member = _METADATA_MEMBERS[event["name"]]
    value = event["args"][member]
    if event["name"] == "process_name":
        assert event["pid"] not in trace.processes
        trace.processes[event["pid"]] = value
    elif event["name"] == "thread_name":
        assert event["pid"] in trace.processes
        trace.threads[event["pid"], event["tid"]] = value
    else:
        assert type(value) is int


def _ns(us: float) -> int:
    """Convert µs to ns as Perfetto does: cut off the fraction (CoerceToTs in its json_utils.cc)."""
    return int(us * 1000.0)


def _check_nesting(slices: list[dict[str, Any]]) -> None:
    """Check that slices of a track are nested or separate, and that of slices with one start the outer comes first.

    Perfetto drops a slice that ends after its outer one (slice_drop_overlapping_complete_event).
    """
    open_until: list[int] = []
    for event in sorted(slices, key=lambda event: _ns(event["ts"])):
        begin = _ns(event["ts"])
        end = begin + _ns(event["dur"])
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        assert not open_until or end <= open_until[-1], f"{event['name']} reaches out of the slice it began in"
        open_until.append(end)


# ------------------------------------------------------------------------------------------------ documented JSON

_JSON_PAGE = DOCS / "records.md"


def documented_json_paths(section: str) -> list[str]:
    """The paths at the start of a section's lines; a path that begins with a dot is beside the one before it."""
    (text,) = re.findall(rf"^### {re.escape(section)}$(.*?)(?=^### |\Z)", _JSON_PAGE.read_text(), re.M | re.S)
    found: list[Any] = []
    for line in re.findall(r"^- (`[^:\n]*(?:\n  [^:\n]*)*)", text, re.M):
        for path in re.findall(r"`([^`]+)`", line):
            found.append(found[-1].rpartition(".")[0] + path if path.startswith(".") else path)
    return found


def _path_pattern(path: str) -> re.Pattern[str]:
    """What a documented path matches; a star at the end of an object that is described elsewhere matches all below."""
    whole = re.escape(path).replace(r"\*", r"[^.\[\]]+")
    return re.compile(whole + (r"(\..*|\[\].*)?" if path.endswith(("].*", "communication.*", "host.*")) else ""))


def _paths_in(value: Any, at: str = "") -> Iterator[str]:
    """The path of each object, list and value inside `value`."""
    if at:
        yield at
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _paths_in(child, f"{at}.{key}" if at else key)
    elif isinstance(value, list):
        for child in value:
            yield from _paths_in(child, f"{at}[]")


def check_json_is_documented(section: str, *objects: dict[str, Any]) -> None:
    """Every value has a description, and every described field exists in the objects that have its neighbors."""
    patterns = {path: _path_pattern(path) for path in documented_json_paths(section)}
    there = sorted({path for each in objects for path in _paths_in(each)})
    below = {path for path in there if any(name.startswith((f"{path}.", f"{path}[]")) for name in (*there, *patterns))}
    undocumented = [
        path for path in there if path not in below and not any(p.fullmatch(path) for p in patterns.values())
    ]
    assert not undocumented, undocumented
    for path, each in patterns.items():
        beside = _path_pattern(f"{path.rpartition('.')[0]}.*".removeprefix("."))
        assert any(map(each.fullmatch, there)) or not any(map(beside.fullmatch, there)), path


# ------------------------------------------------------------------------------------------------ reports


def report_text(directory: Path, width: int = 80) -> list[str]:
    """Return the report of the run in `directory` as text, in lines of at most `width` cells."""
    with open_report_data(directory) as report:
        return text_lines(build_document(report), width)


def report_json_of(report: ReportData) -> Any:
    """Return the JSON of a report, whose members have no common type."""
    return report_as_json(report)


def lines_of_section(lines: list[str], title: str) -> list[str]:
    """Return the lines below a heading."""
    begin = next(number for number, line in enumerate(lines) if line.startswith(title))
    end = next((number for number in range(begin + 1, len(lines)) if not lines[number]), len(lines))
    return lines[begin + 1 : end]


class HtmlPage(HTMLParser):
    """The tags, links, ids and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def check_page_is_offline(found: HtmlPage) -> None:
    """Check that nothing on a page runs or is loaded, and that its links lead into it."""
    assert not found.tags.keys() & {"script", "img", "iframe", "object", "embed", "form", "base"}
    assert not any(name == "src" or name.startswith("on") for name, _ in found.attributes)
    assert not any(re.search(r"url\(|@import", text) for text in found.texts)
    links = [value for name, value in found.attributes if name.endswith("href") and not value.startswith("data:")]
    assert len(links) > 5
    assert set(links) <= {f"#{value}" for name, value in found.attributes if name == "id"}
