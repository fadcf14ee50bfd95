"""What the screen knows: a reader of the run's directory, folded into the state, and the answers to what was asked."""

from __future__ import annotations

import copy
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from dpmon.model import State, fold
from dpmon.model.past import fold_past
from dpmon.model.ranks import toggle_refusal, training
from dpmon.model.state import SETTLED_MOST
from dpmon.model.turns import ended_of
from dpmon.past import DevicePast, Drawn, Past
from dpmon.record.codec import Record
from dpmon.text.cleaning import clean
from dpmon.text.last_words import last_line_of_traceback
from dpmon.ui.panel_output import Output
from dpmon.ui.scene import Ended, Facts, Pausing, Scene, Toggle, View, at_its_end
from dpmon.ui.tail import Tail

__all__ = ["Feed", "Reader"]

INPUT = "input.fifo"
_GRACE_NS = 3_000_000_000
"""How long a vanished command may be without a recorded exit before the screen says so."""
_SIP_RECORDS = 50
"""So many records are read and folded between two looks at the clock."""
_AT_HEAD_NS = 1_000_000_000
"""Steps this young are of now: there is no age that could be taken for a silence."""
_IDLE = "no process trains now"


class Reader(Protocol):
    """What the screen needs of `dpmon.run.reader.RunReader`."""

    @property
    def info(self) -> Any:
        """The members of run.json."""

    def refresh(self) -> Any:
        """Read run.json again."""

    def past(self) -> Iterator[Past | Drawn | DevicePast | None]:
        """What was before the records that `poll` gives, to be used up before it; None: it takes a while."""

    def of_both(self) -> Iterator[Drawn | None]:
        """Steps of both modes, as many as a report compares; None: there is more to come."""

    def poll(self, most: int | None = None) -> list[Record]:
        """New records: about `most` at most, and none only where there are none just now."""

    @property
    def missed(self) -> int:
        """Records that nobody will read."""

    def stage(self) -> tuple[str, int] | None:
        """Stage before the first batch, and since when."""

    def waits_for_input(self) -> int | None:
        """Since when the command waits for input; None: not, as far as is known."""

    def activities(self) -> Mapping[int, tuple[str, int]]:
        """What each process is in, and since when."""

    def exit(self) -> Any:
        """How the run ended."""

    def command_alive(self) -> bool | None:
        """Whether the command runs."""

    def request_mode(self, mode: str) -> int:
        """Ask for a mode."""

    def pending(self) -> bool:
        """Whether a request was not answered yet."""

    def request_pause(self, paused: bool) -> int:
        """Ask for a pause, or for its end."""

    def pause_refusal(self) -> str | None:
        """Why there can be no pause."""

    def paused(self) -> Any:
        """What was asked for (wanted), whether it is not so yet (pending), and since when it is (since_ns)."""

    @property
    def output_paths(self) -> tuple[Path, ...]:
        """The script's output."""

    def close(self) -> None:
        """Give everything back."""


class Feed:
    """One run as it is now. `open_reader` is called by `start`, so that the first picture waits for no file."""

    def __init__(
        self,
        directory: Path,
        open_reader: Callable[[], Reader],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.directory = directory
        self.state = State()
        self.output = Output()
        self._open_reader = open_reader
        self._clock = clock
        self._reader: Reader | None = None
        self._past: Iterator[Past | Drawn | DevicePast | None] = iter(())
        self._facts = Facts(script=clean(directory.name, 100))
        self._ended: Ended | None = None
        self._exit: Any = None
        self._alive: bool | None = None
        self._gone_ns: int | None = None
        self._ending = False
        self._busy = False
        self._more: Iterator[Drawn | None] | None = None
        """Steps for the comparison, which are taken in between two pictures."""
        self._caught_up = False
        self._recorded = any(directory.glob("process-*.ring"))
        """Whether there is something to be read from the start: a run that is looked at again."""
        self._toggle: Toggle | None = None
        self._asked_at_change = 0

    def start(self) -> None:
        """Open the run. Raises what the reader raises when the directory is no run."""
        reader = self._reader = self._open_reader()
        self._facts = self._facts_of(reader)
        self._past = reader.past()
        self.output.tails = [Tail(path) for path in reader.output_paths]

    def close(self) -> None:
        """Give descriptors back."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._more = None
        for tail in self.output.tails:
            tail.close()

    def _facts_of(self, reader: Reader) -> Facts:
        info = reader.info
        mode = info.options.get("mode") if isinstance(info.options, Mapping) else None
        return Facts(
            run=clean(info.id, 120),
            script=clean(info.script, 200),
            start_ns=info.start_ns,
            mode_option=mode if isinstance(mode, str) else "auto",
            python=clean(info.python, 200) if info.python else "",
        )

    @property
    def info(self) -> Any:
        """The contents of run.json, also after it was deleted; None before the run is opened."""
        return None if self._reader is None else self._reader.info

    @property
    def ended(self) -> Ended | None:
        """How the run ended; None while it goes on, and until that was seen."""
        return self._ended

    def now_ns(self) -> int:
        """Time since the run's start."""
        return max(self._clock() - self._facts.start_ns, 0) if self._facts.start_ns else 0

    # ------------------------------------------------------------------------------------------ reading

    def tick(self, budget_s: float | None = None) -> None:
        """Take in what is new; all of it, or what can be done in `budget_s`. Then `sip` until that gives False.

        The end is asked for first, so that all that was written before it is seen.
        """
        reader = self._reader
        if reader is None:
            return
        reader.refresh()
        if self._ended is None and self._exit is None:
            self._exit = reader.exit()
        self._look_alive(reader)
        self._take_in(reader, budget_s)
        self._settle(reader)
        if budget_s is None:
            self._compare_more(None)

    @property
    def busy(self) -> bool:
        """Whether records are left to be taken in."""
        return self._busy

    @property
    def sipping(self) -> bool:
        """Whether anything is left to be done by `sip`."""
        return self._busy or self._more is not None

    def sip(self, budget_s: float | None = None) -> bool:
        """Between two pictures: take in records, if some are left; whether more are left then."""
        if self._busy and self._reader is not None:
            self._take_in(self._reader, budget_s)
            self._settle(self._reader)
        elif self._more is not None:
            self._compare_more(budget_s)
        return self.sipping

    def _to_compare(self, reader: Reader) -> Iterator[Drawn | None] | None:
        """Nothing follows: where not all steps are kept that a report compares, they are read."""
        there = (process.modes.values() for process in self.state.processes.values() if len(process.modes) > 1)
        lacks = any(len(track.settled) < min(track.settled_of, SETTLED_MOST) for tracks in there for track in tracks)
        return reader.of_both() if lacks else None

    def _compare_more(self, budget_s: float | None) -> None:
        until = None if budget_s is None else time.perf_counter() + budget_s
        for drawn in self._more or ():
            if drawn is not None:
                self.state = fold_past(self.state, drawn)
            if until is not None and time.perf_counter() > until:
                return
        self._more = None

    def _take_in(self, reader: Reader, budget_s: float | None) -> None:
        until = None if budget_s is None else time.perf_counter() + budget_s
        for past in self._past:
            if past is not None:
                self.state = fold_past(self.state, past)
            if until is not None and time.perf_counter() > until:
                self._busy = True
                return
        while records := reader.poll(_SIP_RECORDS):
            for record in records:
                self.state = fold(self.state, record)
            if until is not None and time.perf_counter() > until:
                self._busy = True
                self._caught_up = self._caught_up or self._at_head()
                return
        self._busy = False
        self._caught_up = True
        self.state.ended = ended_of(reader.activities())

    def _at_head(self) -> bool:
        """Whether the newest steps of all that train are of just now: of a flood no poll may ever come back empty."""
        now, found = self.now_ns(), training(self.state)
        return now > 0 and bool(found) and all(process.seen_ns >= now - _AT_HEAD_NS for process in found)

    def _settle(self, reader: Reader) -> None:
        """What is only true once everything was taken in."""
        if self._busy:
            return
        if self._exit is not None and self._ended is None:
            self._end(self._exit)
            self._more = self._to_compare(reader)
        self._answer(reader)

    def _look_alive(self, reader: Reader) -> None:
        alive = reader.command_alive()
        self._ending = False
        if alive is False and self._ended is None:
            now = self._clock()
            self._gone_ns = self._gone_ns or now
            # What is still to be read in may hold its exit.
            self._ending = now - self._gone_ns < _GRACE_NS or not self._caught_up
            alive = self._ending
        self._alive = alive

    def _end(self, ended: Any) -> None:
        for tail in self.output.tails:
            tail.refresh()
        last = None
        if ended.status is None and ended.unknown:
            last = clean(ended.unknown, 500)
        elif ended.status and not ended.stopped:
            lines = [line for tail in reversed(self.output.tails) if (line := last_line_of_traceback(tail.end()))]
            said = ended.error or ended.cause or (lines[0] if lines else None)
            last = clean(said, 500) if said else None
        self._ended = Ended(ended.status, ended.signal, int(ended.seconds * 1e9), last, ended.stopped)

    # ------------------------------------------------------------------------------------------ asking

    def can_toggle(self) -> bool:
        """Whether a request for a mode would reach anybody, and could be granted."""
        return self.toggle_refusal() is None

    def toggle_refusal(self) -> str | None:
        """Why no other mode can be asked for; None if one can."""
        if self._reader is None or self._ended is not None or self._alive is False:
            return "nothing runs that could be asked"
        if self._ending:
            return "the command has ended"
        if self._idle():
            return _IDLE
        if self._facts.mode_option == "script":
            return "--mode script leaves the computation as written"
        return toggle_refusal(self.state)

    def _idle(self) -> bool:
        """Whether every process that has trained is at its end: the command may start another one."""
        activities = self._reader.activities() if self._reader is not None else {}
        return at_its_end(self.state, activities)

    def toggle(self) -> None:
        """Ask for the other mode; pending from this moment on."""
        process = self.state.focus()
        if self._reader is None or process is None or not self.can_toggle():
            return
        wanted = "dp" if process.mode == "single" else "single"
        if self._toggle is not None and self._toggle.status == "pending":
            wanted = "dp" if self._toggle.mode == "single" else "single"
        self._asked_at_change = self.state.mode_change_count
        asked = self._reader.request_mode(wanted)
        if asked:
            self._toggle = Toggle(wanted, "pending", self.now_ns())
        else:
            self._toggle = Toggle(wanted, "refused", self.now_ns(), reason="no training process is there to answer")

    def _answer(self, reader: Reader) -> None:
        toggle = self._toggle
        if toggle is None or toggle.status != "pending" or reader.pending():
            return
        fresh = self.state.mode_change_count - self._asked_at_change
        process = self.state.focus()
        changes = list(self.state.mode_changes)[-fresh:] if fresh > 0 else []
        answers = [c for c in changes if c.requested_by == "user"]
        refused = next((c for c in answers if c.refused is not None), None)
        if refused is not None:
            self._toggle = Toggle(toggle.mode, "refused", self.now_ns(), reason=refused.refused)
        elif answers:
            self._toggle = Toggle(toggle.mode, "done", self.now_ns(), answers[-1].step)
        elif process is not None and process.mode == toggle.mode:
            self._toggle = Toggle(toggle.mode, "done", self.now_ns())

    def pausing(self) -> Pausing:
        """Whether the training is paused, is to be, and could be."""
        reader = self._reader
        if reader is None or self._ended is not None or self._alive is False or not self.state.processes:
            return Pausing()
        now = reader.paused()
        since = None if now.since_ns is None else max(now.since_ns - self._facts.start_ns, 0)
        possible = now.wanted or reader.pause_refusal() is None
        return Pausing(possible, now.wanted, now.pending, since)

    def pause_refusal(self) -> str | None:
        """Why the training can neither be paused nor go on; None if it can."""
        pausing = self.pausing()
        if self._reader is None or self._ended is not None or self._alive is False:
            return "nothing runs that could be asked"
        if self._ending:
            return "the command has ended"
        if self._idle() and not pausing.wanted:
            return _IDLE
        if pausing.possible:
            return None
        return self._reader.pause_refusal() or "no training process is known yet"

    def pause(self) -> None:
        """Ask for a pause, or for the end of the one that was asked for."""
        if self._reader is not None:
            self._reader.request_pause(not self.pausing().wanted)

    def can_type(self) -> bool:
        """Whether the script's standard input can be reached."""
        try:
            return stat.S_ISFIFO(os.lstat(self.directory / INPUT).st_mode)
        except OSError:
            return False

    def hides_input(self) -> bool:
        """Whether what is typed to the script is not to be seen, as a password is not."""
        from dpmon.run.terminal import hides_input

        pid = None if self._reader is None else self._reader.info.command_pid
        return pid is not None and hides_input(pid)

    def type_line(self, line: str) -> str | None:
        """Send a line to the script's standard input; None, or why that was not possible."""
        from dpmon.run.terminal import send_input

        sent = send_input(self.directory, (line + "\n").encode("utf-8", "replace"))
        return None if sent else "nobody takes it just now"

    def file_name(self) -> str:
        """How files about this run begin: "dpmon-linear-7f3a"."""
        return "dpmon-" + re.sub(r"^\d{8}-\d{6}-|[^A-Za-z0-9._-]+", "", self.directory.name)[:80]

    # ------------------------------------------------------------------------------------------ scenes

    def scene(self, view: View, stopping: str | None = None) -> Scene:
        """Everything as it is now, for the pictures."""
        reader = self._reader
        if reader is None:
            return Scene(self.state, 0, self._facts, view, reading=self._recorded)
        start = self._facts.start_ns
        stage = reader.stage() if self._ended is None else None
        reads = reader.waits_for_input() if self._ended is None else None
        return Scene(
            self.state,
            self.now_ns(),
            self._facts,
            view,
            stage=None if stage is None else (stage[0], max(stage[1] - start, 0)),
            reads_since_ns=None if reads is None else max(reads - start, 0),
            activities={p: (what, since - start if since else 0) for p, (what, since) in reader.activities().items()},
            alive=self._alive,
            ended=self._ended,
            toggle=self._toggle,
            pausing=self.pausing(),
            missed=reader.missed,
            can_toggle=self.can_toggle(),
            can_type=self._ended is None and self.can_type(),
            outputs=len(self.output.tails),
            scrolled_back=self.output.top is not None,
            stopping=stopping,
            ending=self._ending,
            reading=not self._caught_up,
        )

    def frozen(self, view: View) -> Scene:
        """A scene that stays as it is while the run goes on."""
        return copy.deepcopy(self.scene(view))
