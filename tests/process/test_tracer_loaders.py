"""The start of a DataLoader is recorded: its time, and the kind of loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dpmon.record.record_specs import COLUMNS
from support.tracer_harness import TracedRun, run_traced, run_untraced

FACTS = ("loader", "batches", "workers", "persistent", "start", "absent")


def loaders(run: TracedRun, process: int = 0) -> list[dict[str, Any]]:
    return [dict(event.data) for event in run.events("loader", process)]


def facts(run: TracedRun) -> list[tuple[Any, ...]]:
    return [tuple(event[name] for name in FACTS) for event in loaders(run)]


def printed(run: TracedRun) -> tuple[int, str, list[str]]:
    """Return status and output of a script, without the last line, which has times."""
    return run.status, run.err, run.out.splitlines()[:-1]


EPOCHS = """
import json, os, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
START_NS = int(os.environ.get("DPMON_START_NS", 0))
torch.manual_seed(3)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loader = DataLoader(
    TensorDataset(torch.randn(38, 4)), batch_size=10, num_workers=2, persistent_workers=sys.argv[1] == "persistent"
)
clocks = []
for epoch in range(2):
    began = time.monotonic_ns()
    batches = iter(loader)
    clocks.append([began - START_NS, time.monotonic_ns() - began])
    for x, in batches:
        loss = model(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())
    del batches
print(torch.rand(1).item())  # workers take their seeds from torch's random stream
print(json.dumps(clocks))
"""


@pytest.mark.parametrize("mode", [None, "script"])
@pytest.mark.parametrize("workers", ["new", "persistent"])
def test_the_start_of_workers_is_recorded_for_each_epoch(tmp_path: Path, workers: str, mode: str | None) -> None:
    run = run_traced(tmp_path, EPOCHS, workers, mode=mode)
    kept = workers == "persistent"
    assert facts(run) == [("TensorDataset", 4, 2, kept, start, {}) for start in (1, 2)]
    for event, (began, took) in zip(loaders(run), run.printed, strict=True):
        assert 0 < event["iter_s"] * 1e9 <= took
        assert began <= event["t_s"] * 1e9 <= began + took
    # On a busy machine, time may pass between the two clock readings at one of the starts.
    apart = [(took - event["iter_s"] * 1e9, took) for event, (_, took) in zip(loaders(run), run.printed, strict=True)]
    assert any(difference < max(took / 2, 20e6) for difference, took in apart)
    assert (run.complaints, run.missed) == ([], 0)
    assert len(run.steps()) == 8
    assert printed(run) == printed(run_untraced(tmp_path, EPOCHS, workers))
    for recorded in run.events("loader"):
        assert recorded.data.keys() <= set(COLUMNS["loader"]), "every member has a column"


OFTEN = """
import json, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 1)
rows = torch.randn(1000, 4)
same = DataLoader(TensorDataset(rows), batch_size=10)
began, started, spent = time.monotonic(), 0, 0
while time.monotonic() < began + 1.5 or started < 110:  # a busy machine makes few in this time
    data = TensorDataset(rows[: 10 + started % 100] if sys.argv[1] == "different" else rows)
    loader = same if sys.argv[1] == "same" else DataLoader(data, batch_size=10)
    before = time.monotonic_ns()
    batches = iter(loader)
    spent += time.monotonic_ns() - before
    started += 1
    model(next(batches)[0])
    time.sleep(0.0001)  # nobody reads meanwhile: the ring has room for 16,000 of these
print(json.dumps([started, spent, time.monotonic() - began]))
"""


@pytest.mark.parametrize("what", ["same", "alike", "different"])
def test_a_loader_for_each_step_has_few_records(tmp_path: Path, what: str) -> None:
    run = run_traced(tmp_path, OFTEN, what)
    started, _, took_s = run.printed
    found = loaders(run)
    assert started > 100
    assert 64 <= len(found) <= 64 + took_s + 1
    assert (run.complaints, run.missed) == ([], 0)


ASKED = """
import json
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

class Stream(IterableDataset):
    asked = 0
    def __iter__(self):
        return iter(torch.randn(30, 4))
    def __len__(self):  # too small: torch warns if anybody asks before
        Stream.asked += 1
        return 3

class Refuses(Dataset):
    asked = 0
    def __getitem__(self, index):
        return torch.ones(4)
    def __len__(self):
        Refuses.asked += 1
        raise RuntimeError("no length")

class Order:
    asked = 0
    def __iter__(self):
        return iter(range(20))
    def __len__(self):
        Order.asked += 1
        raise RuntimeError("no length either")

class Fails:
    def __iter__(self):
        raise LookupError("no order")

model = torch.nn.Linear(4, 1)
for loader in (
    DataLoader(Stream(), batch_size=10),
    DataLoader(Refuses(), batch_size=10),
    DataLoader(Refuses(), batch_size=10, sampler=Order()),
    DataLoader(Refuses(), batch_size=10, sampler=range(20)),
    DataLoader(Refuses(), batch_size=None, sampler=Fails()),
):
    for start in range(2):
        try:
            for x in loader:
                model(x)
                print(tuple(x.shape))
        except Exception as error:
            names = []
            while error.__traceback__ is not None:
                names.append(error.__traceback__.tb_frame.f_code.co_name)
                error.__traceback__ = error.__traceback__.tb_next
            print(repr(error), names)
print(json.dumps([Stream.asked, Refuses.asked, Order.asked]))
"""


def test_a_loader_is_asked_once_for_a_length_that_the_script_computes(tmp_path: Path) -> None:
    run, by_itself = run_traced(tmp_path, ASKED), run_untraced(tmp_path, ASKED)
    assert printed(run) == printed(by_itself)
    assert [more - asked for more, asked in zip(run.printed, by_itself.printed, strict=True)] == [0, 1, 1]
    iterable = "dpmon does not ask an IterableDataset for its length: torch would warn if it then yields more"
    assert [(event["loader"], event["batches"], event["absent"].get("batches")) for event in loaders(run)] == [
        *[("Stream", None, iterable)] * 2,
        *[("Refuses", None, "its __len__ raised RuntimeError")] * 4,
        *[("Refuses", 2, None)] * 2,
    ]
    assert run.complaints == []


FORKED = """
import gc, json, os, weakref
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 1)

class Parents(TensorDataset):
    pass

class Childs(TensorDataset):
    pass

def read(kind):
    data = kind(torch.ones(10, 4))
    for x, in DataLoader(data, batch_size=5):
        pass
    model(x)
    return weakref.ref(data)

for _ in DataLoader(Parents(torch.ones(20, 4)), batch_size=5):
    pass  # before the first call: this start waits for the ring
child = os.fork()
if not child:
    read(Childs)
    os._exit(0)
os.waitpid(child, 0)
known = read(Parents)
gc.collect()
print(json.dumps([child, known() is None]))
"""


def test_a_fork_records_its_own_loaders_and_no_dataset_is_kept_alive(tmp_path: Path) -> None:
    run = run_traced(tmp_path, FORKED)
    child, gone = run.printed
    assert gone
    number = run.process_of(child)
    assert [event["loader"] for event in loaders(run, number)] == ["Childs"]
    (parent,) = set(run.processes) - {number}
    assert [event["loader"] for event in loaders(run, parent)] == ["Parents"] * 2
    assert run.complaints == []


COMPILED = """
import json, torch
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.ones(10, 4))
def total(x):
    for rows, in DataLoader(data, batch_size=5):
        x = x + rows.sum()
    return x
print(torch.compile(total, backend="eager")(torch.zeros(())).item())
print(json.dumps(None))
"""


def test_a_loader_within_a_compiled_function(tmp_path: Path) -> None:
    run = run_traced(tmp_path, COMPILED)
    assert printed(run) == printed(run_untraced(tmp_path, COMPILED))
