"""Whether the ceilings of findings hold: what ten made scripts gain when the cause of their finding is removed.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_ceilings.py [--only NAME ...] [--rounds 3] [--steps 120]

Each script runs with its cause and without it, in turn, under dpmon. A finding of the runs with the cause promises how
many seconds a run saves at most. What came is the change of the time from the first step to the last one, of the
process with most, with its 90% interval: each of its ends holds with 95%. A ceiling is beaten if even the lower end is
above it. The exit status is 1 if one is beaten, or if a script has not its finding.

DataParallel runs over virtual replicas, which share processors: no ceiling is promised for it, and the row says so.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

from dpmon.model.comparison_stats import Change, estimate_change
from dpmon.model.findings.all_findings import find_all
from dpmon.report.report_data import analyze_run
from dpmon.run.lifecycle import run_state
from dpmon.run.run_directory import load_info
from dpmon.run.run_registry import find_run
from dpmon.store.store_opening import open_store
from dpmon.text.formatting import format_duration

SCRIPT = """\
import contextlib
import os
import random
import time
import torch
from torch.utils.data import DataLoader, Dataset

case, cause, steps = os.environ["CASE"], os.environ["CAUSE"] == "1", int(os.environ["STEPS"])
rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.set_num_threads(1)
lengths = [0.005 + 0.03 * (number % 30) / 29 for number in range(steps)]  # with a mean of 0.02 on each rank
random.Random(rank).shuffle(lengths)


class Rows(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if cause and (case == "loader" or (case == "rank loader" and rank == 1)):
            time.sleep(0.01)
        return torch.ones(64)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        wide = 1500 if case == "accumulation" else 64
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, wide), torch.nn.Linear(wide, wide))
        if case == "replicate":  # parts that are copied, and not used
            self.spare = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(400))

    def forward(self, rows):
        wait = 0.01
        if cause and case == "forward" and rank == 1:
            wait = 0.03
        elif case == "turn":
            wait = lengths.pop() if cause else 0.02
        elif case in ("accumulation", "replicate"):
            wait = 0.0
        time.sleep(wait)
        return self.layers(rows).mean()


model = Model()
if ranks > 1:
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
elif case == "replicate":
    model = torch.nn.DataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.001)
BATCH, EVERY = 2, 3
epoch = {"checkpoint": 20, "workers": 10}.get(case, steps)
workers = {"num_workers": 2, "persistent_workers": not cause} if case == "workers" else {}
loader = DataLoader(Rows(epoch * BATCH), batch_size=BATCH, **workers)
done = 0
while done < steps:
    for rows in loader:
        done += 1
        last = case != "accumulation" or done % EVERY == 0
        if case == "accumulation" and not cause and not last:
            alone = model.no_sync()
        else:
            alone = contextlib.nullcontext()
        with alone:
            model(rows).mean().backward()
        if cause and case == "stall" and done % 40 == 30:
            time.sleep(0.7)
        if last:
            optimizer.step()
            optimizer.zero_grad()
        if cause and case == "evaluation" and done % 10 == 0:
            model.eval()
            with torch.no_grad():
                for rows in DataLoader(Rows(10), batch_size=BATCH):
                    model(rows)
            model.train()
    if cause and case == "checkpoint":
        torch.save(model.state_dict(), os.environ["KEPT"])
        time.sleep(0.4)
if ranks > 1:
    torch.distributed.destroy_process_group()
"""


class Case(NamedTuple):
    """A script with a cause."""

    name: str
    kinds: tuple[str, ...]
    """The findings that may name the cause, the first one that is there counts."""
    ranks: int = 1
    promised: bool = True
    """Whether a ceiling is promised."""


CASES = (
    Case("loader", ("data",)),
    Case("rank loader", ("straggler",), 2),
    Case("forward", ("straggler",), 2),
    Case("turn", ("in turn",), 2),
    Case("accumulation", ("accumulation",), 2),
    Case("evaluation", ("evaluation",)),
    Case("checkpoint", ("between",)),
    Case("workers", ("between", "data")),
    Case("stall", ("long steps",)),
    Case("replicate", ("replicate",), promised=False),
)


class Seen(NamedTuple):
    """What one run shows."""

    whole_s: float
    """The time from the first step to the last one, of the process with most."""
    saves_s: dict[str, float | None]
    """By kind, what its finding promises."""


def run(case: Case, cause: bool, number: int, steps: int, place: Path) -> Seen:
    """Run a script under dpmon, and read its record."""
    name = f"{case.name.replace(' ', '-')}-{int(cause)}-{number}"
    script = place / "train.py"
    script.write_text(SCRIPT)
    own = ["--headless", "--no-loss", "--name", name]
    if case.name == "replicate":
        own += ["--replicas", "2", "--mode", "dp" if cause else "single"]
    words = [str(script)]
    if case.ranks > 1:
        launcher = str(Path(sys.executable).with_name("torchrun"))
        words = [launcher, "--standalone", "--nproc-per-node", str(case.ranks), *words]
    environment = {
        **os.environ, "CASE": case.name, "CAUSE": str(int(cause)), "STEPS": str(steps), "KEPT": str(place / "kept.pt"),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "dpmon", *own, "--", *words], env=environment, capture_output=True, text=True,
        check=False, timeout=600,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    directory = find_run(name)
    with open_store(directory) as store:
        facts = analyze_run(store, directory, run_state(directory, load_info(directory))[1])
        found = {one.kind: one.saves_s for one in reversed(find_all(facts))}
        spent = [
            sum(one.get(name, 0) for name in ("training", "between", "evaluation", "stalled"))
            for one in facts.spent_by_process.values()
        ]
    return Seen(max(spent) / 1e9, found)


def judge(case: Case, before: list[Seen], after: list[Seen]) -> tuple[bool, str]:
    """Return whether the ceiling holds, and the row of the table."""
    kind = next((kind for kind in case.kinds if all(kind in one.saves_s for one in before)), None)
    if kind is None:
        return False, f"{case.name:<13} no finding {' or '.join(case.kinds)} in all runs"
    whole_s = median(one.whole_s for one in before)
    told = estimate_change([one.whole_s for one in before], [one.whole_s for one in after])
    came = f"{seconds(whole_s, told.ratio)}, {bounds(whole_s, told)}"
    promises = [saves_s for one in before if (saves_s := one.saves_s[kind]) is not None]
    if not promises:
        verdict = "none is promised" if not case.promised else "NONE IS PROMISED"
        return not case.promised, f"{case.name:<13} {kind:<13} {verdict:<20} {came}"
    saves_s = median(promises)
    least_s = whole_s * (1 - (told.ratio if told.most is None else told.most))
    promised = f"{format_duration(saves_s * 1e9)} of {format_duration(whole_s * 1e9)}"
    verdict = "BEATEN" if least_s > saves_s else "holds"
    return least_s <= saves_s, f"{case.name:<13} {kind:<13} {promised:<20} {came:<40} {verdict}"


def seconds(whole_s: float, ratio: float) -> str:
    """The seconds that a ratio of times, changed to unchanged, saves of `whole_s`."""
    return f"{whole_s * (1 - ratio):.2f} s"


def bounds(whole_s: float, told: Change) -> str:
    """The interval of what came."""
    if told.least is None or told.most is None:
        return "no interval: too few rounds"
    return f"{seconds(whole_s, told.most)} to {seconds(whole_s, told.least)}"


def main() -> int:
    """Run all scripts, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", action="append", choices=[case.name for case in CASES], help="only this script; may be repeated")
    add("--rounds", type=int, default=3, help="runs with and without the cause (default: 3)")
    add("--steps", type=int, default=120, help="steps of a run (default: 120)")
    options = parser.parse_args()
    start, good = time.monotonic(), True
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["XDG_STATE_HOME"] = temporary
        print(f"{'script':<13} {'finding':<13} {'promised':<20} {'came, with its 90% interval':<40} ceiling")
        for case in CASES:
            if options.only and case.name not in options.only:
                continue
            sides: tuple[list[Seen], list[Seen]] = ([], [])
            for number in range(options.rounds):
                for side in (0, 1) if number % 2 == 0 else (1, 0):
                    sides[side].append(run(case, not side, number, options.steps, Path(temporary)))
            holds, row = judge(case, *sides)
            good = good and holds
            print(row, flush=True)
        print(f"{time.monotonic() - start:.0f} s; load {os.getloadavg()[0]:.1f} now")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
