"""A command that should bring the records of a machine prints sound rows at full speed: the disk does not fill up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import dpmon
from dpmon.errors import HistoryError
from dpmon.mirror.mirror_run import find_or_create_mirror
from dpmon.store.database import HISTORY_FILE, database_file_stamps
from dpmon.store.node_table import read_node_rows
from dpmon.store.store_opening import open_store
from dpmon.supervise.start_supervisor import NODE_COMMAND_PREFIX as MACHINE_VARIABLE
from support.run_harness import wait_for

LIMIT = 4 << 20
MACHINE = """\
import json, sys, time

def say(**line):
    sys.stdout.write(json.dumps(line) + "\\n")

about = {"host": "h", "run": "20260101-000000-x-0000", "version": sys.argv[1], "origin_s": 0}
sys.stdout.write(f"dpmon-records {json.dumps(about)}\\n")
sys.stdout.flush()
for line in sys.stdin:
    request = json.loads(line)
    if request["ask"] == "time":
        say(answer=request["id"], now_ns=1)
        sys.stdout.flush()
    elif request["ask"] == "begin":
        break
from dpmon.store.row_exchange import columns_sent
columns = list(columns_sent("device_rollups"))
at = first = request["offset"]
while True:
    say(table="device_rollups", columns=columns, rows=[[0, 1, f"name {n}", 1, 1.0, 1.0] for n in range(at, at + 2000)])
    say(beat=1, offset=at + 2000, seq=0, tallied_s=0, output="x" * 10_000, **{"from": at})
    at += 2000
"""
MIRROR = """\
import sys
from dpmon.mirror import mirror_history
from dpmon.mirror.mirror import main
mirror_history.LIMIT_BYTES = int(sys.argv[2])
main(sys.argv[1], "")
"""


def received(directory: Path) -> int:
    """Return how many rows of the machine were written."""
    with suppress(HistoryError), open_store(directory) as store:  # it may not be there yet
        return max((node.received for node in read_node_rows(store.connection)), default=0)
    return 0


@pytest.mark.slow
def test_the_disk_does_not_fill_up(state: Path, tmp_path: Path) -> None:
    (tmp_path / "machine.py").write_text(MACHINE)
    words = [sys.executable, str(tmp_path / "machine.py"), dpmon.__version__]
    machine = ["gpu-0", "20260101-000000-x-0000", *words]
    directory = find_or_create_mirror("flooded", [machine])
    command = [sys.executable, "-c", MIRROR, str(directory), str(LIMIT)]
    env = {**os.environ, f"{MACHINE_VARIABLE}0": json.dumps(machine)}
    mirror = subprocess.Popen(command, env=env, start_new_session=True)
    sizes = [0]

    def written() -> bool:
        sizes.append(sum(file.st_size for file in database_file_stamps(directory / HISTORY_FILE)))
        assert mirror.poll() is None
        return received(directory) > 800_000

    try:
        wait_for(written, 240, what="rows that need 25 MB")
    finally:
        mirror.terminate()
        mirror.wait()
    assert max(sizes) < LIMIT + (32 << 20), "what one commit writes, and its journal"
    size = sum(file.st_size for file in database_file_stamps(directory / HISTORY_FILE))
    assert size < LIMIT + (16 << 20), "the file keeps the pages that one commit needed"
    assert sum(entry.stat().st_size for entry in os.scandir(directory)) < LIMIT + (32 << 20)
