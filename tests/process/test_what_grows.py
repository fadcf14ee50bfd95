"""What keeps memory alive, by name and line, in real runs: staged causes, and what must not be seen of the search."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from dpmon.record.record_types import Step
from dpmon.text.growth_text import describe_growth
from support.tracer_harness import TracedScript, run_untraced

pytestmark = pytest.mark.slow

CAUSES = Path(__file__).resolve().parents[1] / "support" / "memory_causes"


def looked_at(script: TracedScript) -> dict[str, Any]:
    """Ask a script what grows; return its record."""
    ring, steps, lines = script.ring(), 0, script.directory / "process-0.jsonl"
    until = time.monotonic() + 240
    while steps < 5 and time.monotonic() < until:  # before the first step, nothing has a graph
        steps += sum(isinstance(row, Step) for row in ring.read())
        time.sleep(0.01)
    ring.request_walk()
    ring.close()
    while time.monotonic() < until:
        assert script.process.poll() is None, script.end().err
        for line in lines.read_bytes().splitlines() if lines.exists() else ():
            if b'"kind":"growth"' in line:
                found: dict[str, Any] = json.loads(line)
                return found
        time.sleep(0.05)
    raise AssertionError("no answer")


def named_in_documentation() -> dict[str, str]:
    """Return what the documentation says is named in each script, without numbers."""
    text = (CAUSES.parents[2] / "docs" / "tracing.md").read_text()
    return dict(re.findall(r"^\| `(\w+)[.]py` \| (.+) \|$", text, re.MULTILINE))


@pytest.mark.parametrize("cause", sorted(path.stem for path in CAUSES.glob("*.py")))
def test_the_name_of_what_grows_is_that_of_the_documentation(tmp_path: Path, cause: str) -> None:
    text = (CAUSES / f"{cause}.py").read_text()
    script = TracedScript(tmp_path, text, 100_000, mode="script", name=f"{cause}.py")
    growth = looked_at(script)
    script.process.kill()
    script.process.wait()
    texts = describe_growth({**growth, "omitted": []})
    assert (
        re.sub(r" [\d,]+ (?=graphs|tensors)", " N ", "; ".join(texts) or "nothing") == named_in_documentation()[cause]
    )
    if growth["names"] and cause != "shape_cache":
        assert growth["names"][0]["count"] >= growth["steps"]


IN_A_FUNCTION = """
import os, sys, time, torch
from torch import nn

def train():
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    kept, before = torch.zeros(()), None
    while not os.path.exists("stop"):
        out = net(torch.ones(4, 8))
        optimizer.zero_grad()
        out.sum().backward()
        optimizer.step()
        kept = kept + net(torch.ones(4, 8)).mean()
        time.sleep(0.005)
    print(sorted(sys._getframe().f_locals))

train()
"""


def test_variables_of_a_function(tmp_path: Path) -> None:
    script = TracedScript(tmp_path, IN_A_FUNCTION, mode="script", fresh=True)
    growth = looked_at(script)
    (script.cwd / "stop").touch()
    run = script.end()
    assert (run.status, run.complaints, run.err) == (0, [], "")
    assert run.out == "['before', 'kept', 'net', 'optimizer', 'out']\n"
    (name,) = growth["names"]
    assert (name["name"], name["function"], name["place"], name["is_cut"]) == ("kept", "train", "script.py:14", False)
    steps = len(run.steps())
    assert growth["steps"] < name["count"] <= steps


SAME = """
import gc, os, random, sys, torch, weakref
from torch import nn

gc.collect = gc.get_objects = gc.get_referents = None
gc.callbacks.append(lambda phase, info: None)
torch.manual_seed(0)
random.seed(0)

class Strange(type):
    def __hash__(cls): raise SystemExit("hash of a class")
    def __eq__(cls, other): raise SystemExit("comparison of a class")
    def __getattribute__(cls, name):
        if name in ("__mro__", "__dict__", "__name__"): raise SystemExit(f"{name} of a class")
        return super().__getattribute__(name)

class Hostile(metaclass=Strange):
    def __init__(self): self.inner = [1]
    __class__ = property(lambda self: sys.exit("class of an object"))
    __dict__ = property(lambda self: sys.exit("dict of an object"))
    __len__ = __iter__ = __getattr__ = __repr__ = __eq__ = __bool__ = lambda self, *others: sys.exit("of an object")

class Longer(list):
    __len__ = __iter__ = __getitem__ = __bool__ = lambda self, *others: sys.exit("of a list")

class Died:
    died = []
    def __del__(self): Died.died.append(step)

net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
hostile, longer, kept, endless = Hostile(), Longer([1, 2]), {}, []
endless.append(endless)
huge = [0] * 1_000_000
for step in range(400):
    out = net(torch.rand(4, 8))
    held = Died()
    optimizer.zero_grad()
    out.sum().backward()
    optimizer.step()
    del held
    kept[step] = Hostile()
    list.append(longer, step)
    print(out.sum().item().hex(), random.random(), len(Died.died), Died.died[-1] == step)
"""


def test_the_script_sees_nothing_of_it(tmp_path: Path) -> None:
    """Hostile classes, replaced functions of gc, lives of objects, random streams and losses: all as without dpmon."""
    ask = "import dpmon.span_reader, dpmon.tracer.memory.growth_walk as w\nw.MIN_GAP_NS, w.CHECK_NS = 0, 1\n"
    begin = "    if step == 20 and os.environ.get('DPMON_RUN'):\n"
    begin += "        dpmon.span_reader.SpanReader(os.environ['DPMON_RUN'] + '/process-0.ring').request_walk()\n"
    traced = SAME.replace("gc.collect", ask + "gc.collect", 1).replace("    out = net", begin + "    out = net", 1)
    run = TracedScript(tmp_path, traced, mode="script").end()
    plain = run_untraced(tmp_path, SAME)
    assert (run.err, run.status, run.complaints) == ("", 0, [])
    assert run.out == plain.out
    (growth,) = [event.data for event in run.events("growth")]
    assert [name["name"] for name in growth["names"]] == ["kept"]
    assert growth["names"][0]["items"] == "Hostile"
