"""For a run that hangs before its first step, every display shows the current operation and since when."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator

import pytest

from dpmon.cli.commands import ls
from dpmon.cli.status_stream import ProgressReporter
from dpmon.run.run_reader import RunReader
from support.format_readers import report_text
from support.run_harness import Dpmon, wait_for

pytestmark = pytest.mark.slow

HANGS = """\
import os, time
def hang():
    open(f"hangs-{os.getpid()}", "w").close()
    while not os.path.exists("go on"):
        time.sleep(0.01)
"""

FIRST_BATCH = f"""\
import torch
{HANGS}
class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        hang()
        return torch.ones(3)
model = torch.nn.Linear(3, 1)
for x in torch.utils.data.DataLoader(Images(), batch_size=2, num_workers=WORKERS):
    model(x).sum().backward()
"""

GROUP = """\
import torch
torch.distributed.init_process_group("gloo", init_method="file://" + __file__ + ".meet", rank=0, world_size=2)
"""


@pytest.fixture
def in_reach(dpmon: Dpmon, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let commands in this process find the run, and let the script go on at the end."""
    monkeypatch.setenv("XDG_STATE_HOME", str(dpmon.state))
    yield
    (dpmon.cwd / "go on").touch()


def until_stage(dpmon: Dpmon, text: str) -> RunReader:
    dpmon.info()
    reader = RunReader(dpmon.last())
    wait_for(lambda: (reader.startup_stage() or ("",))[0] == text, what=text)
    return reader


def plain(text: str) -> str:
    """The text without line breaks and durations."""
    return re.sub(r"\d+ s\b", "N s", " ".join(text.split()))


@pytest.mark.usefixtures("in_reach")
@pytest.mark.parametrize(
    ("text", "under_way"),
    [
        (FIRST_BATCH.replace("WORKERS", "0"), "waiting for data: the first batch of Images"),
        (FIRST_BATCH.replace("WORKERS", "2"), "waiting for data: the first batch of Images, 2 workers"),
        (GROUP, "joining the process group: gloo, rank 0 of 2"),
    ],
)
def test_a_run_that_hangs_before_its_first_step(
    dpmon: Dpmon, capsys: pytest.CaptureFixture[str], text: str, under_way: str
) -> None:
    process = dpmon.start(*dpmon.warm(), "--headless", dpmon.script(text))
    reader = until_stage(dpmon, under_way)
    assert plain(ProgressReporter(reader).line()) == f"starting: {under_way}"
    capsys.readouterr()
    assert ls(Namespace(json=False, script=None)) == 0
    assert plain(capsys.readouterr().out).endswith(under_way)
    said = f"no model was called; the process is {under_way}, for N s"
    assert said in plain("\n".join(report_text(dpmon.last())))
    assert dpmon.run("stop", "last").status == 0
    assert process.wait(60) != 0
    said = f"no model was called; when the process ended, it was {under_way}, for N s"
    assert said in plain("\n".join(report_text(dpmon.last())))
