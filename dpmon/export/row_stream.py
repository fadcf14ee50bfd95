"""`dpmon export --follow`: prints new rows of a run's history as they are written (dpmon.store.row_exchange).

The first line describes the run. Then comes one chunk per second: the new rows, and a last line called the beat.
With `rollups`, a mirror on another node reads them (dpmon.mirror.mirror). It writes requests, one per line, to the
standard input. The first one says how far its clock is ahead, and which rows it already has. The mirror gets only some
steps and calls, about one per second: those that all ranks choose alike. Tallies and sums, from which metrics are
computed, are complete.
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
from dpmon.errors import DpmonError
from dpmon.export import ExportError
from dpmon.export.incremental_rows import IncrementalRows
from dpmon.record.safe_json import load_json
from dpmon.record.schema import SECOND
from dpmon.record.typed_json import to_json
from dpmon.run.lifecycle import has_live_supervisor
from dpmon.run.mirror_state import activities_by_word
from dpmon.run.run_directory import load_exit
from dpmon.run.run_reader import NO_TRAINING_MESSAGE, RunReader
from dpmon.run.run_signals import stop_run
from dpmon.run.safe_files import open_file, read_file
from dpmon.stalls.stall_report import STANDING_FILE, request_and_wait
from dpmon.store.row_exchange import MARK
from dpmon.store.store_opening import open_store

COMMIT_DELAY_NS = 600_000_000
"""A second is complete this long after its end, because the supervisor commits twice per second."""
FIRST_OUTPUT_BYTES, MAX_OUTPUT_BYTES = 4096, 1 << 15
"""How much of the output is sent first, and at most with each beat."""
MAX_READER_WAIT_S = 60.0
"""Longest wait for the first request, and after the run's end for the end of the input: the reader may have exited."""
_MAX_REPLY_BYTES = 1 << 19
_MAX_LINE_BYTES = 1 << 16


class _RequestQueue:
    """The requests of the reader, one per line of the standard input."""

    def __init__(self) -> None:
        self._partial_line = b""
        self.is_over = False
        """Whether the input has ended."""

    def wait(self, timeout_s: float) -> list[Mapping[str, Any]]:
        """Return the next requests. Wait for them for at most `timeout_s`."""
        if select.select([0], [], [], max(timeout_s, 0.0)) == ([], [], []):
            return []
        data = os.read(0, _MAX_LINE_BYTES)
        self.is_over = not data
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        self._partial_line = self._partial_line[:_MAX_LINE_BYTES]
        requests: list[Mapping[str, Any]] = []
        for line in lines:
            with suppress(ValueError):
                if isinstance(request := load_json(line), dict):
                    requests.append(request)
        return requests


class _RowStream:
    """The lines about one run for one reader, and the replies to its requests."""

    def __init__(self, directory: Path, rows: IncrementalRows) -> None:
        self._directory = directory
        self._reader = RunReader(directory)
        self._rows = rows
        self._start_ns = self._reader.info.start_ns
        self._clock_shift_ns = 0
        self._beats = count(1)
        self._output_offset: int | None = None
        """Offset up to which the output was sent; None if nothing was sent yet."""
        self._stall_mtime_ns = -1
        """Modification time of the last rank report that was sent (ns); 0 if there was no report."""
        self._replies: list[str] = []

    def now_ns(self) -> int:
        """Return the current time of the run (ns)."""
        return time.monotonic_ns() - self._start_ns

    def header_line(self) -> str:
        """Return the first line, which describes the run."""
        run_info = self._reader.info
        fields = "script", "command", "cwd"
        header = {"run": run_info.id, "version": dpmon.__version__, "origin_s": run_info.origin_s}
        return MARK + json.dumps(header | {name: getattr(run_info, name) for name in fields})

    def next_chunk(self) -> tuple[list[str], bool, bool]:
        """Return the lines of a chunk, whether more rows are ready, and whether it is the last chunk."""
        run_info, exit_info = self._reader.refresh(), self._reader.exit_info()
        is_complete = exit_info is not None and exit_info.drained  # otherwise, a supervisor is still writing
        earlier_offset, has_more = self._rows.offset, False
        lines: list[str] = []
        if is_complete and exit_info is not None:
            end_ns = exit_info.end_ns - self._start_ns + 2 * SECOND
        else:
            end_ns = self.now_ns() - COMMIT_DELAY_NS
        # Without a supervisor, the history does not change, and its last second may be incomplete.
        if is_complete or has_live_supervisor(run_info):
            with open_store(self._directory) as store:
                lines, has_more = self._rows.next_chunk(store, max(end_ns // SECOND, 0), is_last=is_complete)
        beat = {"beat": next(self._beats), "from": earlier_offset, "offset": self._rows.offset, **self._process_state()}
        beat |= {"seq": self._rows.seq, "tallied_s": self._rows.tallied_s, "deleted": self._rows.deleted}
        beat["left_out"] = self._rows.left_out
        self._rows.left_out = 0
        lines += self._stall_report_lines()
        is_last = is_complete and not has_more
        if is_last and exit_info is not None:
            beat["exit"] = asdict(exit_info)
        if (output := self._new_output(is_last=is_last)) is not None:
            beat |= {"output": output, "output_at": self._output_offset}
        return [*lines, json.dumps(beat)], has_more, is_last

    def is_over(self) -> bool:
        """Return whether the run has ended and its history is complete."""
        exit_info = load_exit(self._directory)
        return exit_info is not None and exit_info.drained

    def _process_state(self) -> dict[str, Any]:
        """Return the state of the processes and of the requests to them, as members of a beat."""
        reader = self._reader
        activities = {
            process: (activity, since_ns - self._start_ns + self._clock_shift_ns if since_ns else 0)
            for process, (activity, since_ns) in reader.activities().items()
        }
        stage = reader.startup_stage()
        stage_text, stage_start_ns = stage or ("", 0)
        pause, input_ns = reader.pause_state(), reader.input_wait_start_ns()
        return {
            "doing": activities_by_word(activities),
            "pending": reader.has_pending_request(),
            "pause": [
                pause.is_requested,
                pause.is_pending,
                None if pause.since_ns is None else self._to_reader_clock(pause.since_ns),
            ],
            "refusal": reader.pause_refusal(),
            "input_ns": None if input_ns is None else self._to_reader_clock(input_ns),
            "stage": None if stage is None else [stage_text, self._to_reader_clock(stage_start_ns)],
        }

    def _stall_report_lines(self) -> list[str]:
        """Return a line with what the ranks do in a possible stall; nothing if it has not changed."""
        mtime_ns = 0
        report: dict[str, Any] = {"now_ns": 0, "ranks": []}
        with suppress(OSError, ValueError):
            mtime_ns = (self._directory / STANDING_FILE).lstat().st_mtime_ns
            if mtime_ns != self._stall_mtime_ns:
                report = load_json(read_file(self._directory / STANDING_FILE, _MAX_REPLY_BYTES))
        if mtime_ns == self._stall_mtime_ns:
            return []
        self._stall_mtime_ns = mtime_ns
        age_s = max(time.monotonic_ns() - report["now_ns"], 0) / SECOND
        return [json.dumps({"standing": report, "age_s": age_s})]

    def _to_reader_clock(self, monotonic_ns: int) -> int:
        return monotonic_ns - self._start_ns + self._clock_shift_ns

    def _new_output(self, *, is_last: bool) -> str | None:
        """Return new whole lines of the script's output, or None. With `is_last`, also a last line without an end."""
        path = self._reader.output_paths[0]
        with suppress(OSError), open(open_file(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = max(size - FIRST_OUTPUT_BYTES, 0) if self._output_offset is None else min(self._output_offset, size)
            offset = max(start, size - MAX_OUTPUT_BYTES)
            file.seek(offset)
            data = file.read(MAX_OUTPUT_BYTES)
            if offset != (self._output_offset or 0):  # it may begin in the middle of a line
                _, line_end, whole_lines = data.partition(b"\n")
                if line_end:
                    offset += len(data) - len(whole_lines)
                    data = whole_lines
            if not is_last and len(data) < MAX_OUTPUT_BYTES:
                data = data[: data.rfind(b"\n" if b"\n" in data else b"\r") + 1]  # progress bars end lines with \r
            self._output_offset = offset + len(data)
            return data.decode("utf-8", "replace") or None
        return None

    # ------------------------------------------------------------------------------------------ requests

    def begin(self, request: Mapping[str, Any]) -> None:
        """Handle the first request, which begins the stream of rows."""
        members = ("offset", "seq", "tallied_s", "shift_ns", "shift_s", "sparse")
        self._rows = IncrementalRows(rollups=True, **{name: request.get(name, 0) for name in members})
        self._clock_shift_ns, self._output_offset = request.get("shift_ns", 0), request.get("output_at")

    def handle_request(self, request: Mapping[str, Any]) -> None:
        """Handle a request, on a thread if it may take long."""
        kind, request_id, reader = str(request.get("ask")), request.get("id"), self._reader
        work: dict[str, Callable[[], Mapping[str, Any]]] = {
            "time": lambda: {"now_ns": self.now_ns()},
            "mode": lambda: {"count": reader.request_mode(str(request.get("mode")))},
            "pause": lambda: {"count": reader.request_pause(request.get("paused") is True)},
            "sample": lambda: {"count": reader.request_sample()},
            "stop": self._stop,
            "why": lambda: {"why": to_json(request_and_wait(self._directory))},
        }
        if kind == "records":
            self._rows.whole = [int(process) for process in request["processes"]]
        elif kind in ("stop", "why"):
            threading.Thread(target=self._run_and_reply, args=(request_id, work[kind]), daemon=True).start()
        elif kind in work:
            self._run_and_reply(request_id, work[kind])

    def _stop(self) -> Mapping[str, Any]:
        """Stop the run. Return the reply: empty, or with an error."""
        *_, last_message = stop_run(self._directory, self._reader.info)
        return {"error": last_message} if "cannot be stopped" in last_message else {}

    def _run_and_reply(self, request_id: object, work: Callable[[], Mapping[str, Any]]) -> None:
        """Queue what `work` returns, or its error, as the reply to a request."""
        try:
            reply = work()
            if reply.get("count") == 0:
                reply = {"error": self._reader.pause_refusal() or NO_TRAINING_MESSAGE}
            if "why" in reply and reply["why"] is None:
                reply = {"error": "its supervisor did not answer"}
        except (DpmonError, OSError, ValueError) as error:
            reply = {"error": str(error)}
        reply = {"answer": request_id, **reply}
        if len(json.dumps(reply)) > _MAX_REPLY_BYTES and "why" in reply:
            for rank in reply["why"]["ranks"]:
                rank.pop("stacks", None)
        self._replies.append(json.dumps(reply))

    def pop_replies(self) -> list[str]:
        """Return the replies since the last call as lines."""
        return [self._replies.pop(0) for _ in range(len(self._replies))]  # threads may add more meanwhile


def stream_rows(directory: Path, start_id: int, *, rollups: bool) -> None:
    """Print the rows of the run in `directory` with ids above `start_id`, until its end.

    `rollups`: for a mirror, until the run or the standard input ends. Raises BrokenPipeError when nobody reads the
    output, and ExportError if the standard input ends before the first request.
    """
    requests = _RequestQueue()
    stream = _RowStream(directory, IncrementalRows(rollups=rollups, offset=start_id))
    with closing(stream._reader):
        _print([stream.header_line()])
        has_begun, is_last, due_s = not rollups, False, time.monotonic()
        leave_s = due_s + MAX_READER_WAIT_S
        while not requests.is_over:
            now_s = time.monotonic()
            if has_begun and not is_last:
                leave_s = now_s + MAX_READER_WAIT_S
            elif now_s > leave_s:
                return
            # At once: the run's end may also end the Slurm job in which this process runs.
            if has_begun and not is_last and (now_s >= due_s or stream.is_over()):
                lines, has_more, is_last = stream.next_chunk()
                _print(lines)
                due_s = now_s if has_more else _next_beat(stream.now_ns())
            if is_last and not rollups:
                return
            wait_s = min(due_s - time.monotonic(), 0.1) if has_begun and not is_last else 0.1
            if not rollups:
                time.sleep(max(wait_s, 0.0))
                continue
            for request in requests.wait(wait_s):
                if request.get("ask") == "begin" and not has_begun:
                    stream.begin(request)
                    has_begun, due_s = True, 0.0
                else:
                    stream.handle_request(request)
            _print(stream.pop_replies())
    if not has_begun:
        raise ExportError(
            "its standard input ends at once: the connection command must forward stdin (kubectl exec -i)"
        )


def _next_beat(now_ns: int) -> float:
    """Return when the next second is complete (monotonic s)."""
    return time.monotonic() + (SECOND - (now_ns - COMMIT_DELAY_NS) % SECOND) / 1e9 + 0.05


def _print(lines: Iterable[str]) -> None:
    data = "".join(f"{line}\n" for line in lines)
    if data:
        sys.stdout.write(data)
        sys.stdout.flush()
