"""The background process of a run on several nodes: it writes the records of their supervisors into one history.

It is started like a supervisor, and run.json lists it as one. It has no command of the user. For each node, it runs a
command (dpmon.mirror.node_links) that prints the rows of the history there and handles requests.
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
from dataclasses import dataclass, field, replace
from itertools import chain, compress, count
from pathlib import Path
from typing import Any

import dpmon
from dpmon.errors import DpmonError, HistoryError
from dpmon.mirror.chunk_receiver import (
    AHEAD_S,
    Chunk,
    ChunkReceiver,
    ProtocolError,
    RowLine,
)
from dpmon.mirror.cross_node_stalls import CrossNodeStallDetector
from dpmon.mirror.mirror_history import ChunkError, MirrorHistory
from dpmon.mirror.mirror_run import append_output, stream_command
from dpmon.mirror.node_links import LineReceived, LinkClosed, LinkOpened, NodeLinks
from dpmon.mirror.request_relay import RequestRelay
from dpmon.record.safe_json import int_member, number_member, text_member
from dpmon.record.schema import SECOND
from dpmon.run import proc
from dpmon.run.lifecycle import needs_supervisor, take_lock
from dpmon.run.mirror_state import STATE_FILE, activities_by_word, parse_activities
from dpmon.run.run_directory import (
    ID,
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
from dpmon.store.events import parse_event
from dpmon.store.node_table import NodeRow
from dpmon.store.ring_drain import RETRY_S
from dpmon.store.row_exchange import CHUNK_BYTES
from dpmon.supervise.prometheus_file import PrometheusFile, metrics_path
from dpmon.supervise.stall_watch import StallRecorder
from dpmon.supervise.start_supervisor import (
    COLLECTION_THRESHOLD,
    NODE_COMMAND_PREFIX,
    keep_child_statuses,
    lost_settings,
)

COMMIT_S, POLL_S, PAUSE_S = 0.5, 0.2, 0.1
CLOCK_REPLIES = 3
"""Clock requests sent before streaming begins; the one with the shortest round trip counts."""
MAX_NODE_BACKLOG_BYTES = 2 * CHUNK_BYTES
"""How much of a node's data may wait while the history cannot be written. A node that sends more is disconnected."""
MAX_BACKLOG_BYTES = 4 * MAX_NODE_BACKLOG_BYTES
"""How much data of all nodes may wait after a failed write. Each node may have an equal part of it."""
MAX_NODES_IN_FULL = 16
"""With more nodes, each sends only some device samples and calls, and no time buckets of one second."""
_UNWRITTEN = "its records cannot be written here"
_MAX_TEXT_CHARS, MAX_LOG_BYTES = 1000, 1 << 20
"""Largest length of a text that a node has sent, and largest size of the log: a node may cause any number of lines."""


@dataclass
class NodeConnection:
    """The state of the connection to one node, in addition to the node's row in the history."""

    node: NodeRow
    is_run_unknown: bool = False
    """Whether `attach` failed to reach the node. Until it replies, only its job is known, not its run."""
    receiver: ChunkReceiver | None = None
    """None after this process has closed a connection, until the next one opens. Late lines are ignored."""
    clock_request: tuple[int, int] = (0, 0)
    """Number of the last clock request, and when it was sent (ns of the run)."""
    clock_replies: int = 0
    """How many clock requests the node has answered on this connection."""
    last_received_id: int = 0
    """The last id that the node has sent."""
    unwritten_bytes: int = 0
    """How much the node has sent that is not written yet."""
    output_at: int | None = None
    """Offset in the node's output up to which it was received; None if nothing was received yet."""
    beat: Mapping[str, Any] = field(default_factory=dict)
    """The last beat; empty while disconnected."""
    rank_report: Mapping[str, Any] | None = None
    """The newest message with the activities of the node's ranks that was not passed on; None if there is none."""

    @property
    def is_over(self) -> bool:
        """Whether no more records are expected. A node that was never reached may not belong to the job."""
        return self.node.state in ("ended", "refused") or (self.is_run_unknown and self.node.why is not None)


class Mirror(StallRecorder):
    """The mirror of one run."""

    def __init__(
        self, directory: Path, run_info: RunInfo, commands: Sequence[list[str]], metrics_file: str | None = None
    ) -> None:
        """`commands`: for each node, its name, its run or job, and the words that run dpmon there.

        `metrics_file`: the path of the metrics file.
        """
        self.directory, self.info = directory, run_info
        self.history = MirrorHistory(directory, run_info)
        is_job_only = [run.startswith(JOB) for _, run, *_ in commands]
        nodes = self.history.nodes
        self.peers = [NodeConnection(node, is_job_only[node.number] and node.run is None) for node in nodes]
        self.links = NodeLinks(
            len(commands), lambda number: stream_command(commands[number], self.history.nodes[number].run)
        )
        self.stall_detector = CrossNodeStallDetector(
            directory, run_info, self, len(commands), self.history.local_process_number
        )
        self._requests = RequestRelay(self)
        self._chunks: list[tuple[NodeConnection, Chunk]] = []
        """Chunks that are not written yet."""
        self._events: list[tuple[str, Mapping[str, Any]]] = []
        self._metrics_file = metrics_file
        self._ids = count(1)
        self._should_leave = False
        for peer in self.peers:
            if peer.node.state == "ended":
                self.links.close_link(peer.node.number, "", for_good=True)
            else:
                peer.node.state, peer.node.why, peer.node.since_ns = "connecting", None, self.now_ns()
        for text in lost_settings(run_info, has_event_command=False, has_metrics=metrics_file is not None):
            self._warn(text)

    def now_ns(self) -> int:
        """Return the current time of the run (ns)."""
        return time.monotonic_ns() - self.info.start_ns

    # ------------------------------------------------------------------------------------------ the record of stalls

    def emit(self, kind: str, data: Mapping[str, Any]) -> None:
        """Record an event of the mirror, from any thread."""
        self._events.append((kind, {"t_s": self.now_ns() / 1e9, **data}))

    def _warn(self, text: str) -> None:
        self.emit("warning", {"process": None, "text": text})

    def last_stall(self) -> Mapping[str, Any] | None:
        """Return the data of the last record of a stall of ranks on several nodes; None if there is none."""
        return self.history.last_stall()

    # ------------------------------------------------------------------------------------------ the loop

    def run(self) -> None:
        """Write records until all nodes' runs have ended, the directory is deleted, or a signal arrives."""
        for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            signal.signal(signal_number, lambda *_: setattr(self, "_should_leave", True))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        commit_at = state_at = 0.0
        is_over, metrics = False, None
        while not (is_over or self._should_leave) and self.directory.is_dir():
            now_s = time.monotonic()  # before the reports, so that a reply in time is handled before its wait ends
            for report in self.links.poll(POLL_S):
                self._handle_report(report)
            if len(self.peers) > MAX_NODES_IN_FULL:
                time.sleep(PAUSE_S)  # otherwise, each node's beat would wake this process
            self._requests.poll(now_s)
            self.stall_detector.poll()
            is_over = all(peer.is_over for peer in self.peers)
            written = now_s >= commit_at and self._commit()
            if now_s >= commit_at:
                commit_at = now_s + (COMMIT_S if written else RETRY_S)
            is_over = is_over and written
            if is_over or now_s >= state_at:
                state_at = now_s + 1.0
                self._write_state_file()
            if metrics is None and self.info.command and self._metrics_file is not None:  # a node has described the run
                metrics = PrometheusFile(metrics_path(self._metrics_file, self.info), self.directory, self._warn)
                metrics.start()
        self.links.close_all()
        self.stall_detector.close()
        if is_over:
            self._record_run_exit()
        self._commit()
        if metrics is not None:
            metrics.stop()
            if (exit_info := load_exit(self.directory)) is not None:
                metrics.write(exit_info)
        self.history.close()

    def _set_node_state(self, node: NodeRow, state: str, reason: str | None) -> None:
        """Set the state of a node, and since when it is so."""
        if node.state != state:
            node.since_ns = self.now_ns()
        node.state, node.why = state, reason

    def _handle_report(self, report: LinkOpened | LineReceived | LinkClosed) -> None:
        peer = self.peers[report.node]
        node = peer.node
        try:
            if isinstance(report, LinkOpened):
                self._handle_header(peer, report.header)
            elif isinstance(report, LinkClosed):
                self._handle_disconnect(peer, report)
            elif peer.receiver is not None:
                node.heard_ns = self.now_ns()
                message = peer.receiver.add_line(report.text, node.heard_ns)
                if isinstance(message, Chunk):
                    self._handle_chunk(peer, message)
                elif message is not None:
                    self._handle_message(peer, message)
        except ProtocolError as error:
            self._close_link(peer, str(error))
        except (DpmonError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            self._close_link(peer, f"it sent invalid data: {sanitize_line(str(error))}")

    def _handle_header(self, peer: NodeConnection, header: Mapping[str, Any]) -> None:
        node = peer.node
        peer.receiver, peer.clock_replies = ChunkReceiver(self.info.origin_s), 0
        peer.last_received_id = node.received
        self._drop_unwritten(peer)  # the node sends them again
        run, version, script, cwd = (_text(header, key) or "" for key in ("run", "version", "script", "cwd"))
        if peer.is_run_unknown and not ID.fullmatch(run):
            raise ProtocolError("it has not named its run")
        origin_s = int_member(header, "origin_s")
        if version == dpmon.__version__ and (origin_s is None or not 0 <= origin_s < 1 << 40):
            raise ProtocolError("it has not said when its run began")
        if version != dpmon.__version__:
            reason = f"its dpmon is of another version ({version}; here {dpmon.__version__})"
            self._close_link(peer, reason, for_good=True)
            return
        node.run, node.origin_s, peer.is_run_unknown = run, origin_s, False
        words = header.get("command")
        if not self.info.command and isinstance(words, list):  # the first node describes the run
            command = tuple(sanitize_line(word, _MAX_TEXT_CHARS) for word in words[:100])
            run_info = replace(self.info, command=command, script=script, cwd=cwd, versions={"dpmon": version})
            self.info = self.stall_detector.info = run_info
            with contextlib.suppress(OSError):
                write_info(self.directory, self.info)
        self._request_clock(peer)

    def _close_link(self, peer: NodeConnection, reason: str, *, for_good: bool = False) -> None:
        """Close the connection. Unless `for_good`, it is opened again later."""
        peer.receiver = None
        self._handle_disconnect(peer, self.links.close_link(peer.node.number, reason, for_good=for_good))

    def _drop_unwritten(self, peer: NodeConnection) -> None:
        """Drop the node's records that are not written yet."""
        peer.unwritten_bytes = 0
        self._chunks = [(sender, chunk) for sender, chunk in self._chunks if sender is not peer]

    def _handle_disconnect(self, peer: NodeConnection, report: LinkClosed) -> None:
        if peer.node.state != "ended":
            lost_state = "connecting" if peer.is_run_unknown else "cut"
            state = "refused" if report.for_good else lost_state
            self._set_node_state(peer.node, state, report.why or None)
            self.stall_detector.drop_node(peer.node.number)
            peer.beat = {}
        peer.rank_report = None
        self._requests.drop_node(peer.node.number)

    # ------------------------------------------------------------------------------------------ what comes

    def _request_clock(self, peer: NodeConnection) -> None:
        request_id = next(self._ids)
        peer.clock_request = request_id, self.now_ns()
        self.links.send(peer.node.number, json.dumps({"ask": "time", "id": request_id}))

    def _handle_clock_reply(self, peer: NodeConnection, node_ns: int) -> None:
        """Estimate a node's clock offset from a request's round trip. Start streaming after CLOCK_REPLIES replies."""
        node, (_, sent_ns) = peer.node, peer.clock_request
        error_ns = (self.now_ns() - sent_ns) // 2
        if peer.clock_replies == 0 or node.clock_error_ns is None or error_ns < node.clock_error_ns:
            node.clock_ns, node.clock_error_ns = sent_ns + error_ns - node_ns, error_ns
        peer.clock_replies += 1
        if peer.clock_replies < CLOCK_REPLIES:
            self._request_clock(peer)
            return
        shift_ns = max(node.clock_ns or 0, 0)
        clock_error_s = self.info.origin_s + shift_ns / SECOND - (node.origin_s or 0)
        if node.shift_s is None:
            node.shift_s = round(clock_error_s) if abs(clock_error_s) > 1 else 0
        elif abs(clock_error_s - node.shift_s) > AHEAD_S / 2:
            self._close_link(
                peer, "it or this machine was suspended, which shifted its times: attach again", for_good=True
            )
            return
        request = {
            "ask": "begin", "offset": node.received, "seq": node.seq, "tallied_s": node.tallied_s,
            "output_at": peer.output_at, "shift_ns": shift_ns, "shift_s": node.shift_s,
            "sparse": len(self.peers) > MAX_NODES_IN_FULL,
        }  # fmt: skip
        self.links.send(node.number, json.dumps(request))
        self._requests.send_subscription(node.number)

    def _handle_message(self, peer: NodeConnection, message: Mapping[str, Any]) -> None:
        if isinstance(message.get("standing"), dict):
            peer.rank_report = message
            return
        request_id, _ = peer.clock_request
        node_ns = int_member(message, "now_ns")
        if message.get("answer") == request_id and node_ns is not None:
            if abs(node_ns) < 1 << 60 and peer.clock_replies < CLOCK_REPLIES:
                self._handle_clock_reply(peer, node_ns)
        else:
            self._requests.handle_reply(peer.node, message)

    def _handle_chunk(self, peer: NodeConnection, chunk: Chunk) -> None:
        node, beat = peer.node, chunk.beat
        first_offset, offset, seq, tallied_s = (beat.get(name) for name in ("from", "offset", "seq", "tallied_s"))
        if not type(first_offset) is type(offset) is type(seq) is type(tallied_s) is int:
            raise ProtocolError("it sent a beat without its offsets")
        is_next = peer.last_received_id == first_offset <= offset < 1 << 53 and 0 <= seq < 1 << 53
        if not is_next or tallied_s > self.now_ns() // SECOND + self.info.origin_s + AHEAD_S:
            raise ProtocolError("it sent records that do not follow those before")
        peer.unwritten_bytes += chunk.size
        if peer.unwritten_bytes > MAX_NODE_BACKLOG_BYTES:
            self._close_link(peer, _UNWRITTEN)
            return
        if peer.rank_report is not None:
            age_ns = int(min(max(number_member(peer.rank_report, "age_s") or 0.0, 0.0), 1e9) * SECOND)
            self.stall_detector.receive_rank_report(node.number, node.name, peer.rank_report["standing"], age_ns)
        peer.last_received_id, peer.beat, peer.rank_report = offset, beat, None
        lines = [self._without_judged_stalls(node, line) if line.table == "events" else line for line in chunk.lines]
        self._chunks.append((peer, chunk._replace(lines=lines)))
        self._set_node_state(node, "connected", None)
        if isinstance(output := beat.get("output"), str):
            append_output(self.directory, node.name, output)
            peer.output_at = int_member(beat, "output_at")
        if isinstance(beat.get("exit"), dict):  # the last chunk; the node has ended when it is written
            peer.receiver = None
            self.links.close_link(node.number, "", for_good=True)

    def _without_judged_stalls(self, node: NodeRow, line: RowLine) -> RowLine:
        """Return events without the stalls of ranks that the mirror judges."""
        events = map(parse_event, line.column("json"))
        should_store = self.stall_detector.should_store_stall
        stored = [event.kind != "stall" or should_store(node.number, event.data) for event in events]
        return line._replace(rows=list(compress(line.rows, stored)))

    def _record_node_exit(self, peer: NodeConnection, exit_members: Mapping[str, Any]) -> None:
        """Record how a node's run has ended."""
        status = int_member(exit_members, "status")
        is_status = status is not None and 0 <= status <= 255
        seconds = min(max(number_member(exit_members, "seconds") or 0.0, 0.0), 1e9)
        exit_data = {
            "status": status if is_status else None, "seconds": seconds, "stopped": exit_members.get("stopped") is True,
            "signal": _text(exit_members, "signal"), "cause": _text(exit_members, "cause"),
        }  # fmt: skip
        peer.node.exit = json.dumps(exit_data)
        self._set_node_state(peer.node, "ended", None)
        self._close_link(peer, "", for_good=True)

    # ------------------------------------------------------------------------------------------ what is written

    def _commit(self) -> bool:
        """Write the received chunks. Return whether they were written."""
        events = self._events[:]
        try:
            self.history.write([(peer.node, chunk) for peer, chunk in self._chunks], events)
        except ChunkError as error:  # the other nodes' chunks are written
            self._reject_node(self.peers[error.node.number], str(error))
            return self._commit()
        except HistoryError as error:
            _log(f"the history cannot be written: {error}")
            for peer in self.peers:
                if peer.receiver is not None and peer.unwritten_bytes > MAX_BACKLOG_BYTES // len(self.peers):
                    self._drop_unwritten(peer)  # the node sends them again
                    self._close_link(peer, _UNWRITTEN)
            return False
        exits = [(peer, data) for peer, chunk in self._chunks if isinstance(data := chunk.beat.get("exit"), dict)]
        self._chunks = []
        for peer in self.peers:
            peer.unwritten_bytes = 0
        del self._events[: len(events)]
        for peer, exit_members in exits:
            self._record_node_exit(peer, exit_members)
        return not exits or self._commit()  # the second commit writes these ends

    def _reject_node(self, peer: NodeConnection, reason: str) -> None:
        """Disconnect a node that sends damaged records. If it has ended, for good, because it would send them again."""
        _log(f"{peer.node.name}: {sanitize_line(reason, _MAX_TEXT_CHARS)}")
        self._drop_unwritten(peer)
        self._close_link(peer, "it sent damaged records", for_good=isinstance(peer.beat.get("exit"), dict))

    def _write_state_file(self) -> None:
        """Write the state file that readers poll: activities, pauses, pending requests."""
        live = [peer for peer in self.peers if peer.beat]
        activities = {
            self.history.local_process_number(peer.node.number, process): activity
            for peer in live
            for process, activity in parse_activities(peer.beat.get("doing")).items()
        }
        pauses = [pause for peer in live if isinstance(pause := peer.beat.get("pause"), list) and len(pause) == 3]
        pause_starts = [time_ns for *_, time_ns in pauses if type(time_ns) is int]
        input_starts = [time_ns for peer in live if (time_ns := int_member(peer.beat, "input_ns")) is not None]
        refusals = [text for peer in live if (text := text_member(peer.beat, "refusal")) is not None]
        stages = [stage for peer in live if isinstance(stage := peer.beat.get("stage"), list) and len(stage) >= 2]
        stage_name, stage_start_ns = stages[0][:2] if stages else (None, None)
        state = {
            "doing": activities_by_word(activities),
            "connected": [peer.node.number for peer in self.peers if peer.node.state == "connected"],
            "refused": any(peer.node.state == "refused" for peer in self.peers),
            "ended": [sum(peer.node.state == "ended" for peer in self.peers), len(self.peers)],
            "wanted": any(wanted is True for wanted, _, _ in pauses),
            "pausing": any(pending is True for _, pending, _ in pauses),
            "paused_ns": max(pause_starts) if len(pause_starts) == len(live) > 0 else None,
            "pending": any(peer.beat.get("pending") is True for peer in live),
            "refusal": min(map(sanitize_line, refusals)) if len(refusals) == len(live) > 0 else None,
            "input_ns": min(input_starts, default=None),
            "stage": None if stage_name is None else sanitize_line(str(stage_name))[:200],
            "stage_ns": stage_start_ns if type(stage_start_ns) is int else None,
            **self._requests.state,
        }
        with contextlib.suppress(OSError):
            write_atomically(self.directory / STATE_FILE, json.dumps(state))

    def _record_run_exit(self) -> None:
        """Record how the run ended.

        It ends like the first of its nodes that failed; if there is none, like one that was stopped, like one with an
        unknown end, or like the first node.
        """
        for peer in self.peers:
            if peer.node.state == "connecting":
                self._set_node_state(peer.node, "refused", peer.node.why)
        nodes = [peer.node for peer in self.peers if not peer.is_run_unknown]
        exits = [(json.loads(node.exit or "{}"), node) for node in nodes]
        failed = [(data, node) for data, node in exits if data.get("status")]
        failed.sort(key=lambda data_and_node: data_and_node[0].get("stopped") is True)
        unknown_exits = [(data, node) for data, node in exits if data.get("status") is None]
        exit_data, node = next(chain(failed, unknown_exits, exits))
        reason = f": {node.why}" if node.why else ""
        unknown = f"how it ended on {node.name} is unknown{reason}" if exit_data.get("status") is None else None
        elapsed_s, cause = self.now_ns() / SECOND, exit_data.get("cause")
        if cause is not None:
            cause = f"{node.name}: {cause}"
        run_exit = ExitInfo(
            status=exit_data.get("status"), signal=exit_data.get("signal"), ended_unix=time.time(),
            end_ns=time.monotonic_ns(), seconds=elapsed_s, by="mirror", unknown=unknown, cause=cause,
        )  # fmt: skip
        if exit_data.get("stopped"):
            record_stop_request(self.directory)
        self.emit("exit", {"status": run_exit.status, "signal": run_exit.signal, "t_s": elapsed_s})
        with contextlib.suppress(OSError):
            write_info(self.directory, run_exit)


def _text(message: Mapping[str, Any], key: str) -> str | None:
    """Return a text that a node has sent, safe to show and shortened; None if there is none."""
    text = text_member(message, key)
    return None if text is None else sanitize_line(text, _MAX_TEXT_CHARS)


def _log(text: str) -> None:
    with contextlib.suppress(OSError):
        if os.fstat(2).st_size < MAX_LOG_BYTES:
            os.write(2, f"{time.strftime('%F %T')} {text}\n".encode("utf-8", "replace"))


def main(directory_text: str, _: str) -> None:
    """Mirror the run in a directory until its end. Return at once if another process does it."""
    directory = Path(directory_text)
    lock = take_lock(directory)
    run_info = load_info(directory)
    if lock is None or run_info.boot_id != proc.boot_id():
        return
    if not needs_supervisor(directory, run_info, load_exit(directory)):
        return
    # The commands come from the user's command line, never from the directory, which may come from another person.
    commands = [json.loads(os.environ.pop(f"{NODE_COMMAND_PREFIX}{node}")) for node in range(len(run_info.nodes))]
    if [name for name, *_ in commands] != list(run_info.nodes):
        return
    keep_child_statuses()
    gc.set_threshold(COLLECTION_THRESHOLD)
    os.chdir("/")
    os.umask(0o077)
    run_info = replace(run_info, supervisor_pid=os.getpid(), supervisor_started=proc.start_time_s(os.getpid()))
    try:
        write_info(directory, run_info)
        Mirror(directory, run_info, commands, os.environ.get("DPMON_METRICS") or None).run()
    except (HistoryError, OSError) as error:
        _log(f"the mirror ends: {error}")
    except Exception:
        _log(traceback.format_exc())
        raise
