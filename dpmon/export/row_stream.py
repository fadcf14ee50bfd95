"""`dpmon export --follow`: prints the rows of a run's history as they come (dpmon.store.row_exchange).

First a line with the facts of the run, then a chunk once a second: the rows that are new, and a last line, the beat.
With `rollups`, a mirror on another machine reads them (dpmon.mirror.mirror). It sends requests as lines to the
standard input, first how far its clock is ahead, and what it has. Of steps and calls, it gets those that all ranks
choose alike, about one a second. All that figures are made of is complete: tallies and sums. The mirror's seconds begin
at other times than the seconds here, so the tallies of ten seconds and more are made here for its seconds: for all
machines together, this would be much work.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import dpmon
from dpmon.errors import DpmonError, HistoryError
from dpmon.export import ExportError
from dpmon.export.incremental_rows import IncrementalRows
from dpmon.record.safe_json import load_json, number_member
from dpmon.record.schema import SECOND
from dpmon.run.lifecycle import has_live_supervisor
from dpmon.run.mirror_state import activities_by_word
from dpmon.run.run_directory import load_exit
from dpmon.run.run_reader import NO_TRAINING, RunReader
from dpmon.run.run_signals import stop_run
from dpmon.run.safe_files import open_file, read_file
from dpmon.stalls.why_reply import STANDING_FILE, request_and_wait
from dpmon.store.row_exchange import MARK
from dpmon.store.store_opening import open_store

AFTER_NS = 600_000_000
"""A second is complete this long after its end: the supervisor commits twice a second."""
LAST_OUTPUT, MOST_OUTPUT = 4096, 1 << 15
"""Bytes of the output at the begin, and the most bytes of a beat."""
WAIT_S = 60.0
"""Longest wait for the first request, and for the end of the input after the end of the run: the reader may be gone."""
_MOST_ANSWER = 1 << 19
_MOST_LINE = 1 << 16


class _RequestQueue:
    """The lines on the standard input: requests of the reader."""

    def __init__(self) -> None:
        self._rest = b""
        self.over = False
        """Whether the input has ended."""

    def wait(self, seconds: float) -> list[Mapping[str, Any]]:
        """Return the next requests; wait for them at most this long."""
        if not select.select([0], [], [], max(seconds, 0.0))[0]:
            return []
        data = os.read(0, _MOST_LINE)
        self.over = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[:_MOST_LINE]
        found: list[Mapping[str, Any]] = []
        for line in lines:
            with suppress(ValueError):
                if isinstance(one := load_json(line), dict):
                    found.append(one)
        return found


class _RowStream:
    def __init__(self, directory: Path, rows: IncrementalRows) -> None:
        self._directory = directory
        self._reader = RunReader(directory)
        self._rows = rows
        self._start_ns = self._reader.info.start_ns
        self._shift_ns = 0
        self._beats = count(1)
        self._output: int | None = None
        """Position in the output up to which it was read; None: nothing was read yet."""
        self._stood = -1
        """When the facts of the ranks that stand still were written last; 0: never."""
        self._answers: list[dict[str, Any]] = []

    def now_ns(self) -> int:
        """The run's time now."""
        return time.monotonic_ns() - self._start_ns

    def header_line(self) -> str:
        """The first line."""
        info = self._reader.info
        names = "host", "script", "command", "cwd"
        about = {"run": info.id, "version": dpmon.__version__, **{name: getattr(info, name) for name in names}}
        return MARK + json.dumps(about)

    def next_chunk(self) -> tuple[list[str], bool, bool]:
        """Return the lines of a chunk, whether more is ready, and whether it is the last one."""
        info, how = self._reader.refresh(), self._reader.exit_info()
        complete = how is not None and how.drained  # else the supervisor, or the next one, still writes
        before, more = self._rows.offset, False
        lines: list[str] = []
        now = how.end_ns - self._start_ns + 2 * SECOND if complete and how is not None else self.now_ns() - AFTER_NS
        # Without a supervisor, the history does not change, and a second that seems to be complete may not be.
        if complete or has_live_supervisor(info):
            with open_store(self._directory, as_written=True) as store:
                lines, more = self._rows.next_chunk(store, max(now // SECOND, 0), last=complete)
                if store.damaged is not None:  # else rows would be missing without a sign
                    raise HistoryError(store.damaged)
        beat = {"beat": next(self._beats), "from": before, "offset": self._rows.offset, **self._process_state()}
        beat |= {"tallied_s": self._rows.tallied_s, "deleted": self._rows.deleted, "left_out": self._rows.left_out}
        self._rows.left_out = 0
        lines += self._stall_report_lines()
        last = complete and not more
        if last and how is not None:
            beat["exit"] = asdict(how)
        if (output := self._new_output(last=last)) is not None:
            beat |= {"output": output, "output_at": self._output}
        return [*lines, json.dumps(beat)], more, last

    def is_over(self) -> bool:
        """Whether the run has ended, and its history is complete."""
        how = load_exit(self._directory)
        return how is not None and how.drained

    def _process_state(self) -> dict[str, Any]:
        """The state of the processes and of the requests to them."""
        reader = self._reader
        doing = {
            process: (what, since - self._start_ns + self._shift_ns if since else 0)
            for process, (what, since) in reader.activities().items()
        }
        paused, waits = reader.pause_state(), reader.input_wait_start_ns()
        return {
            "doing": activities_by_word(doing),
            "pending": reader.has_pending_request(),
            "pause": [
                paused.is_requested,
                paused.is_pending,
                None if paused.since_ns is None else self._to_reader_clock(paused.since_ns),
            ],
            "refusal": reader.pause_refusal(),
            "input_ns": None if waits is None else self._to_reader_clock(waits),
            "stage": None if (stage := reader.startup_stage()) is None else [stage[0], self._to_reader_clock(stage[1])],
        }

    def _stall_report_lines(self) -> list[str]:
        """What the ranks do while one stands still, if that has changed: the reader sees all machines of the job."""
        stamp, found = 0, {}
        with suppress(OSError, ValueError):
            stamp = (self._directory / STANDING_FILE).lstat().st_mtime_ns
            if stamp != self._stood:
                found = load_json(read_file(self._directory / STANDING_FILE, _MOST_ANSWER))
        if stamp == self._stood or not isinstance(found, dict):
            return []
        self._stood = stamp
        age_s = max(self.now_ns() / 1e9 - (number_member(found, "t_s") or 0.0), 0.0) if found else 0.0
        return [json.dumps({"standing": found or {"ranks": []}, "age_s": age_s})]

    def _to_reader_clock(self, monotonic_ns: int) -> int:
        return monotonic_ns - self._start_ns + self._shift_ns

    def _new_output(self, *, last: bool) -> str | None:
        """The newest whole lines of the script's output since the last beat; `last`: also a line without an end."""
        path = self._reader.output_paths[0]
        with suppress(OSError), open(open_file(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            begin = max(size - LAST_OUTPUT, 0) if self._output is None else min(self._output, size)
            at = max(begin, size - MOST_OUTPUT)
            file.seek(at)
            data = file.read(MOST_OUTPUT)
            if at != (self._output or 0):  # in the middle of a line
                _, end, rest = data.partition(b"\n")
                data, at = (rest, at + len(data) - len(rest)) if end else (data, at)
            if not last and len(data) < MOST_OUTPUT:
                data = data[: (data.rfind(b"\n") if b"\n" in data else data.rfind(b"\r")) + 1]
            self._output = at + len(data)
            return data.decode("utf-8", "replace") or None
        return None

    # ------------------------------------------------------------------------------------------ requests

    def begin(self, request: Mapping[str, Any]) -> None:
        """Begin to send rows: the first request."""
        numbers = {name: request.get(name) for name in ("offset", "tallied_s", "shift_ns", "shift_s")}
        whole = {name: value if type(value) is int else 0 for name, value in numbers.items()}
        self._rows = IncrementalRows(rollups=True, sparse=request.get("sparse") is True, **whole)
        self._shift_ns = whole["shift_ns"]
        self._output = request["output_at"] if type(request.get("output_at")) is int else None

    def handle_request(self, request: Mapping[str, Any]) -> None:
        """Do what a request asks for. What takes long is done by a thread."""
        kind, number, reader = request.get("ask"), request.get("id"), self._reader

        def later(work: Callable[[], Mapping[str, Any]]) -> None:
            threading.Thread(target=lambda: self._run_and_reply(number, work), daemon=True).start()

        if kind == "time":
            self._run_and_reply(number, lambda: {"now_ns": self.now_ns()})
        elif kind == "mode":
            self._run_and_reply(number, lambda: {"count": reader.request_mode(str(request.get("mode")))})
        elif kind == "pause":
            self._run_and_reply(number, lambda: {"count": reader.request_pause(request.get("paused") is True)})
        elif kind == "sample":
            self._run_and_reply(number, lambda: {"count": reader.request_sample()})
        elif kind == "records":
            processes = request.get("processes")
            self._rows.whole = [one for one in processes if type(one) is int] if isinstance(processes, list) else []
        elif kind == "stop":
            later(self._stop)
        elif kind == "why":
            later(lambda: {"why": request_and_wait(self._directory, native=request.get("native") is True)})

    def _stop(self) -> Mapping[str, Any]:
        *_, last = stop_run(self._directory, self._reader.info)
        return {"error": last} if "cannot be stopped" in last else {}

    def _run_and_reply(self, number: object, work: Callable[[], Mapping[str, Any]]) -> None:
        try:
            found = work()
            if found.get("count") == 0:
                found = {"error": self._reader.pause_refusal() or NO_TRAINING}
            if "why" in found and found["why"] is None:
                found = {"error": "its supervisor did not answer"}
        except (DpmonError, OSError, ValueError) as error:
            found = {"error": str(error)}
        self._answers.append({"answer": number, **found})

    def pop_replies(self) -> list[str]:
        """The answers to requests since the last call."""
        found = []
        while self._answers:
            one = self._answers.pop(0)
            text = json.dumps(one)
            for rank in one["why"].get("ranks", ()) if len(text) > _MOST_ANSWER and "why" in one else ():
                rank.pop("stacks", None)
            found.append(json.dumps(one))
        return found


def stream_rows(directory: Path, start: int, *, rollups: bool) -> None:
    """Print the rows of the run in `directory` with ids above `start`, until its end.

    `rollups`: for a mirror, until its end or the end of the standard input. Raises BrokenPipeError when nobody reads,
    and ExportError if nobody can ask.
    """
    asking = _RequestQueue()
    followed = _RowStream(directory, IncrementalRows(rollups=rollups, offset=start))
    with closing(followed._reader):
        _print([followed.header_line()])
        begun, last, due = not rollups, False, time.monotonic()
        leave = due + WAIT_S
        while not asking.over:
            now = time.monotonic()
            if begun and not last:
                leave = now + WAIT_S
            elif now > leave:
                return
            # At once, because the end of the run may be the end of the job of Slurm in which this process runs.
            if begun and not last and (now >= due or followed.is_over()):
                lines, more, last = followed.next_chunk()
                _print(lines)
                due = now if more else _next_beat(followed.now_ns())
            if last and not rollups:
                return
            wait = min(due - time.monotonic(), 0.1) if begun and not last else 0.1
            if not rollups:
                time.sleep(max(wait, 0.0))
                continue
            for request in asking.wait(wait):
                if request.get("ask") == "begin" and not begun:
                    followed.begin(request)
                    begun, due = True, 0.0
                else:
                    followed.handle_request(request)
            _print(followed.pop_replies())
    if not begun:
        raise ExportError("its standard input ends at once: the way to it must pass it on (kubectl exec -i)")


def _next_beat(now_ns: int) -> float:
    """When the next second is complete (monotonic s)."""
    return time.monotonic() + (SECOND - (now_ns - AFTER_NS) % SECOND) / 1e9 + 0.05


def _print(lines: Iterable[str]) -> None:
    data = "".join(f"{line}\n" for line in lines)
    if data:
        sys.stdout.write(data)
        sys.stdout.flush()
