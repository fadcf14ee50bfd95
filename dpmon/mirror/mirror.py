"""The background process of a run on several machines: it writes what their supervisors record into one history.

It is started like a supervisor, and named as one in run.json. It has no command: it runs one for each machine
(dpmon.mirror.node_links) that prints the rows of the history there, and takes requests.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import dpmon
from dpmon.errors import DpmonError, HistoryError
from dpmon.mirror.chunk_receiver import (
    AHEAD_S,
    MOST_DAMAGED,
    Chunk,
    ChunkReceiver,
    ProtocolError,
    UncheckedChunk,
    validate_chunks,
)
from dpmon.mirror.cross_node_stalls import CrossNodeStallDetector
from dpmon.mirror.mirror_history import ChunkError, MirrorHistory
from dpmon.mirror.mirror_run import append_output, stream_command
from dpmon.mirror.node_connection import NodeConnection
from dpmon.mirror.node_links import LineReceived, LinkClosed, LinkOpened, NodeLinks
from dpmon.mirror.request_relay import RequestRelay
from dpmon.record.safe_json import int_member, number_member, text_member
from dpmon.record.schema import SECOND
from dpmon.run import proc
from dpmon.run.lifecycle import needs_supervisor, take_lock
from dpmon.run.mirror_state import STATE_FILE, activities_by_word, parse_activities
from dpmon.run.run_directory import (
    ID,
    MAX_STATUS,
    ExitInfo,
    RunInfo,
    load_exit,
    load_info,
    record_stop_request,
    write_info,
)
from dpmon.run.run_registry import JOB
from dpmon.run.safe_files import write_atomically
from dpmon.sanitize import sanitize_line
from dpmon.store.query_results import NodeRow, event_from_row
from dpmon.store.ring_drain import RETRY_S
from dpmon.store.row_exchange import CHUNK_BYTES
from dpmon.supervise.prometheus_file import PrometheusFile, metrics_path
from dpmon.supervise.stall_watch import StallRecorder
from dpmon.supervise.start_supervisor import NODE_COMMAND_PREFIX, keep_child_statuses, lost_settings

COMMIT_S, POLL_S, REST_S = 0.5, 0.2, 0.1
MEASURED = 3
"""Questions for the time before the first record; the fastest answer counts."""
MOST_HELD = 2 * CHUNK_BYTES
"""Most bytes of a machine that wait while the history cannot be written; a machine that sends more is disconnected."""
MOST_WAITING = 4 * MOST_HELD
"""Most bytes of all machines that wait after a failed write; each machine may have an equal part of them."""
MOST_WHOLE = 16
"""More machines than this send only some samples of devices, and only some calls."""
FEW_COLLECTIONS = 100_000
"""Objects between two garbage collections: rows create many objects, but no reference cycles."""
_UNWRITTEN = "its records cannot be written here"
_MOST_TEXT, MOST_LOG = 1000, 1 << 20
"""Most characters of a text that a machine has sent, and most bytes of the log: a machine may cause line after line."""


class Mirror(StallRecorder):
    """The mirror of one run."""

    def __init__(
        self, directory: Path, info: RunInfo, commands: Sequence[list[str]], metrics: str | None = None
    ) -> None:
        """`commands`: for each machine, its name, its run or job, and the words that run dpmon there.

        `metrics`: the path of the metrics file.
        """
        self.directory, self.info = directory, info
        self.records = MirrorHistory(directory, info)
        sought = [run.startswith(JOB) for _, run, *_ in commands]
        self.machines = [NodeConnection(node, sought[node.number] and node.run is None) for node in self.records.nodes]
        self.links = NodeLinks(
            len(commands), lambda number: stream_command(commands[number], self.records.nodes[number].run)
        )
        self.joint = CrossNodeStallDetector(directory, info, self, len(commands), self.records.local_process_number)
        self._requests = RequestRelay(self)
        self._sent: list[tuple[NodeConnection, UncheckedChunk]] = []
        """What has come since the last commit."""
        self._chunks: list[tuple[NodeConnection, Chunk]] = []
        """Checked chunks that are not written."""
        self._events: list[tuple[str, Mapping[str, Any]]] = []
        self._last_stall: Mapping[str, Any] | None = None
        self._metrics_file = metrics
        self._metrics: PrometheusFile | None = None
        """The writer of the metrics file; None until a machine has sent the facts of the run."""
        self._ids = count(1)
        self._leave = False
        for machine in self.machines:
            if machine.node.state == "ended":
                self.links.close_link(machine.node.number, "", for_good=True)
            else:
                machine.node.state, machine.node.why, machine.node.since_ns = "connecting", None, self.now_ns()
        for text in lost_settings(info, has_event_command=False, has_metrics=metrics is not None):
            self.emit("warning", {"process": None, "text": text})

    def now_ns(self) -> int:
        """The run's time."""
        return time.monotonic_ns() - self.info.start_ns

    # ------------------------------------------------------------------------------------------ the record of stalls

    def emit(self, kind: str, data: Mapping[str, Any]) -> None:
        """Record an event of the mirror, from any thread."""
        data = {"t_s": self.now_ns() / 1e9, **data}
        self._events.append((kind, data))
        if kind == "stall":
            self._last_stall = data

    def last_stall(self) -> Mapping[str, Any] | None:
        """The data of the last record of a stall of ranks on several machines."""
        return self._last_stall or self.records.last_stall()

    # ------------------------------------------------------------------------------------------ the loop

    def run(self) -> None:
        """Write until all runs have ended, the directory is deleted, or a signal comes."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, lambda *_: setattr(self, "_leave", True))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        commit_at = state_at = 0.0
        over = False
        while not (over or self._leave) and self.directory.is_dir():
            now = time.monotonic()  # before the reports: what came in time is handled before its wait ends
            for report in self.links.poll(POLL_S):
                self._handle_report(report)
            if len(self.machines) > MOST_WHOLE:
                time.sleep(REST_S)  # else each machine's beat would wake this process
            self._requests.poll(now)
            self.joint.poll()
            over = all(machine.is_over for machine in self.machines)
            written = now >= commit_at and self._commit()
            if now >= commit_at:
                commit_at = now + (COMMIT_S if written else RETRY_S)
            over = over and written
            if over or now >= state_at:
                state_at = now + 1.0
                self._write_state_file()
            self._write_metrics(now)
        self.links.close_all()
        self.joint.close()
        if over:
            self._record_run_exit()
        self._commit()
        if self._metrics is not None:
            self._metrics.wait()
            if (how := load_exit(self.directory)) is not None:
                self._metrics.write_final(how)
        self.records.close()

    def _set_node_state(self, node: NodeRow, state: str, why: str | None) -> None:
        """Note the state of a machine."""
        if node.state != state:
            node.since_ns = self.now_ns()
        node.state, node.why = state, why

    def _handle_report(self, report: LinkOpened | LineReceived | LinkClosed) -> None:
        machine = self.machines[report.node]
        node = machine.node
        try:
            if isinstance(report, LinkOpened):
                self._handle_header(machine, report.marker)
            elif isinstance(report, LinkClosed):
                self._handle_disconnect(machine, report)
            elif machine.receiver is not None:
                node.heard_ns = self.now_ns()
                found = machine.receiver.add_line(report.text)
                if isinstance(found, UncheckedChunk):
                    self._handle_chunk(machine, found)
                elif found is not None:
                    self._handle_message(machine, found)
        except (DpmonError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            self._close_link(machine, f"it sent rubbish: {sanitize_line(str(error))}")

    def _handle_header(self, machine: NodeConnection, marker: Mapping[str, Any]) -> None:
        node = machine.node
        machine.receiver, machine.measured, machine.offset = ChunkReceiver(), 0, node.received
        self._drop_unwritten(machine)  # it sends again what is not written
        host, run, version, script, cwd = (
            _text(marker, key) or "" for key in ("host", "run", "version", "script", "cwd")
        )
        if machine.sought and not ID.fullmatch(run):
            raise ProtocolError("it has not named its run")
        if version not in (dpmon.__version__, node.version):
            text = f"{node.name} has dpmon {version}, this machine {dpmon.__version__}: only what both know is read"
            self.emit("warning", {"process": None, "text": text})
        node.host, node.run, node.version, machine.sought = host, run, version, False
        words = marker.get("command")
        if not self.info.command and isinstance(words, list):  # what the run is, as the first machine says
            command = tuple(sanitize_line(word, _MOST_TEXT) for word in words[:100])
            info = replace(self.info, command=command, script=script, cwd=cwd, versions={"dpmon": version})
            self.info = self.joint.info = info
            with contextlib.suppress(OSError):
                write_info(self.directory, self.info)
        self._request_clock(machine)

    def _close_link(self, machine: NodeConnection, why: str, *, for_good: bool = False) -> None:
        """End the connection; unless `for_good`, it is opened again later."""
        machine.receiver = None
        self._handle_disconnect(machine, self.links.close_link(machine.node.number, why, for_good=for_good))

    def _drop_unwritten(self, machine: NodeConnection) -> None:
        """Forget the records that are not written."""
        machine.held = 0
        self._sent = [one for one in self._sent if one[0] is not machine]
        self._chunks = [one for one in self._chunks if one[0] is not machine]

    def _handle_disconnect(self, machine: NodeConnection, report: LinkClosed) -> None:
        if machine.node.state != "ended":
            state = "refused" if report.for_good else "connecting" if machine.sought else "cut"
            self._set_node_state(machine.node, state, report.why or None)
            self.joint.drop_node(machine.node.number)
            machine.beat = {}
        machine.standing = None
        self._requests.drop_node(machine.node.number)

    # ------------------------------------------------------------------------------------------ what comes

    def _request_clock(self, machine: NodeConnection) -> None:
        machine.asked = next(self._ids), self.now_ns()
        self.links.send(machine.node.number, json.dumps({"ask": "time", "id": machine.asked[0]}))

    def _handle_clock_reply(self, machine: NodeConnection, there_ns: int) -> None:
        """Take the time of a machine, between question and answer. After some of them, begin."""
        node, sent = machine.node, machine.asked[1]
        error = (self.now_ns() - sent) // 2
        if machine.measured == 0 or node.clock_error_ns is None or error < node.clock_error_ns:
            node.clock_ns, node.clock_error_ns = sent + error - there_ns, error
        machine.measured += 1
        if machine.measured < MEASURED:
            self._request_clock(machine)
            return
        shift_ns = max(node.clock_ns or 0, 0)
        if node.shift_s is None:
            node.shift_s = round(shift_ns / SECOND)
        elif abs(shift_ns / SECOND - node.shift_s) > AHEAD_S / 2:
            self._close_link(
                machine, "it or this machine was suspended, so its times moved: attach again", for_good=True
            )
            return
        request = {
            "ask": "begin", "offset": node.received, "tallied_s": node.tallied_s, "output_at": machine.output_at,
            "shift_ns": shift_ns, "shift_s": node.shift_s, "sparse": len(self.machines) > MOST_WHOLE,
        }  # fmt: skip
        self.links.send(node.number, json.dumps(request))
        self._requests.resend_subscription(node.number)

    def _handle_message(self, machine: NodeConnection, message: Mapping[str, Any]) -> None:
        if isinstance(message.get("standing"), dict):
            machine.standing = message
        elif message.get("answer") == machine.asked[0] and (there := int_member(message, "now_ns")) is not None:
            if abs(there) < 1 << 60 and machine.measured < MEASURED:
                self._handle_clock_reply(machine, there)
        else:
            self._requests.handle_reply(machine.node, message)

    def _handle_chunk(self, machine: NodeConnection, sent: UncheckedChunk) -> None:
        node, beat = machine.node, sent.beat
        begin, offset, tallied = (beat.get(name) for name in ("from", "offset", "tallied_s"))
        if not type(begin) is type(offset) is type(tallied) is int:
            raise ProtocolError("a beat without its offsets")
        if not machine.offset == begin <= offset < 1 << 53 or tallied > self.now_ns() // SECOND + AHEAD_S:
            raise ProtocolError("records that do not follow those before")
        machine.held += sent.size
        if machine.held > MOST_HELD:
            self._close_link(machine, _UNWRITTEN)
            return
        if machine.standing is not None:
            age_ns = int(min(max(number_member(machine.standing, "age_s") or 0.0, 0.0), 1e9) * SECOND)
            self.joint.receive_rank_report(node.number, node.name, machine.standing["standing"], age_ns)
        machine.offset, machine.beat, machine.standing = offset, beat, None
        self._sent.append((machine, sent))
        self._set_node_state(node, "connected", None)
        if isinstance(output := beat.get("output"), str):
            append_output(self.directory, node.name, output)
            machine.output_at = int_member(beat, "output_at")
        if isinstance(beat.get("exit"), dict):  # nothing comes after it; it has ended once this is written
            machine.receiver = None
            self.links.close_link(node.number, "", for_good=True)

    def _should_store_event(self, node: NodeRow, row: tuple[Any, ...]) -> bool:
        """Whether an event goes into the history: no stall that is damaged, and none if the mirror judges the ranks."""
        if row[2] != "stall" or row[1] >= 0:
            return True
        with contextlib.suppress(HistoryError):
            return self.joint.should_store_stall(node.number, event_from_row(row[-1:]).data)
        return False

    def _record_node_exit(self, machine: NodeConnection, how: Mapping[str, Any]) -> None:
        """Note the end of a machine's run."""
        status, seconds = int_member(how, "status"), min(max(number_member(how, "seconds") or 0.0, 0.0), 1e9)
        exited = {
            "status": status if status is not None and 0 <= status <= MAX_STATUS else None, "seconds": seconds,
            "stopped": how.get("stopped") is True, "signal": _text(how, "signal"), "cause": _text(how, "cause"),
        }  # fmt: skip
        machine.node.exit = json.dumps(exited)
        self._set_node_state(machine.node, "ended", None)
        self._close_link(machine, "", for_good=True)

    # ------------------------------------------------------------------------------------------ what is written

    def _commit(self) -> bool:
        """Check and write what has come; return whether that was possible."""
        sent, self._sent = self._sent, []
        chunks = validate_chunks([(machine.node.number, one) for machine, one in sent], self.now_ns())
        for (machine, _), chunk in zip(sent, chunks, strict=True):
            if "events" in chunk.rows:
                kept = [row for row in chunk.rows["events"] if self._should_store_event(machine.node, row)]
                chunk = chunk._replace(rows={**chunk.rows, "events": kept})
            self._chunks.append((machine, chunk))
        for machine, chunk in self._chunks:
            if chunk.damaged > MOST_DAMAGED:
                self._reject_node(machine, f"{chunk.damaged} damaged rows")
        events = self._events[:]
        try:
            self.records.write([(machine.node, chunk) for machine, chunk in self._chunks], events)
        except ChunkError as error:  # the others go on
            self._reject_node(self.machines[error.node.number], str(error))
            return self._commit()
        except HistoryError as error:
            _log(f"the history cannot be written: {error}")
            for machine in self.machines:
                if machine.receiver is not None and machine.held > MOST_WAITING // len(self.machines):
                    self._drop_unwritten(machine)  # it sends them again
                    self._close_link(machine, _UNWRITTEN)
            return False
        ended = [(machine, how) for machine, chunk in self._chunks if isinstance(how := chunk.beat.get("exit"), dict)]
        self._chunks = []
        for machine in self.machines:
            machine.held = 0
        del self._events[: len(events)]
        for machine, how in ended:
            self._record_node_exit(machine, how)
        return not ended or self._commit()  # the second commit writes these ends

    def _reject_node(self, machine: NodeConnection, why: str) -> None:
        """Cut off a machine that sends damaged records; after its end for good, because it would send them again."""
        _log(f"{machine.node.name}: {sanitize_line(why, _MOST_TEXT)}")
        self._drop_unwritten(machine)
        self._close_link(machine, "it sent damaged records", for_good=isinstance(machine.beat.get("exit"), dict))

    def _write_metrics(self, now: float) -> None:
        if self._metrics is None and self.info.command and self._metrics_file is not None:
            path = metrics_path(self._metrics_file, self.info)
            self._metrics = PrometheusFile(
                path, self.directory, lambda text: self.emit("warning", {"process": None, "text": text})
            )
        if self._metrics is not None:
            self._metrics.poll(now)

    def _write_state_file(self) -> None:
        """Write what readers want to know of the processes."""
        live = [machine for machine in self.machines if machine.beat]
        doing = {
            number: pair
            for machine in live
            for process, pair in parse_activities(machine.beat.get("doing")).items()
            if (number := self.records.local_process_number(machine.node.number, process)) is not None
        }
        pauses = [pause for machine in live if isinstance(pause := machine.beat.get("pause"), list) and len(pause) == 3]
        since = [at for *_, at in pauses if type(at) is int]
        waits = [at for machine in live if (at := int_member(machine.beat, "input_ns")) is not None]
        refusals = [text for machine in live if (text := text_member(machine.beat, "refusal")) is not None]
        stages = [stage for machine in live if isinstance(stage := machine.beat.get("stage"), list)]
        state = {
            "doing": activities_by_word(doing),
            "connected": [machine.node.number for machine in self.machines if machine.node.state == "connected"],
            "refused": any(machine.node.state == "refused" for machine in self.machines),
            "ended": [sum(machine.node.state == "ended" for machine in self.machines), len(self.machines)],
            "wanted": any(wanted is True for wanted, _, _ in pauses),
            "pausing": any(pending is True for _, pending, _ in pauses),
            "paused_ns": max(since) if len(since) == len(live) > 0 else None,
            "pending": any(machine.beat.get("pending") is True for machine in live),
            "refusal": min(map(sanitize_line, refusals)) if len(refusals) == len(live) > 0 else None,
            "input_ns": min(waits, default=None),
            "stage": next((sanitize_line(str(stage[0]))[:200] for stage in stages[:1]), None),
            "stage_ns": next((stage[1] for stage in stages[:1] if len(stage) > 1 and type(stage[1]) is int), None),
            **self._requests.state,
        }
        with contextlib.suppress(OSError):
            write_atomically(self.directory / STATE_FILE, json.dumps(state))

    def _record_run_exit(self) -> None:
        """Write how the run has ended: like the first machine that failed, else was stopped, else has no known end."""
        for machine in self.machines:
            if machine.node.state == "connecting":
                self._set_node_state(machine.node, "refused", machine.node.why)
        known = [machine.node for machine in self.machines if not machine.sought]
        ends = [(json.loads(node.exit or "{}"), node) for node in known]
        failed = sorted((end for end in ends if end[0].get("status")), key=lambda end: end[0].get("stopped") is True)
        how, node = [*failed, *(end for end in ends if end[0].get("status") is None), *ends][0]
        why = f": {node.why}" if node.why else ""
        unknown = f"how it ended on {node.name} is unknown{why}" if how.get("status") is None else None
        seconds, cause = self.now_ns() / SECOND, how.get("cause")
        end = ExitInfo(
            status=how.get("status"), signal=how.get("signal"), ended_unix=time.time(), end_ns=time.monotonic_ns(),
            seconds=seconds, by="mirror", unknown=unknown, cause=None if cause is None else f"{node.name}: {cause}",
        )  # fmt: skip
        if how.get("stopped"):
            record_stop_request(self.directory)
        self.emit("exit", {"status": end.status, "signal": end.signal, "t_s": seconds})
        with contextlib.suppress(OSError):
            write_info(self.directory, end)


def _text(sent: Mapping[str, Any], key: str) -> str | None:
    """A text that a machine has sent, safe to show and short; None if there is none."""
    text = text_member(sent, key)
    return None if text is None else sanitize_line(text, _MOST_TEXT)


def _log(text: str) -> None:
    with contextlib.suppress(OSError):
        if os.fstat(2).st_size < MOST_LOG:
            os.write(2, f"{time.strftime('%F %T')} {text}\n".encode("utf-8", "replace"))


def main(directory_text: str, _: str) -> None:
    """Mirror the run in a directory until its end, if no other process does."""
    directory = Path(directory_text)
    lock = take_lock(directory)
    info = load_info(directory)
    if lock is None or info.boot_id != proc.boot_id() or not needs_supervisor(directory, info, load_exit(directory)):
        return
    # The commands come from the user's command line, never from the directory, which may come from another person.
    commands = [json.loads(os.environ.pop(f"{NODE_COMMAND_PREFIX}{number}")) for number in range(len(info.nodes))]
    if [name for name, *_ in commands] != list(info.nodes):
        return
    keep_child_statuses()
    gc.set_threshold(FEW_COLLECTIONS)
    os.chdir("/")
    os.umask(0o077)
    info = replace(info, supervisor_pid=os.getpid(), supervisor_started=proc.start_time_s(os.getpid()))
    try:
        write_info(directory, info)
        Mirror(directory, info, commands, os.environ.get("DPMON_METRICS") or None).run()
    except (HistoryError, OSError) as error:
        _log(f"the mirror ends: {error}")
    except Exception:
        _log(traceback.format_exc())
        raise
