"""The screen of a finished run: the same screen at an earlier time, with a time line and keys to play it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from dpmon.errors import HistoryError
from dpmon.record.schema import SECOND
from dpmon.run.activities import StartupStage, current_startup_stage, read_startup_stages
from dpmon.run.run_directory import ExitInfo, load_exit
from dpmon.run.run_reader import RunReader
from dpmon.store.records import newest_record_ns
from dpmon.store.steps import find_step_end
from dpmon.store.store_opening import open_store
from dpmon.ui.dialogs import Dialog
from dpmon.ui.footer import position_at
from dpmon.ui.keys import PLAYBACK_ACTIONS
from dpmon.ui.live_run import LiveRun
from dpmon.ui.monitor import Monitor
from dpmon.ui.screen_data import PlaybackPosition, ScreenData, View
from dpmon.ui.terminal_style import TerminalStyle

SPEEDS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 100.0)


class Player(RunReader):
    """The clock of a playback, and the screen's reader of a finished run.

    Times are ns since the run's start; `clock` measures real time (ns).
    """

    def __init__(self, directory: Path, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """Start at the end of the run, stopped. Raises RunError without a run, HistoryError if it is damaged."""
        super().__init__(directory)
        self._exit_info = load_exit(directory)
        with open_store(directory) as store:
            newest = newest_record_ns(store)
        self.length_ns = max(int(self._exit_info.seconds * 1e9) if self._exit_info is not None else 0, newest, 1)
        self._clock = clock
        self._last_clock_ns = clock()
        self._current_ns = self.length_ns
        self.is_playing = False
        self.speed = 1.0

    # ------------------------------------------------------------------------------------------ the clock

    @property
    def position_ns(self) -> int:
        """The playback's position (ns). It moves during playback, and stops at the end of the run."""
        now = self._clock()
        elapsed_ns, self._last_clock_ns = now - self._last_clock_ns, now
        if self.is_playing:
            self._current_ns += int(max(elapsed_ns, 0) * self.speed)
            if self._current_ns >= self.length_ns:
                self._current_ns, self.is_playing = self.length_ns, False
        return self._current_ns

    def now_ns(self) -> int:
        """Return the position on the run's monotonic clock (ns): the screen's "now"."""
        return self.info.start_ns + self.position_ns

    def play(self, playing: bool = True) -> None:
        """Play or pause; at the end, start again."""
        if playing and self.position_ns >= self.length_ns:
            self.seek(0)
        self._last_clock_ns = self._clock()
        self.is_playing = playing

    def seek(self, position_ns: int) -> None:
        """Set the position; keep playing or stay stopped."""
        _ = self.position_ns
        self._current_ns = min(max(position_ns, 0), self.length_ns)

    def step(self, direction: int) -> None:
        """Go to the end of the training's next step (`direction` 1) or previous step (-1), and stop."""
        self.is_playing = False
        position_ns = self.position_ns
        with suppress(HistoryError), open_store(self.directory) as store:
            store_at_position = store.as_of(position_ns if direction > 0 else position_ns - 1)
            end_times_ns = [
                end_ns
                for process_index in store.processes
                if (end_ns := find_step_end(store_at_position, process_index, forward=direction > 0)) is not None
            ]
            if end_times_ns:
                self.seek(min(end_times_ns) if direction > 0 else max(end_times_ns))

    def change_speed(self, offset: int) -> None:
        """Choose the next higher or lower of SPEEDS."""
        speed_index = min(range(len(SPEEDS)), key=lambda index: abs(SPEEDS[index] - self.speed))
        _ = self.position_ns  # the time until now passed at the old speed
        self.speed = SPEEDS[min(max(speed_index + offset, 0), len(SPEEDS) - 1)]

    # ------------------------------------------------------------------------------------------ the screen's reader

    def startup_stage(self) -> StartupStage | None:
        """Return the startup stage at the position and its start (monotonic ns); None after the first call."""
        return current_startup_stage(read_startup_stages(self.directory, self.now_ns()))

    def input_wait_start_ns(self) -> int | None:
        """Return None: a playback shows no waits for input."""
        return None

    def exit_info(self) -> ExitInfo | None:
        """Return how the run ended, once the playback has reached the end; None before."""
        return self._exit_info if self.position_ns >= self.length_ns else None

    def is_command_alive(self) -> bool | None:
        """Return whether the command ran at the position."""
        return self.position_ns < self.length_ns

    def activities(self) -> dict[int, tuple[str, int]]:
        """Return no activities: no process of the run is alive."""
        return {}


class _PlaybackRun(LiveRun):
    """A run as it was at the position of the playback."""

    def __init__(self, directory: Path, open_player: Callable[[], Player]) -> None:
        super().__init__(directory, open_player, self._player_clock_ns)

    @property
    def player(self) -> Player | None:
        """The player; None before the run is opened."""
        return self._reader if isinstance(self._reader, Player) else None

    def _player_clock_ns(self) -> int:
        return 0 if self.player is None else self.player.now_ns()

    def _position_ns(self) -> int | None:
        player = self.player
        return None if player is None or player.position_ns >= player.length_ns else player.position_ns

    def refresh(self, *, immediately: bool = False) -> None:
        """Read the state as if the run were live: before the playback reaches its end, the run has not ended."""
        player = self.player
        if player is not None and player.position_ns < player.length_ns:
            self.exit_info = self._exit_cause = self._vanished_ns = None
        super().refresh(immediately=immediately)

    def toggle_refusal(self) -> str | None:
        """Return why no other mode can be requested."""
        return "this is a playback of a run that has ended"

    def pause_refusal(self, is_requested: bool) -> str | None:
        """Return why the run can be neither paused nor resumed."""
        return "this is a playback; space plays or pauses it"

    def can_type(self) -> bool:
        """Return False: no process reads input."""
        return False

    def build_screen_data(self, view: View, stopping: str | None = None) -> ScreenData:
        """Return the data to draw, with the position of the playback."""
        player = self.player
        if player is None:
            return super().build_screen_data(view, stopping)
        position_ns = player.position_ns
        playing = PlaybackPosition(position_ns, player.length_ns, player.is_playing, player.speed)
        return replace(super().build_screen_data(view, stopping), now_ns=position_ns, playing=playing, can_type=False)


class Playback(Monitor):
    """The screen of one finished run, which can be played back."""

    ACTIONS: ClassVar[Mapping[str, str]] = PLAYBACK_ACTIONS

    def __init__(
        self,
        directory: Path,
        style: TerminalStyle,
        *,
        refresh: float = 1.0,
        open_player: Callable[[], Player] | None = None,
    ) -> None:
        super().__init__(directory, style, refresh=refresh)
        self._playback_run = _PlaybackRun(directory, open_player or (lambda: Player(directory)))
        self.live_run = self._playback_run

    @property
    def _player_unless_dialog(self) -> Player | None:
        return self._playback_run.player if not self._is_dialog_open else None

    def _control_player(self, control: Callable[[Player], None]) -> None:
        """Call `control` with the player, and draw at once. Clear the message, which belongs to another time."""
        player = self._player_unless_dialog
        if player is not None:
            control(player)
            self.view = replace(self.view, message=None)
            self.live_run.refresh(immediately=True)
            self.draw()

    async def handle_panel_click(self, panel: str, x: int, click_count: int) -> None:
        """Set the position at a click on the time line; handle other clicks as the live screen does."""
        if panel != "timeline":
            await super().handle_panel_click(panel, x, click_count)
        elif (fraction := position_at(self.panel_rows("timeline")[0], x)) is not None:
            self.action_seek_to(fraction)

    def action_play(self) -> None:
        """Play or pause; at the end, start again."""
        self._control_player(lambda player: player.play(not player.is_playing))

    def action_step(self, direction: int) -> None:
        """Go to the training's next step, or to its previous one."""
        self._control_player(lambda player: player.step(direction))

    def action_change_speed(self, offset: int) -> None:
        """Play faster or slower."""
        self._control_player(lambda player: player.change_speed(offset))

    def _show_time(self, time_ns: int) -> None:
        self._control_player(lambda player: player.seek(time_ns))

    def action_seek(self, seconds: int) -> None:
        """Go this many seconds forward, or back."""
        self._control_player(lambda player: player.seek(player.position_ns + seconds * SECOND))

    def action_seek_to(self, fraction: float) -> None:
        """Go to a fraction of the run, from 0.0 to 1.0."""
        self._control_player(lambda player: player.seek(int(player.length_ns * fraction)))

    def action_freeze(self) -> None:
        """Do nothing: a playback needs no frozen screen."""

    def action_leave(self, interrupt: bool = False) -> None:
        """Close without a question."""
        if isinstance(self.screen, Dialog):
            self.screen.close_once(None)
        else:
            self.exit("ended")
