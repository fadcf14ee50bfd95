"""Makes the pictures of the documentation, each from a real run on this machine, in about two minutes.

    python docs/pictures.py                 all of docs/pictures/*.svg
    python docs/pictures.py main-job        one of them

Each picture is what the key `s` saves: a run is started in the background, its screen is opened without a terminal
(Textual's pilot), the keys are pressed, and the rows on the screen become SVG. Take them on an idle machine: its
figures are in them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from textual.pilot import Pilot

from dpmon.run.lookup import find_run
from dpmon.ui.look import look
from dpmon.ui.monitor import Monitor
from dpmon.ui.picture import svg

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
SIZE = (120, 40)
MAX_BYTES = 300_000
PATIENCE_S = 120.0

Act = Callable[[Monitor, Pilot[str]], Awaitable[None]]


class Picture(NamedTuple):
    """A picture: the command behind it, and what is done on its screen before it is taken."""

    name: str
    title: str
    command: tuple[str, ...]
    act: Act


async def _shows(app: Monitor, *words: str) -> None:
    """Wait until all of `words` are on the screen."""
    until = asyncio.get_running_loop().time() + PATIENCE_S
    while not all(word in "\n".join(app.text()) for word in words):
        if asyncio.get_running_loop().time() > until:
            raise SystemExit(f"never on the screen: {words}\n" + "\n".join(app.text()))
        await asyncio.sleep(0.1)


async def _both_modes(app: Monitor, pilot: Pilot[str]) -> None:
    """dp, single, and dp again, long enough for a verdict."""
    await _shows(app, "● running", "step")
    await asyncio.sleep(20)
    await pilot.press("d")
    await _shows(app, "single")
    await asyncio.sleep(15)
    await pilot.press("d")
    await _shows(app, "as fast as one device", "virtual replicas show behaviour")
    await asyncio.sleep(20)


async def _slow_rank(app: Monitor, pilot: Pilot[str]) -> None:
    """Until the slow rank is named; then the collectives of one step are recorded."""
    await _shows(app, "● running", "holds the others up")
    await asyncio.sleep(20)
    await pilot.press("c")
    await asyncio.sleep(app.said_s + 2)  # until the answer to the key has gone
    await _shows(app, "holds the others up")


PICTURES = (
    Picture("main-job", "dpmon examples/linear.py", ("examples/linear.py",), _both_modes),
    Picture(
        "ranks",
        "dpmon torchrun --nproc-per-node 2 examples/ddp.py --slow-rank 1",
        (
            *("torchrun", "--nproc-per-node", "2", "examples/ddp.py", "--steps", "0"),
            *("--slow-rank", "1"),
        ),
        _slow_rank,
    ),
)


async def _take(picture: Picture, directory: Path) -> str:
    app = Monitor(directory, look("dark"), refresh=1.0)
    async with app.run_test(size=SIZE) as pilot:
        await picture.act(app, pilot)
        text = svg(app.painted_rows(), app.look, picture.title)
    app.feed.close()
    return text


def _dpmon(*words: str, check: bool = True) -> None:
    subprocess.run(
        [sys.executable, "-m", "dpmon", *words], cwd=ROOT, stdin=subprocess.DEVNULL, check=check, timeout=PATIENCE_S
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
    try:
        _dpmon("--detach", "--name", picture.name, *picture.command)
        try:
            text = asyncio.run(_take(picture, find_run(picture.name)))
        finally:
            _dpmon("stop", picture.name, check=False)
        path = FOLDER / f"{picture.name}.svg"
        path.parent.mkdir(exist_ok=True)
        path.write_text(_checked(text, picture.name), encoding="utf-8")
        return path
    finally:
        shutil.rmtree(state, ignore_errors=True)


def main() -> None:
    """Make the pictures that are named; all of them if none is."""
    parser = argparse.ArgumentParser(description="Make the pictures of the documentation from real runs.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(picture.name for picture in PICTURES))
    names = parser.parse_args().names
    for picture in PICTURES:
        if not names or picture.name in names:
            print(make(picture).relative_to(ROOT), flush=True)


if __name__ == "__main__":
    main()
