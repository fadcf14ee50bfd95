"""The cost of the mirror: share of a core and memory for 125 machines of 8 ranks, each with a chunk a second.

    python tests/benchmarks/bench_mirror.py [--nodes 125] [--seconds 60] [--day] [--profile]

A generator takes the place of the machines: it makes the lines that `dpmon export --follow --rollups` prints of a
DistributedDataParallel training of 8 ranks with 8 GPUs, 10 steps a second, and moves them on in time. Reading them from
pipes is not included. `--day`: a simulated day of fewer machines (--nodes 4) as fast as possible: the memory must be
flat, and the history must keep to its limit.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS))

from yardstick import Yardstick  # noqa: E402

from dpmon.export.incremental_rows import IncrementalRows  # noqa: E402
from dpmon.mirror.chunk_receiver import Chunk, ChunkReceiver  # noqa: E402
from dpmon.mirror.mirror_history import MirrorHistory  # noqa: E402
from dpmon.record.record_types import Event, Step  # noqa: E402
from dpmon.run.run_directory import RunInfo  # noqa: E402
from dpmon.supervise.start_supervisor import COLLECTION_THRESHOLD  # noqa: E402
from support.history_builders import ORIGIN_S, Recording  # noqa: E402
from support.record_builders import SECOND, Training, device_event, host_event, with_event_data, with_other  # noqa: E402

WARM_S = 3
RANKS, STEP_NS, CYCLE_S = 8, 100_000_000, 60
BUDGET = "budget: 5% of a core on the reference machine, memory flat"
_TIMES = ("start_ns", "t_ns", "begin_ns", "end_ns", "first_ns", "last_ns")


class Machine:
    """The lines of one machine, second by second."""

    def __init__(self, world: int) -> None:
        self._chunks: list[list[dict[str, Any]]] = []
        self._tallied_s: list[int] = []
        recording, trainings = Recording(), []
        for process in range(RANKS):
            training = Training(
                process=process, rank=process, devices=("cuda:0",), virtual=False, step_ns=STEP_NS, start_ns=2 * SECOND,
                mode="single", via="DistributedDataParallel", seed=process,
            )  # fmt: skip
            first, *others = training.begin()
            ddp = {"process": process, "rank": process, "t_s": 2.0, "group": list(range(world))}
            rows = [with_event_data(first, pid=4242 + process, world=world), *others, Event("ddp", ddp)]
            recording.add(rows, process, process)
            trainings.append(training)
        chunks = IncrementalRows(rollups=True, sparse=True)
        for second in range(3, CYCLE_S + 4):
            for process, training in enumerate(trainings):
                while training.now < second * SECOND:
                    took = training.step()
                    sync = {"sync": 1_000_000 + training.random.randrange(4_000_000)}
                    row = took[-1]
                    assert isinstance(row, Step)
                    counts = {**row.counts, "synced": 1, "sync_number": row.step}
                    took[-1] = row._replace(phases=with_other({**row.phases, **sync}, row.wall_ns), counts=counts)
                    recording.add(took, process, process)
            recording.add([host_event(second), *(device_event(float(second), index) for index in range(RANKS))])
            lines, _ = chunks.next_chunk(recording.store(), second, is_last=False)
            self._chunks.append([json.loads(line) for line in lines])
            self._tallied_s.append(chunks.tallied_s)
        self._steps = max(training.steps for training in trainings)
        self._ids = chunks.offset

    def first(self, node: int) -> list[bytes]:
        """The first chunk, which names the ranks."""
        found = []
        for chunk in self._chunks[:1]:
            for one in chunk:
                one = json.loads(json.dumps(one))
                if one["table"] == "rings":
                    at = one["columns"].index("rank") if "rank" in one["columns"] else None
                    if at is None:
                        one["columns"].append("rank")
                    for number, row in enumerate(one["rows"]):
                        rank = node * RANKS + number
                        row[at:] = [rank, *row[at + 1 :]] if at is not None else row.append(rank) or row[len(row) :]
                if one["table"] == "events":
                    at = one["columns"].index("json")
                    for row in one["rows"]:
                        data = json.loads(row[at])
                        if data.get("rank") is not None:
                            data["rank"] += node * RANKS
                        row[at] = json.dumps(data)
                found.append(json.dumps(one).encode())
        return found

    def second(self, second: int) -> list[bytes]:
        """The lines of one second, the same for all machines."""
        cycle, at = divmod(second, CYCLE_S)
        rows = [self._moved(one, cycle) for one in self._chunks[1 + at]]
        return [json.dumps(one, separators=(",", ":")).encode() for one in rows]

    def tallied_s(self, second: int) -> int:
        """The second up to which the machine has sent its time buckets with the lines of a second."""
        cycle, at = divmod(second, CYCLE_S)
        return self._tallied_s[1 + at] + cycle * CYCLE_S

    def _moved(self, one: dict[str, Any], cycle: int) -> dict[str, Any]:
        by = {"start_s": cycle * CYCLE_S, "id": cycle * self._ids, "step": cycle * self._steps}
        by |= dict.fromkeys(_TIMES, cycle * CYCLE_S * SECOND) | {"last_step": by["step"], "sync_number": by["step"]}
        moves = [(at, by[name]) for at, name in enumerate(one["columns"]) if name in by]
        rows = [list(row) for row in one["rows"]]
        for row in rows:
            for at, add in moves:
                if row[at] is not None:
                    row[at] += add
        return {**one, "rows": rows}


def measure(nodes: int, seconds: int, state: Path, *, profile: bool, every: int) -> Iterator[str]:
    """Yield lines of figures."""
    about: dict[str, Any] = {"id": "mirror", "name": "m", "command": (), "script": "m", "cwd": "/", "python": None}
    about |= {"started_unix": float(ORIGIN_S), "start_ns": 0, "boot_id": "", "headless": False}
    info = RunInfo(**about, nodes=tuple(f"gpu-{number}" for number in range(nodes)))
    machine, records = Machine(nodes * RANKS), MirrorHistory(state, info)
    receivers = [ChunkReceiver(ORIGIN_S) for _ in range(nodes)]
    for node in records.nodes:
        node.state, node.origin_s = "connected", ORIGIN_S
    profiler, yardstick = cProfile.Profile(), Yardstick()
    spent = written = 0.0
    bytes_sent = joined = 0
    for second in range(seconds + WARM_S + 1):
        same = [] if second == 0 else machine.second(second - 1)
        each = [machine.first(node) if second == 0 else same for node in range(nodes)]
        bytes_sent += sum(sum(map(len, lines)) for lines in each)
        now_ns = (second + 5) * SECOND
        began = time.process_time()
        if profile:
            profiler.enable()
        for half in (0, 1):  # the mirror commits twice a second
            chunks = []
            for node in records.nodes[half::2]:
                receiver = receivers[node.number]
                for line in each[node.number]:
                    receiver.add_line(line, now_ns)
                node.heard_ns = now_ns
                tallied_s = machine.tallied_s(second - 1) if second else ORIGIN_S
                beat: dict[str, Any] = {
                    "beat": second,
                    "from": second,
                    "offset": second + 1,
                    "seq": second,
                    "tallied_s": tallied_s,
                }
                beat["deleted"] = {"1": tallied_s}
                chunk = receiver.add_line(json.dumps(beat).encode(), now_ns)
                assert isinstance(chunk, Chunk)
                chunks.append((node, chunk))
            before = time.process_time()
            records.write(chunks)
            written += time.process_time() - before
        if profile:
            profiler.disable()
        spent += time.process_time() - began
        if second == WARM_S:  # the first chunks name all ranks
            spent, written, bytes_sent = 0.0, 0.0, 0
            yardstick.since()
        if second % every == WARM_S and second > WARM_S:
            slower = yardstick.since()
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            size = sum(path.stat().st_size for path in state.glob("history.sqlite*")) / (1 << 20)
            share = spent / every * 100
            yield (
                f"{second:>7} s  {share:6.2f}% of a core here, {share / slower:5.2f}% on the reference"
                f" (writing {written / spent * 100:.0f}%)  {peak:6.1f} MiB  history {size:7.1f} MiB"
                f"  {bytes_sent / every / 1e3:8.0f} kB/s"
            )
            spent = written = 0.0
            bytes_sent = 0
    ((joined,),) = records._history.connection.rows("SELECT count(*) FROM steps WHERE wait_ns IS NOT NULL")
    yield f"steps with known waits: {joined:,}"
    records.close()
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(35)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--seconds", type=int)
    parser.add_argument("--day", action="store_true")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    gc.set_threshold(COLLECTION_THRESHOLD)
    nodes = options.nodes or (4 if options.day else 125)
    seconds = options.seconds or (86_400 if options.day else 60)
    print(f"{nodes} machines of {RANKS} ranks; {BUDGET}")
    every = 3600 if options.day else min(20, seconds)
    with tempfile.TemporaryDirectory() as state:
        for line in measure(nodes, seconds, Path(state), profile=options.profile, every=every):
            print(line, flush=True)


if __name__ == "__main__":
    main()
