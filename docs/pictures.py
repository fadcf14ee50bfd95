"""Makes the pictures of the documentation, each from a real run on this machine, in about six minutes.

    python docs/pictures.py                 all of docs/pictures/*.svg
    python docs/pictures.py main-job        one of them

A run is started in the background and its screen is opened without a terminal (Textual's pilot). The keys are pressed,
and the rows on the screen become SVG. A film is several screens in one SVG, shown one after the
other by CSS; it needs no script, so it also plays as an image on a web page. Take the pictures on an idle machine,
because they show its figures.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.segment import Segment, Segments
from textual.pilot import Pilot

from dpmon.run.run_registry import find_run
from dpmon.ui.monitor import Monitor
from dpmon.ui.screen_data import ScreenData
from dpmon.ui.styled_rows import Row, row_width
from dpmon.ui.terminal_style import TerminalStyle

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
SIZE = (120, 40)
FILM_SIZE = (100, 30)
FRAME_S = 1.5
MAX_BYTES = 500_000
PATIENCE_S = 120.0

CELL_PX, ROW_PX = 12.2, 24.4
"""Size of a cell in Rich's SVG."""

_WHITE = "title"
_GRAY = "dim"


class Stage:
    """The screen of a run, and the frames taken of it so far."""

    def __init__(self, app: Monitor, pilot: Pilot[str]) -> None:
        self.app, self.pilot = app, pilot
        self.frames: list[list[Row]] = []

    async def until(self, holds: Callable[[ScreenData], bool]) -> None:
        """Wait until the facts of the screen are as wanted. The words on it may change, so they are not waited for."""
        until = asyncio.get_running_loop().time() + PATIENCE_S
        while not holds(self.app.data_to_draw()):
            if asyncio.get_running_loop().time() > until:
                raise SystemExit(f"it never came to {holds.__name__}:\n" + "\n".join(self.app.text()))
            await asyncio.sleep(0.1)

    def take(self, *caption: Row) -> None:
        """Add the screen as it is now to the frames, with the lines of `caption` under it."""
        self.frames.append([*self.app.painted_rows(), *caption])

    async def film(self, frames: int, every_s: float, key: str, what: str) -> None:
        """Take a frame every `every_s` seconds. Each names the key that was pressed before, and what it does."""
        for _ in range(frames):
            await asyncio.sleep(every_s)
            self.take([], [(f"  {key}", _WHITE), (f"  {what}", _GRAY)])


def add_labels(rows: Sequence[Row], labels: Sequence[str]) -> list[Row]:
    """Return the rows with a margin on both sides; the row of each label has its number on the label's side."""
    width = max(map(row_width, rows))
    lines = ["".join(text for text, _ in row) for row in rows]
    margins = {False: [""] * len(rows), True: [""] * len(rows)}
    for number, label in enumerate(labels, start=1):
        y = next((index for index, line in enumerate(lines) if label in line), None)
        if y is None:
            raise SystemExit(f"{label} is not on the screen:\n" + "\n".join(lines))
        is_right = lines[y].index(label) >= width // 2 - 1
        margins[is_right][y] = str(number)
    labeled = []
    for row, left, right in zip(rows, margins[False], margins[True], strict=True):
        padding = (" " * (width - row_width(row)), "")
        labeled.append([*_label(left), (" ", ""), *row, padding, (" ", ""), *_label(right)])
    return labeled


def _label(number: str) -> Row:
    return [(f"{number:>2} ", "found" if number else "")]


Act = Callable[[Stage], Awaitable[None]]


class Picture(NamedTuple):
    """A picture: the command to run, and the actions on its screen. If they take several frames, it is a film."""

    name: str
    title: str
    command: tuple[str, ...]
    act: Act
    size: tuple[int, int] = SIZE
    script: str = ""
    """A script that is no example, as train.py in the command's working directory."""
    labels: tuple[str, ...] = ()
    """Texts on the screen that get the numbers 1, 2 ... in the margin, as docs/screen.md lists them."""


def _trains(facts: ScreenData) -> bool:
    """Whether a step has ended."""
    return facts.process is not None and facts.process.seen_ns >= 0


def _in_single(facts: ScreenData) -> bool:
    """Whether steps ran on one device."""
    return facts.process is not None and any(column.mode == "single" for column in facts.process.columns)


def _compares(facts: ScreenData) -> bool:
    """Whether the speed-up is known."""
    compared = facts.process.compared if facts.process is not None else None
    return compared is not None and compared.speedup is not None


def _has_straggler(facts: ScreenData) -> bool:
    """Whether a rank is named that the others wait for."""
    return facts.state.straggler is not None


def _is_stalled(facts: ScreenData) -> bool:
    """Whether the run is stalled."""
    return facts.shown_stall is not None


async def _both_modes(stage: Stage) -> None:
    """dp, single, and dp again, long enough for a verdict."""
    await stage.until(_trains)
    await asyncio.sleep(20)
    await stage.pilot.press("d")
    await stage.until(_in_single)
    await asyncio.sleep(15)
    await stage.pilot.press("d")
    await stage.until(_compares)
    await asyncio.sleep(20)
    stage.take()


async def _toggle(stage: Stage) -> None:
    """The main job as a user sees it: it runs, `d` switches it to one device and back, panel 3 fills the screen."""
    await stage.until(_trains)
    await stage.film(3, 4.0, "$ dpmon examples/linear.py", "your command, with dpmon in front")
    await stage.pilot.press("d")
    await stage.film(4, 3.0, "d", "the running job switches to one device")
    await stage.pilot.press("d")
    await stage.until(_compares)
    await stage.film(3, 3.0, "d", "and back: now panel 4 compares both modes")
    await stage.pilot.press("4")
    await stage.film(2, 2.0, "4", "panel 4 on the whole screen: what two replicas are worth, and why")
    await stage.pilot.press("escape", "3", "3")
    await stage.film(2, 2.0, "3 3", "panel 3 on the whole screen: where each step spends its time")
    await stage.pilot.press("escape")
    await stage.film(2, 2.0, "q l", "closes the screen; the training goes on, and `dpmon attach` shows it again")


async def _slow_rank(stage: Stage) -> None:
    """Wait until the slow rank is named."""
    await stage.until(_has_straggler)
    await asyncio.sleep(20)
    await stage.until(_has_straggler)
    stage.take()


async def _stall(stage: Stage) -> None:
    """Wait until dpmon says that the run is stalled and where each rank stands."""
    await stage.until(_trains)
    await stage.until(_is_stalled)
    await asyncio.sleep(12)
    stage.take()


STUCK = '''"""Trains on two ranks. After a while, rank 1 waits for a lock on a file that nobody gives back."""

import fcntl
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

STUCK_AT = 2400


class Samples(Dataset):
    """Points and their sums; a real dataset reads a file here."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        time.sleep(0.0005)
        point = torch.ones(16) * index / len(self)
        return point, point.sum()


def read_cache():
    if dist.get_rank() == 1:
        with open("cache.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)


def train(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = 0
    while True:
        for points, sums in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(points).squeeze(1), sums)
            loss.backward()
            optimizer.step()
            step += 1
            if step % 200 == 0 and dist.get_rank() == 0:
                print(f"step {step:,}: loss {loss.item():.4f}", flush=True)
            if step == STUCK_AT:
                read_cache()


dist.init_process_group("gloo")
if dist.get_rank() == 0:
    holder = open("cache.lock", "w")
    fcntl.flock(holder, fcntl.LOCK_EX)
dist.barrier()
train(DistributedDataParallel(nn.Linear(16, 1)), DataLoader(Samples(), batch_size=16, shuffle=True))
'''


PICTURES = (
    Picture("toggle", "dpmon examples/linear.py", ("examples/linear.py",), _toggle, FILM_SIZE),
    Picture("main-job", "dpmon examples/linear.py", ("examples/linear.py",), _both_modes),
    Picture(
        "screen",
        "dpmon examples/linear.py",
        ("examples/linear.py",),
        _both_modes,
        labels=(
            *("linear.py", "steps/s · step", "1 Devices", "2 Replicas", "3 Batch", "now 0", "last step"),
            *("4 dp vs. single", "5 Output", "6 Progress", "q leave"),
        ),
    ),
    Picture(
        "ranks",
        "dpmon torchrun --nproc-per-node 2 examples/ddp.py --slow-rank 1",
        (
            *("torchrun", "--nproc-per-node", "2", "examples/ddp.py", "--steps", "0"),
            *("--slow-rank", "1"),
        ),
        _slow_rank,
    ),
    Picture(
        "stall",
        "dpmon torchrun --nproc-per-node 2 train.py",
        ("torchrun", "--nproc-per-node", "2", "train.py"),
        _stall,
        script=STUCK,
    ),
)


async def _take(picture: Picture, directory: Path) -> str:
    app = Monitor(directory, TerminalStyle("dark"), refresh=1.0)
    async with app.run_test(size=picture.size) as pilot:
        stage = Stage(app, pilot)
        await picture.act(stage)
    app.live_run.close()
    frames = [add_labels(frame, picture.labels) for frame in stage.frames] if picture.labels else stage.frames
    return film(frames, app.style, picture.title)


def film(frames: Sequence[Sequence[Row]], look: TerminalStyle, title: str) -> str:
    """One SVG that shows `frames` one after the other, each for FRAME_S seconds, for ever.

    A row that stays the same from one frame to the next is in it once. Without animation (the reader prefers reduced
    motion, or the viewer does not support CSS animation), the last frame is shown.
    """
    rules: dict[str, str] = {}
    body, spans = [], set()
    for y in range(max(len(frame) for frame in frames)):
        rows = [list(frame[y]) if y < len(frame) else [] for frame in frames]
        for _, same in groupby(range(len(rows)), key=lambda index: rows[index]):
            shown = list(same)
            row = f'<g transform="translate(0 {y * ROW_PX:.1f})">{_row_svg(rows[shown[0]], look, rules)}</g>'
            if len(shown) == len(frames):
                body.append(row)
            else:
                spans.add((shown[0], shown[-1] + 1))
                body.append(f'<g class="from{shown[0]}to{shown[-1] + 1}">{row}</g>')
    width = max(row_width(row) for frame in frames for row in frame) * CELL_PX
    height = max(map(len, frames)) * ROW_PX
    css = "".join(f".{name}{{{rule}}}" for rule, name in rules.items())
    css += "".join(_shown(first, end, len(frames)) for first, end in sorted(spans))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-16 -16 {width + 32:.0f} {height + 32:.0f}" role="img">\n'
        f"<title>{escape(title)}</title>\n"
        f"<style>text{{font:20px 'DejaVu Sans Mono',Menlo,Consolas,monospace}}{css}</style>\n"
        f'<rect x="-16" y="-16" width="100%" height="100%" rx="12" fill="{look.background}"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _row_svg(row: Row, look: TerminalStyle, rules: dict[str, str]) -> str:
    """The elements of a row, at the top of the image, by Rich. `rules` has the class of each CSS rule so far."""
    console = Console(
        width=max(row_width(row), 1), record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(Segments(Segment(text, look.rich_style(name)) for text, name in row), end="")
    svg = console.export_svg(title="", code_format="{styles}\n{backgrounds}{matrix}", unique_id="row")
    styles, _, elements = svg.rpartition("\n")
    for name, rule in re.findall(r"\.(row-r\d+) {(.*)}", styles):
        elements = elements.replace(f'class="{name}"', f'class="{rules.setdefault(rule, f"s{len(rules)}")}"')
    return re.sub(rf' clip-path="[^"]*"|<rect fill="{look.background}"[^>]*>', "", elements)


def _shown(first: int, end: int, frames: int) -> str:
    """The CSS that shows a group of elements from frame `first` until frame `end`."""
    name = f"from{first}to{end}"
    steps = [(0, "hidden")] * (first > 0) + [(first, "visible")] + [(end, "hidden")] * (end < frames)
    moments = "".join(f"{100 * frame / frames:.3f}%{{visibility:{state}}}" for frame, state in steps)
    still = "visible" if end == frames else "hidden"
    return (
        f".{name}{{visibility:{still}}}@keyframes {name}{{{moments}}}"
        f"@media not (prefers-reduced-motion:reduce){{.{name}"
        f"{{animation:{name} {frames * FRAME_S:g}s step-end infinite}}}}"
    )


def _dpmon(*words: str, where: Path = ROOT, check: bool = True) -> None:
    subprocess.run(
        [sys.executable, "-m", "dpmon", *words], cwd=where, stdin=subprocess.DEVNULL, check=check, timeout=PATIENCE_S
    )


def _checked(text: str, name: str) -> str:
    """The picture, if it is small and says nothing about the machine it was taken on."""
    words = re.sub(r"<[^>]*>", " ", text)
    for private in (socket.gethostname(), str(ROOT), str(Path.home()), tempfile.gettempdir()):
        if len(private) > 2 and private in words:
            raise SystemExit(f"{name}: {private} is in the picture")
    if len(text.encode()) > MAX_BYTES:
        raise SystemExit(f"{name}: {len(text):,} bytes are too many")
    return text


def make(picture: Picture) -> Path:
    """Run the command, take the picture, stop the run."""
    state = tempfile.mkdtemp(prefix="dpmon-pictures-")
    os.environ["XDG_STATE_HOME"] = state
    os.environ["OMP_NUM_THREADS"] = "1"  # else torchrun prints three lines about it
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    where = ROOT
    try:
        if picture.script:
            where = Path(state, "work")
            where.mkdir()
            (where / "train.py").write_text(picture.script, encoding="utf-8")
        _dpmon("--detach", *picture.command, where=where)
        try:
            text = asyncio.run(_take(picture, find_run()))
        finally:
            _dpmon("stop", "last", check=False)
        path = FOLDER / f"{picture.name}.svg"
        path.parent.mkdir(exist_ok=True)
        path.write_text(_checked(text, picture.name), encoding="utf-8")
        return path
    finally:
        shutil.rmtree(state, ignore_errors=True)


def main() -> None:
    """Make the named pictures, or all of them."""
    parser = argparse.ArgumentParser(description="Make the pictures of the documentation from real runs.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(picture.name for picture in PICTURES))
    names = parser.parse_args().names
    for picture in PICTURES:
        if not names or picture.name in names:
            print(make(picture).relative_to(ROOT), flush=True)


if __name__ == "__main__":
    main()
