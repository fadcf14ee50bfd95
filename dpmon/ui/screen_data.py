"""All data behind one picture: the state of the run, and the user's view of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from dpmon.model.findings.all_findings import find_causes
from dpmon.model.findings.finding import Finding
from dpmon.model.recorded_stalls import RecordedStall, final_stall
from dpmon.model.run_analysis import RunAnalysis
from dpmon.model.run_events import ModeChange
from dpmon.model.run_process import Process
from dpmon.model.stragglers import Straggler
from dpmon.record.schema import SECOND, SPAN_PHASES
from dpmon.record.shared_names import RANK_MODES
from dpmon.report.outcome import exit_cause, exit_words
from dpmon.run.activities import startup_wait_reason
from dpmon.run.lifecycle import has_succeeded
from dpmon.run.mirror_state import NodeReplies
from dpmon.run.run_directory import ExitInfo, RunInfo
from dpmon.run.run_reader import PauseState
from dpmon.sanitize import sanitize_line
from dpmon.stalls.run_state import (
    PAUSED,
    QUIET,
    SAVING,
    STALLED,
    STARTING,
    WAIT_SHOWN_NS,
    WAITING_FOR_DATA,
    WAITING_FOR_INPUT,
    RunState,
    decide_state,
    format_state,
)
from dpmon.stalls.stall_detection import format_ranges
from dpmon.text.formatting import UNKNOWN, format_calls_so_far
from dpmon.ui.time_cursor import TimeCursor

PANELS = ("devices", "replicas", "batch", "compare", "output", "progress")
NAMES = {
    "devices": "1 Devices",
    "replicas": "2 Replicas",
    "batch": "3 Batch",
    "compare": "4 dp vs. single",
    "output": "5 Output",
    "progress": "6 Progress",
}
"""The panels' names in titles, in the help and in the palette."""
RANK_NAMES = {"replicas": "2 Ranks", "compare": "4 Communication"}
"""The names of two panels when ranks train."""
RANGES = (30, 120, 600, 0)
"""Time ranges to choose from in seconds; 0 is the whole run."""
QUIET_SHOWN_NS = 5 * SECOND
CAUSES_AGE_S = 5
"""The findings that a message is worth are read at most once in this time."""
READING = "reading the record"
_OUTCOME_STYLES = {"finished": "good", "stopped": "wait", "interrupted": "wait"}
"""Styles of ends; others are failures."""
BEFORE_STALL = ("values from before the stall", "wait")
"""Stands next to metrics that cover no time of the stall."""


class ModeRequest(NamedTuple):
    """A requested mode that is not in force yet, and since when (ns since the run's start)."""

    mode: str
    since_ns: int


@dataclass(frozen=True, slots=True)
class View:
    """The user's choices: what to show, and how."""

    focus: str = "replicas"
    zoom: str | None = None
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

    state: RunAnalysis
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
    """Whether there are records, and none was read yet."""
    cursor: TimeCursor = field(default_factory=TimeCursor)
    """The time that the screen shows, and how it came there."""
    history_state: RunAnalysis | None = None
    """While the user looks back, the state when the picture was frozen: the histories go until then. Else None."""
    findings: Sequence[Finding] | None = None
    """Findings of a finished run, the most important first; None while they are not known."""

    @property
    def title(self) -> str:
        """The name that the user gave the run, else the script without its directories; sanitized."""
        if self.run_info is None:
            return ""
        script = sanitize_line(self.run_info.script, 200)
        return sanitize_line(self.run_info.options.get("name") or "", 40) or script.rsplit("/", 1)[-1] or script

    @property
    def process(self) -> Process | None:
        """The process that represents the run."""
        return self.state.representative

    @property
    def exit_cause(self) -> str | None:
        """Why the run ended: the last line of the script's traceback, or another cause; sanitized, None if unknown."""
        cause = exit_cause(self.exit_info) if self.is_over else None
        return sanitize_line(cause, 500) if cause else None

    @property
    def input_wait_ns(self) -> int | None:
        """How long (ns) the command has waited for input; None if it does not wait, or too briefly to show."""
        since_ns = self.input_wait_since_ns
        if since_ns is None or self.now_ns - since_ns <= WAIT_SHOWN_NS:
            return None
        return (
            None
            if any(process.seen_ns > since_ns for process in self.state.processes.values())
            else self.now_ns - since_ns
        )

    @property
    def run_state(self) -> RunState:
        """The state of the run in a word, and since when (ns since the run's start)."""
        wait_ns = self.input_wait_ns
        input_wait_since = None if wait_ns is None else self.now_ns - wait_ns
        inputs = self.state.state_inputs(self.now_ns, self.activities, self.pause_state.since_ns, input_wait_since)
        return decide_state(inputs._replace(over=self.is_over))

    @property
    def shown_stall(self) -> RecordedStall | None:
        """The stall that the run is in; once the command has ended, the one in which it ended."""
        if not (self.is_over or self.is_ending):
            stall = self.state.current_stall
            return stall if stall is not None and self.run_state.word == STALLED else None
        return final_stall(self.state.stalls, self.state.newest_ns, has_succeeded(self.exit_info))

    @property
    def shows_past(self) -> bool:
        """Whether the screen shows a past time, in which case no request can be sent to the training."""
        return self.cursor.shows_past

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, so that no more records will come."""
        return self.exit_info is not None or self.is_command_alive is False

    @property
    def is_live(self) -> bool:
        """Whether the metrics of the last steps still hold: the run has neither stalled nor ended."""
        if self.is_over or self.is_ending or self.shown_stall is not None:
            return False
        return not all_finished(self.state, self.activities)

    @property
    def causes(self) -> list[Finding]:
        """The findings of a live run that a message is worth, those about a wrong training first."""
        if not self.is_live or self.state.representative is None:
            return []
        return self.state.read_at_most_every(CAUSES_AGE_S, "causes", lambda: find_causes(self.state))

    @property
    def current_straggler(self) -> Straggler | None:
        """The ranks that the others wait for now; None if no rank stands out, or if the run is not live."""
        return self.state.straggler if self.is_live else None

    def empty_reason(self, ended_reason: str, pending_reason: str) -> str:
        """Return why there is nothing to show yet: the calls so far, READING while older records are read, or one of
        the reasons for a run that has ended and for a live one.
        """
        if self.is_over:
            return ended_reason
        if self.state.open_calls:
            return format_calls_so_far(self.state.open_calls)
        return READING if self.is_reading else pending_reason

    @property
    def elapsed_ns(self) -> int:
        """The run's duration until the time of the picture, or its end (ns)."""
        return self.now_ns if self.exit_info is None else int(self.exit_info.seconds * 1e9)


def last_mode_reply(state: RunAnalysis) -> ModeChange | None:
    """Return the newest reply to a request of a mode by a user; None if there was none."""
    return next((change for change in reversed(state.mode_changes) if change.requested_by == "user"), None)


def all_finished(state: RunAnalysis, activities: Mapping[int, tuple[str, int]]) -> bool:
    """Return whether every process that has trained reports that it is finished."""
    has_trained = False
    for process_index, process in state.processes.items():  # usually, the first one is active
        if process.seen_ns >= 0:
            has_trained = True
            activity, _ = activities.get(process_index, ("", 0))
            if activity != "ended":
                return False
    return has_trained


class ActivityText(NamedTuple):
    """The activity of a run in words, with a style and a detail."""

    word: str
    style: str
    detail: str = ""


def describe_activity(screen: ScreenData) -> ActivityText:
    """Return what the run is doing, in everyday words."""
    if screen.is_over:
        word, detail = exit_words(screen.exit_info)
        outcome, _, _ = word.partition(" ")
        return ActivityText(sanitize_line(word, 40), _OUTCOME_STYLES.get(outcome, "bad"), detail)
    process = screen.process
    activity = screen.activities.get(process.process) if process is not None else None
    if screen.is_ending:
        return ActivityText("ending", "wait", "the command has ended")
    doing, since_ns = activity if activity is not None else ("", 0)
    activity_ns = screen.now_ns - since_ns if since_ns > 0 else 0
    run_state = screen.run_state
    state_age = "" if run_state.since_ns is None else f"{(screen.now_ns - run_state.since_ns) / 1e9:.0f} s"
    if run_state.word == PAUSED:
        return ActivityText(PAUSED, "wait", state_age)
    if screen.is_reading:
        return ActivityText(READING, "wait")
    if run_state.word == WAITING_FOR_INPUT:
        return ActivityText(WAITING_FOR_INPUT, "wait", f"{state_age}{': press i' if screen.can_type else ''}")
    if run_state.word == STALLED:
        return ActivityText(STALLED.upper(), "bad", state_age)
    if process is None or process.seen_ns < 0:
        return _before_first_batch(screen, doing, activity_ns)
    # An evaluation that has ended while the training waits for it does not count as an end.
    if doing == "ended" and all_finished(screen.state, screen.activities):
        # Another training is starting, and none of its steps was seen yet.
        _, stage_start_ns = screen.startup_stage or ("", 0)
        if stage_start_ns > max(screen.state.newest_ns, process.seen_ns):
            return _before_first_batch(screen, "", 0)
        return ActivityText("ending", "wait", "the training process is exiting")
    if run_state.word in (WAITING_FOR_DATA, SAVING, QUIET):
        return ActivityText(format_state(run_state.word), "wait", state_age)
    # The record may be behind on an overloaded machine, but not what the process does now.
    is_long = screen.now_ns - max(process.seen_ns, since_ns) > QUIET_SHOWN_NS and doing in SPAN_PHASES
    detail = f"in {doing} {activity_ns / 1e9:.0f} s"
    if len(screen.state.training_processes) > 1:  # where this rank is may only be where it waits for another one
        detail = f"no step for {(screen.now_ns - process.seen_ns) / 1e9:.0f} s"
    return ActivityText(run_state.word, "good", detail if is_long else "")


def no_progress_text(screen: ScreenData) -> str | None:
    """Return why a run that is not stalled makes no progress; None if it makes some."""
    activity = describe_activity(screen)
    return None if activity.style == "good" else f"{activity.word}: {activity.detail}".rstrip(": ")


def _before_first_batch(screen: ScreenData, doing: str, activity_ns: int) -> ActivityText:
    if doing == "data" and activity_ns > WAIT_SHOWN_NS:
        return ActivityText(WAITING_FOR_DATA, "wait", f"first batch, {activity_ns / 1e9:.0f} s")
    if screen.state.open_calls:
        return ActivityText(screen.run_state.word, "wait", format_calls_so_far(screen.state.open_calls))
    if doing:  # a script without a loader has no visible first batch
        activity = "the script" if doing == "other" else sanitize_line(doing, 20)
        first_item = "first batch" if doing == "data" else "first step"
        if activity_ns < SECOND:
            return ActivityText(STARTING, "wait", first_item)
        return ActivityText(STARTING, "wait", f"{first_item} in {activity}, {activity_ns / 1e9:.0f} s")
    reason = sanitize_line(startup_wait_reason(screen.startup_stage, screen.now_ns), 200)
    _, stage_start_ns = screen.startup_stage or ("", 0)
    stage_age = f"{max(screen.now_ns - stage_start_ns, 0) / 1e9:.0f} s"
    return ActivityText(STARTING, "wait", f"{reason}, {stage_age}" if reason else stage_age)


def format_devices(devices: tuple[str, ...]) -> str:
    """Return device names in short, sanitized: ("cuda:0", "cuda:1", "cuda:3") -> "cuda:0-1,3"."""
    parts = []
    for device_type, devices_of_type in groupby(
        (sanitize_line(device, 40).partition(":") for device in devices), key=lambda part: part[0]
    ):
        indices = [index for *_, index in devices_of_type]
        is_numbered = all(index.isdecimal() for index in indices)
        index_text = format_ranges(map(int, indices), ",", 2) if is_numbered else ",".join(indices)
        parts.append(f"{device_type}:{index_text}" if any(indices) else device_type)
    return " ".join(parts)


def format_mode_and_devices(process: Process | None) -> tuple[str, str]:
    """Return the current mode ("dp ×4", "single", "ddp ×2") and its devices ("cuda:0-3", "cpu:0-1 virtual")."""
    if process is None or not process.mode:
        return UNKNOWN, ""
    device_text = format_devices(process.devices)
    method = process.distributed
    if method is not None:
        ranks = process.info.world
        return (f"{RANK_MODES[method]} ×{ranks}" if ranks else RANK_MODES[method]), device_text
    if process.mode != "dp":
        return process.mode, device_text.split(",")[0].split("-")[0]
    return f"dp ×{len(process.devices)}", device_text + (" virtual" if process.virtual else "")
