"""All data behind one picture: the state of the run, and the user's view of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from dpmon.model.finding_text import Finding
from dpmon.model.recorded_stalls import RecordedStall, final_stall
from dpmon.model.run_snapshot import Process, RunSnapshot
from dpmon.model.stragglers import Straggler
from dpmon.record.schema import SECOND, SPAN_PHASES
from dpmon.record.shared_names import RANK_MODES
from dpmon.run.activities import startup_wait_reason
from dpmon.run.mirror_state import NodeReplies
from dpmon.run.run_directory import ExitInfo, RunInfo
from dpmon.run.run_reader import PauseState
from dpmon.sanitize import sanitize_line
from dpmon.stalls.run_state import (
    PAUSED,
    QUIET,
    STALLED,
    STARTING,
    WAIT_SHOWN_NS,
    WAITING_FOR_DATA,
    WAITING_FOR_INPUT,
    RunState,
    decide_state,
)
from dpmon.stalls.stall_detection import format_ranges
from dpmon.text.formatting import UNKNOWN, format_calls_so_far, format_clock

PANELS = ("devices", "replicas", "batch", "compare", "output", "progress")
NAMES = {
    "devices": "1 Devices",
    "replicas": "2 Replicas",
    "batch": "3 Batch",
    "compare": "4 dp against single",
    "output": "5 Output",
    "progress": "6 Progress",
}
"""The panels' names in titles, in the help and in the palette."""
RANK_NAMES = {"replicas": "2 Ranks", "compare": "4 Communication"}
"""The names of two panels when ranks train."""
RANGES = (30, 120, 600, 0)
"""Time ranges to choose from in seconds; 0 is the whole run."""
QUIET_SHOWN_NS = 5 * SECOND
READING = "reading the record"
BEFORE_STALL = ("before the stall", "wait")
"""Stands beside figures that cover no time of the stall."""


class PlaybackPosition(NamedTuple):
    """A playback: position and length (ns), whether it plays, and its speed (1: real time)."""

    position_ns: int
    length_ns: int
    is_playing: bool
    speed: float


class LookBack(NamedTuple):
    """The time from which the user looks back (ns since the run's start)."""

    state: RunSnapshot
    """The state when the picture was frozen: the histories go on until then."""
    until_ns: int
    """When it was frozen."""
    now_ns: int | None
    """The present; None if the run is over."""


class ModeRequest(NamedTuple):
    """A requested mode: pending, done or refused, and when (ns since the run's start)."""

    mode: str
    status: str
    since_ns: int
    step: int | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class View:
    """The user's choices: what to show, and how."""

    focus: str = "replicas"
    zoom: str | None = None
    is_frozen: bool = False
    shown_ns: int | None = None
    """The earlier time that a frozen picture shows (ns since the run's start); None: when it was frozen."""
    call_choice: int = 0
    """Number of the root, or call of a step, that the replicas panel shows; 0: always the one called last."""
    range_s: int = 120
    """Time range of the histories and their figures, one of RANGES; 0 is the whole run."""
    first_rows: Mapping[str, int] = field(default_factory=dict)
    """Per panel, its first visible row; if this is beyond the end, the panel shows its last rows."""
    process_index: int | None = None
    """The process, usually a rank, whose time panel 3 shows; None: the one that represents the run."""
    node_number: int | None = None
    """The number of the only node on the screen; None for all."""
    search: str = ""
    """The text to find in the output; hits are highlighted."""
    message: str | None = None
    dialog_keys: tuple[tuple[str, str], ...] = ()
    """Keys of the open dialog and their effects; no other keys work meanwhile."""


@dataclass(frozen=True, slots=True)
class ScreenData:
    """One instant of a run. Times are ns since the run's start."""

    state: RunSnapshot
    now_ns: int
    run_info: RunInfo | None = None
    """The contents of run.json; None before the run is opened."""
    view: View = field(default_factory=View)
    startup_stage: tuple[str, int] | None = None
    input_wait_since_ns: int | None = None
    """When the command began to wait for a line of input (ns); None if it was not seen waiting."""
    activities: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    is_command_alive: bool | None = None
    exit_info: ExitInfo | None = None
    exit_cause: str | None = None
    """Why it ended: the last line of the script's traceback, or another cause; None if unknown."""
    mode_request: ModeRequest | None = None
    pause_state: PauseState = field(default_factory=PauseState)
    can_pause: bool = False
    """Whether the training can be paused or resumed."""
    can_toggle: bool = False
    can_type: bool = False
    node_replies: NodeReplies | None = None
    """How the nodes have answered the last request; None on one machine."""
    output_file_count: int = 1
    """Number of output files: two if the script's errors are separate."""
    is_output_scrolled_back: bool = False
    """Whether the output is scrolled away from its end."""
    stop_progress: str | None = None
    is_ending: bool = False
    """Whether the command is gone and its exit is not recorded yet."""
    is_reading: bool = False
    """Whether older records are still being read, so that the age of the last step means nothing."""
    playing: PlaybackPosition | None = None
    """The position of the playback; None for a live run."""
    past: LookBack | None = None
    """From when the user looks back to `now_ns`; None if the picture shows the present, or was frozen at `now_ns`."""

    findings: Sequence[Finding] | None = None
    """What is worth a look in a finished run, the most important first; None while it is not known."""

    @property
    def title(self) -> str:
        """The name that the user gave the run, else the script without its directories; clean."""
        if self.run_info is None:
            return ""
        script = sanitize_line(self.run_info.script, 200)
        return sanitize_line(self.run_info.options.get("name") or "", 40) or script.rsplit("/", 1)[-1] or script

    @property
    def process(self) -> Process | None:
        """The process that represents the run."""
        return self.state.representative

    @property
    def input_wait_ns(self) -> int | None:
        """How long (ns) the command has waited for input; None if it does not, or if the wait is too short to show."""
        since = self.input_wait_since_ns
        if since is None or self.is_reading or self.now_ns - since <= WAIT_SHOWN_NS:
            return None
        return None if any(each.seen_ns > since for each in self.state.processes.values()) else self.now_ns - since

    @property
    def run_state(self) -> RunState:
        """The state of the run in a word, and since when (ns since the run's start)."""
        waited = self.input_wait_ns
        reads = None if waited is None else self.now_ns - waited
        now = self.state.state_inputs(self.now_ns, self.activities, self.pause_state.since_ns, reads)
        return decide_state(now._replace(over=self.is_over))

    @property
    def shown_stall(self) -> RecordedStall | None:
        """The stall that the run is in; once the command has ended, the one in which it ended."""
        if not (self.is_over or self.is_ending):
            return (
                self.state.current_stall
                if self.state.current_stall is not None and self.run_state.word == STALLED
                else None
            )
        finished = self.exit_info is not None and self.exit_info.status == 0
        return None if finished else final_stall(self.state.stalls, self.state.newest_ns)

    @property
    def shows_past(self) -> bool:
        """Whether the picture shows an earlier time, so that nothing can be asked of the training about it."""
        return self.playing is not None or self.past is not None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self.exit_info is not None or self.is_command_alive is False

    @property
    def is_live(self) -> bool:
        """Whether the figures of the last steps hold now: the run is neither stalled nor at its end."""
        if self.is_over or self.is_ending or self.shown_stall is not None:
            return False
        return not all_finished(self.state, self.activities)

    @property
    def current_straggler(self) -> Straggler | None:
        """The ranks that the others wait for now; None if no rank stands out, or if the run does not go on."""
        return self.state.straggler if self.is_live else None

    def empty_reason(self, over: str, yet: str) -> str:
        """Why there is nothing to show: `over` after the end, READING while older records are read, else `yet`."""
        calls = self.state.open_calls
        if calls and not self.is_over:
            return format_calls_so_far(calls)
        return over if self.is_over else READING if self.is_reading else yet

    @property
    def elapsed_ns(self) -> int:
        """The run's duration until now or its end (ns); in a playback, until its position."""
        if self.playing is not None:
            return self.playing.position_ns
        return self.now_ns if self.exit_info is None else int(self.exit_info.seconds * 1e9)


def all_finished(state: RunSnapshot, activities: Mapping[int, tuple[str, int]]) -> bool:
    """Whether every process that has trained reports that it is finished."""
    trained = False
    for number, each in state.processes.items():  # most often, the first one goes on
        if each.seen_ns >= 0:
            trained = True
            if activities.get(number, ("", 0))[0] != "ended":
                return False
    return trained


class ActivityText(NamedTuple):
    """The run's activity in words, with a style and a detail."""

    word: str
    style: str
    detail: str = ""


def describe_activity(facts: ScreenData) -> ActivityText:
    """The run's current activity in everyday words."""
    if facts.exit_info is not None:
        return _describe_outcome(facts.exit_info)
    if facts.is_command_alive is False:
        return ActivityText("ended", "bad", "status unknown")
    process = facts.process
    activity = facts.activities.get(process.process) if process is not None else None
    if facts.is_ending:
        return ActivityText("ending", "wait", "the command has ended")
    doing, since = activity if activity is not None else ("", 0)
    spent = facts.now_ns - since if since > 0 else 0
    found = facts.run_state
    lasted = "" if found.since_ns is None else f"{(facts.now_ns - found.since_ns) / 1e9:.0f} s"
    if found.word == PAUSED:
        return ActivityText(PAUSED, "wait", lasted)
    if facts.is_reading:
        newest = facts.state.newest_ns
        return ActivityText(
            READING, "wait", f"{format_clock(newest)} of {format_clock(facts.now_ns)}" if newest >= 0 else ""
        )
    if found.word == WAITING_FOR_INPUT:
        return ActivityText(WAITING_FOR_INPUT, "wait", f"{lasted}{': press i' if facts.can_type else ''}")
    if found.word == STALLED:
        return ActivityText(STALLED.upper(), "bad", lasted)
    if process is None or process.seen_ns < 0:
        return _before_first_batch(facts, doing, spent)
    # An evaluation that has ended while the training waits for it does not count as an end.
    if doing == "ended" and all_finished(facts.state, facts.activities):
        # Another training is starting, and none of its steps was seen yet.
        if facts.startup_stage is not None and facts.startup_stage[1] > max(facts.state.newest_ns, process.seen_ns):
            return _before_first_batch(facts, "", 0)
        return ActivityText("ending", "wait", "the training process is exiting")
    if found.word in (WAITING_FOR_DATA, QUIET):
        return ActivityText(found.word, "wait", lasted)
    # The record may be behind on an overloaded machine, but not what the process does now.
    long = facts.now_ns - max(process.seen_ns, since) > QUIET_SHOWN_NS and doing in SPAN_PHASES
    where = f"in {doing} {spent / 1e9:.0f} s"
    if len(facts.state.training_processes) > 1:  # where this rank is may only be where it waits for another one
        where = f"no step for {(facts.now_ns - process.seen_ns) / 1e9:.0f} s"
    return ActivityText(found.word, "good", where if long else "")


def no_progress_text(facts: ScreenData) -> str | None:
    """Why a run that is not stalled makes no progress; None if it makes some."""
    found = describe_activity(facts)
    return None if found.style == "good" else f"{found.word}: {found.detail}".rstrip(": ")


def _before_first_batch(facts: ScreenData, doing: str, spent: int) -> ActivityText:
    if doing == "data" and spent > WAIT_SHOWN_NS:
        return ActivityText(WAITING_FOR_DATA, "wait", f"first batch, {spent / 1e9:.0f} s")
    if facts.state.open_calls:
        return ActivityText(facts.run_state.word, "wait", format_calls_so_far(facts.state.open_calls))
    if doing:  # a script without a loader has no visible first batch
        where = "the script" if doing == "other" else sanitize_line(doing, 20)
        first = "first batch" if doing == "data" else "first step"
        return ActivityText(STARTING, "wait", f"{first} in {where}, {spent / 1e9:.0f} s" if spent >= SECOND else first)
    why = sanitize_line(startup_wait_reason(facts.startup_stage, facts.now_ns), 200)
    lasted = f"{max(facts.now_ns - (0 if facts.startup_stage is None else facts.startup_stage[1]), 0) / 1e9:.0f} s"
    return ActivityText(STARTING, "wait", f"{why}, {lasted}" if why else lasted)


def _describe_outcome(ended: ExitInfo) -> ActivityText:
    if ended.stopped:
        return ActivityText("stopped", "wait", "by you" + (f", status {ended.status}" if ended.status else ""))
    if ended.signal == "SIGINT":
        return ActivityText("interrupted", "wait", "SIGINT")
    if ended.status is None:
        return ActivityText("ended", "bad", "status unknown")
    if ended.signal is not None:
        perhaps = "perhaps out of memory" if ended.signal == "SIGKILL" else ""
        return ActivityText(f"killed by {sanitize_line(ended.signal, 12)}", "bad", perhaps)
    if ended.status == 0:
        return ActivityText("finished", "good", "status 0")
    return ActivityText("failed", "bad", f"status {ended.status}")


def format_devices(devices: tuple[str, ...]) -> str:
    """("cuda:0", "cuda:1", "cuda:3") -> "cuda:0-1,3"; clean."""
    parts = []
    for kind, same in groupby(
        (sanitize_line(device, 40).partition(":") for device in devices), key=lambda part: part[0]
    ):
        indices = [index for *_, index in same]
        numbered = all(index.isdecimal() for index in indices)
        listed = format_ranges(map(int, indices), ",", 2) if numbered else ",".join(indices)
        parts.append(f"{kind}:{listed}" if any(indices) else kind)
    return " ".join(parts)


def format_mode_and_devices(process: Process | None, times: str) -> tuple[str, str]:
    """The current mode ("dp ×4", "single", "ddp ×2") and its devices ("cuda:0-3", "cpu:0-1 virtual")."""
    if process is None or not process.mode:
        return UNKNOWN, ""
    where = format_devices(process.devices)
    by = process.distributed
    if by is not None:
        ranks = process.info.world
        return (f"{RANK_MODES[by]} {times}{ranks}" if ranks else RANK_MODES[by]), where
    if process.mode != "dp":
        return process.mode, where.split(",")[0].split("-")[0]
    return f"dp {times}{len(process.devices)}", where + (" virtual" if process.virtual else "")
