"""The background process of a run on several machines: it writes what their supervisors record into one history.

It is started like a supervisor, and named as one in run.json. It has no command: it runs one for each machine
(dpmon.mirror.links) that prints the rows of the history there, and takes requests.
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
from dpmon.cleaning import clean
from dpmon.errors import DpmonError, HistoryError
from dpmon.mirror.followed import Followed
from dpmon.mirror.joint_stalls import JointStalls
from dpmon.mirror.links import Closed, Links, Opened, Received
from dpmon.mirror.local_run import append_output, command_of
from dpmon.mirror.receive import AHEAD_S, MOST_DAMAGED, Chunk, Receiver, RubbishError, Unchecked, checked
from dpmon.mirror.records import ChunkError, Records
from dpmon.mirror.requests import Requests
from dpmon.record.plainjson import number_in, text_in, whole_in
from dpmon.record.schema import SECOND
from dpmon.run import proc
from dpmon.run.condition import needs_supervisor, take_lock
from dpmon.run.files import write_whole
from dpmon.run.mirrored import STATE_FILE, by_word, doing_in
from dpmon.run.rundir import ID, MAX_STATUS, ExitInfo, RunInfo, load_exit, load_info, mark_stop, save
from dpmon.run.runs import JOB
from dpmon.store.answers import NodeRow, event_in
from dpmon.store.drain import RETRY_S
from dpmon.store.exchange import CHUNK_BYTES
from dpmon.supervise.metrics import Metrics, metrics_path
from dpmon.supervise.stall_watch import Record
from dpmon.supervise.start import MACHINE, keep_statuses, lost_settings

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


class Mirror(Record):
    """The mirror of one run."""

    def __init__(
        self, directory: Path, info: RunInfo, commands: Sequence[list[str]], metrics: str | None = None
    ) -> None:
        """`commands`: for each machine, its name, its run or job, and the words that run dpmon there.

        `metrics`: the path of the metrics file.
        """
        self.directory, self.info = directory, info
        self.records = Records(directory, info)
        sought = [run.startswith(JOB) for _, run, *_ in commands]
        self.machines = [Followed(node, sought[node.number] and node.run is None) for node in self.records.nodes]
        self.links = Links(len(commands), lambda number: command_of(commands[number], self.records.nodes[number].run))
        self.joint = JointStalls(directory, info, self, len(commands), self.records.number)
        self._requests = Requests(self)
        self._sent: list[tuple[Followed, Unchecked]] = []
        """What has come since the last commit."""
        self._chunks: list[tuple[Followed, Chunk]] = []
        """Checked chunks that are not written."""
        self._events: list[tuple[str, Mapping[str, Any]]] = []
        self._last_stall: Mapping[str, Any] | None = None
        self._metrics_file = metrics
        self._metrics: Metrics | None = None
        """The writer of the metrics file; None until a machine has sent the facts of the run."""
        self._ids = count(1)
        self._leave = False
        for machine in self.machines:
            if machine.node.state == "ended":
                self.links.end(machine.node.number, "", for_good=True)
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
                self._take(report)
            if len(self.machines) > MOST_WHOLE:
                time.sleep(REST_S)  # else each machine's beat would wake this process
            self._requests.look(now)
            self.joint.look()
            over = all(machine.over for machine in self.machines)
            written = now >= commit_at and self._commit()
            if now >= commit_at:
                commit_at = now + (COMMIT_S if written else RETRY_S)
            over = over and written
            if over or now >= state_at:
                state_at = now + 1.0
                self._save_state()
            self._write_metrics(now)
        self.links.close()
        self.joint.close()
        if over:
            self._finish()
        self._commit()
        if self._metrics is not None:
            self._metrics.wait()
            if (how := load_exit(self.directory)) is not None:
                self._metrics.end(how)
        self.records.close()

    def _turn(self, node: NodeRow, state: str, why: str | None) -> None:
        """Note the state of a machine."""
        if node.state != state:
            node.since_ns = self.now_ns()
        node.state, node.why = state, why

    def _take(self, report: Opened | Received | Closed) -> None:
        machine = self.machines[report.node]
        node = machine.node
        try:
            if isinstance(report, Opened):
                self._open(machine, report.marker)
            elif isinstance(report, Closed):
                self._close(machine, report)
            elif machine.receiver is not None:
                node.heard_ns = self.now_ns()
                found = machine.receiver.take(report.text)
                if isinstance(found, Unchecked):
                    self._take_chunk(machine, found)
                elif found is not None:
                    self._take_message(machine, found)
        except (DpmonError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            self._end_link(machine, f"it sent rubbish: {clean(str(error))}")

    def _open(self, machine: Followed, marker: Mapping[str, Any]) -> None:
        node = machine.node
        machine.receiver, machine.measured, machine.offset = Receiver(), 0, node.received
        self._forget(machine)  # it sends again what is not written
        host, run, version, script, cwd = (
            _text(marker, key) or "" for key in ("host", "run", "version", "script", "cwd")
        )
        if machine.sought and not ID.fullmatch(run):
            raise RubbishError("it has not named its run")
        if version not in (dpmon.__version__, node.version):
            text = f"{node.name} has dpmon {version}, this machine {dpmon.__version__}: only what both know is read"
            self.emit("warning", {"process": None, "text": text})
        node.host, node.run, node.version, machine.sought = host, run, version, False
        words = marker.get("command")
        if not self.info.command and isinstance(words, list):  # what the run is, as the first machine says
            command = tuple(clean(word, _MOST_TEXT) for word in words[:100])
            info = replace(self.info, command=command, script=script, cwd=cwd, versions={"dpmon": version})
            self.info = self.joint.info = info
            with contextlib.suppress(OSError):
                save(self.directory, self.info)
        self._ask_time(machine)

    def _end_link(self, machine: Followed, why: str, *, for_good: bool = False) -> None:
        """End the connection; unless `for_good`, it is opened again later."""
        machine.receiver = None
        self._close(machine, self.links.end(machine.node.number, why, for_good=for_good))

    def _forget(self, machine: Followed) -> None:
        """Forget the records that are not written."""
        machine.held = 0
        self._sent = [one for one in self._sent if one[0] is not machine]
        self._chunks = [one for one in self._chunks if one[0] is not machine]

    def _close(self, machine: Followed, report: Closed) -> None:
        if machine.node.state != "ended":
            state = "refused" if report.for_good else "connecting" if machine.sought else "cut"
            self._turn(machine.node, state, report.why or None)
            self.joint.lose(machine.node.number)
            machine.beat = {}
        machine.standing = None
        self._requests.lose(machine.node.number)

    # ------------------------------------------------------------------------------------------ what comes

    def _ask_time(self, machine: Followed) -> None:
        machine.asked = next(self._ids), self.now_ns()
        self.links.send(machine.node.number, json.dumps({"ask": "time", "id": machine.asked[0]}))

    def _take_time(self, machine: Followed, there_ns: int) -> None:
        """Take the time of a machine, between question and answer. After some of them, begin."""
        node, sent = machine.node, machine.asked[1]
        error = (self.now_ns() - sent) // 2
        if machine.measured == 0 or node.clock_error_ns is None or error < node.clock_error_ns:
            node.clock_ns, node.clock_error_ns = sent + error - there_ns, error
        machine.measured += 1
        if machine.measured < MEASURED:
            self._ask_time(machine)
            return
        shift_ns = max(node.clock_ns or 0, 0)
        if node.shift_s is None:
            node.shift_s = round(shift_ns / SECOND)
        elif abs(shift_ns / SECOND - node.shift_s) > AHEAD_S / 2:
            self._end_link(machine, "it or this machine was suspended, so its times moved: attach again", for_good=True)
            return
        request = {
            "ask": "begin", "offset": node.received, "tallied_s": node.tallied_s, "output_at": machine.output_at,
            "shift_ns": shift_ns, "shift_s": node.shift_s, "sparse": len(self.machines) > MOST_WHOLE,
        }  # fmt: skip
        self.links.send(node.number, json.dumps(request))
        self._requests.renew(node.number)

    def _take_message(self, machine: Followed, message: Mapping[str, Any]) -> None:
        if isinstance(message.get("standing"), dict):
            machine.standing = message
        elif message.get("answer") == machine.asked[0] and (there := whole_in(message, "now_ns")) is not None:
            if abs(there) < 1 << 60 and machine.measured < MEASURED:
                self._take_time(machine, there)
        else:
            self._requests.take(machine.node, message)

    def _take_chunk(self, machine: Followed, sent: Unchecked) -> None:
        node, beat = machine.node, sent.beat
        begin, offset, tallied = (beat.get(name) for name in ("from", "offset", "tallied_s"))
        if not type(begin) is type(offset) is type(tallied) is int:
            raise RubbishError("a beat without its offsets")
        if not machine.offset == begin <= offset < 1 << 53 or tallied > self.now_ns() // SECOND + AHEAD_S:
            raise RubbishError("records that do not follow those before")
        machine.held += sent.size
        if machine.held > MOST_HELD:
            self._end_link(machine, _UNWRITTEN)
            return
        if machine.standing is not None:
            age_ns = int(min(max(number_in(machine.standing, "age_s") or 0.0, 0.0), 1e9) * SECOND)
            self.joint.hear(node.number, node.name, machine.standing["standing"], age_ns)
        machine.offset, machine.beat, machine.standing = offset, beat, None
        self._sent.append((machine, sent))
        self._turn(node, "connected", None)
        if isinstance(output := beat.get("output"), str):
            append_output(self.directory, node.name, output)
            machine.output_at = whole_in(beat, "output_at")
        if isinstance(beat.get("exit"), dict):  # nothing comes after it; it has ended once this is written
            machine.receiver = None
            self.links.end(node.number, "", for_good=True)

    def _keeps(self, node: NodeRow, row: tuple[Any, ...]) -> bool:
        """Whether an event goes into the history: no stall that is damaged, and none if the mirror judges the ranks."""
        if row[2] != "stall" or row[1] >= 0:
            return True
        with contextlib.suppress(HistoryError):
            return self.joint.keeps(node.number, event_in(row[-1:]).data)
        return False

    def _end(self, machine: Followed, how: Mapping[str, Any]) -> None:
        """Note the end of a machine's run."""
        status, seconds = whole_in(how, "status"), min(max(number_in(how, "seconds") or 0.0, 0.0), 1e9)
        exited = {
            "status": status if status is not None and 0 <= status <= MAX_STATUS else None, "seconds": seconds,
            "stopped": how.get("stopped") is True, "signal": _text(how, "signal"), "cause": _text(how, "cause"),
        }  # fmt: skip
        machine.node.exit = json.dumps(exited)
        self._turn(machine.node, "ended", None)
        self._end_link(machine, "", for_good=True)

    # ------------------------------------------------------------------------------------------ what is written

    def _commit(self) -> bool:
        """Check and write what has come; return whether that was possible."""
        sent, self._sent = self._sent, []
        chunks = checked([(machine.node.number, one) for machine, one in sent], self.now_ns())
        for (machine, _), chunk in zip(sent, chunks, strict=True):
            if "events" in chunk.rows:
                kept = [row for row in chunk.rows["events"] if self._keeps(machine.node, row)]
                chunk = chunk._replace(rows={**chunk.rows, "events": kept})
            self._chunks.append((machine, chunk))
        for machine, chunk in self._chunks:
            if chunk.damaged > MOST_DAMAGED:
                self._refuse(machine, f"{chunk.damaged} damaged rows")
        events = self._events[:]
        try:
            self.records.write([(machine.node, chunk) for machine, chunk in self._chunks], events)
        except ChunkError as error:  # the others go on
            self._refuse(self.machines[error.node.number], str(error))
            return self._commit()
        except HistoryError as error:
            _log(f"the history cannot be written: {error}")
            for machine in self.machines:
                if machine.receiver is not None and machine.held > MOST_WAITING // len(self.machines):
                    self._forget(machine)  # it sends them again
                    self._end_link(machine, _UNWRITTEN)
            return False
        ended = [(machine, how) for machine, chunk in self._chunks if isinstance(how := chunk.beat.get("exit"), dict)]
        self._chunks = []
        for machine in self.machines:
            machine.held = 0
        del self._events[: len(events)]
        for machine, how in ended:
            self._end(machine, how)
        return not ended or self._commit()  # the second commit writes these ends

    def _refuse(self, machine: Followed, why: str) -> None:
        """Cut off a machine that sends damaged records; after its end for good, because it would send them again."""
        _log(f"{machine.node.name}: {clean(why, _MOST_TEXT)}")
        self._forget(machine)
        self._end_link(machine, "it sent damaged records", for_good=isinstance(machine.beat.get("exit"), dict))

    def _write_metrics(self, now: float) -> None:
        if self._metrics is None and self.info.command and self._metrics_file is not None:
            path = metrics_path(self._metrics_file, self.info)
            self._metrics = Metrics(
                path, self.directory, lambda text: self.emit("warning", {"process": None, "text": text})
            )
        if self._metrics is not None:
            self._metrics.tick(now)

    def _save_state(self) -> None:
        """Write what readers want to know of the processes."""
        live = [machine for machine in self.machines if machine.beat]
        doing = {
            number: pair
            for machine in live
            for process, pair in doing_in(machine.beat.get("doing")).items()
            if (number := self.records.number(machine.node.number, process)) is not None
        }
        pauses = [pause for machine in live if isinstance(pause := machine.beat.get("pause"), list) and len(pause) == 3]
        since = [at for *_, at in pauses if type(at) is int]
        waits = [at for machine in live if (at := whole_in(machine.beat, "input_ns")) is not None]
        refusals = [text for machine in live if (text := text_in(machine.beat, "refusal")) is not None]
        stages = [stage for machine in live if isinstance(stage := machine.beat.get("stage"), list)]
        state = {
            "doing": by_word(doing),
            "connected": [machine.node.number for machine in self.machines if machine.node.state == "connected"],
            "refused": any(machine.node.state == "refused" for machine in self.machines),
            "ended": [sum(machine.node.state == "ended" for machine in self.machines), len(self.machines)],
            "wanted": any(wanted is True for wanted, _, _ in pauses),
            "pausing": any(pending is True for _, pending, _ in pauses),
            "paused_ns": max(since) if len(since) == len(live) > 0 else None,
            "pending": any(machine.beat.get("pending") is True for machine in live),
            "refusal": min(map(clean, refusals)) if len(refusals) == len(live) > 0 else None,
            "input_ns": min(waits, default=None),
            "stage": next((clean(str(stage[0]))[:200] for stage in stages[:1]), None),
            "stage_ns": next((stage[1] for stage in stages[:1] if len(stage) > 1 and type(stage[1]) is int), None),
            **self._requests.state,
        }
        with contextlib.suppress(OSError):
            write_whole(self.directory / STATE_FILE, json.dumps(state))

    def _finish(self) -> None:
        """Write how the run has ended: like the first machine that failed, else was stopped, else has no known end."""
        for machine in self.machines:
            if machine.node.state == "connecting":
                self._turn(machine.node, "refused", machine.node.why)
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
            mark_stop(self.directory)
        self.emit("exit", {"status": end.status, "signal": end.signal, "t_s": seconds})
        with contextlib.suppress(OSError):
            save(self.directory, end)


def _text(sent: Mapping[str, Any], key: str) -> str | None:
    """A text that a machine has sent, safe to show and short; None if there is none."""
    text = text_in(sent, key)
    return None if text is None else clean(text, _MOST_TEXT)


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
    commands = [json.loads(os.environ.pop(f"{MACHINE}{number}")) for number in range(len(info.nodes))]
    if [name for name, *_ in commands] != list(info.nodes):
        return
    keep_statuses()
    gc.set_threshold(FEW_COLLECTIONS)
    os.chdir("/")
    os.umask(0o077)
    info = replace(info, supervisor_pid=os.getpid(), supervisor_started=proc.started(os.getpid()))
    try:
        save(directory, info)
        Mirror(directory, info, commands, os.environ.get("DPMON_METRICS") or None).run()
    except (HistoryError, OSError) as error:
        _log(f"the mirror ends: {error}")
    except Exception:
        _log(traceback.format_exc())
        raise
