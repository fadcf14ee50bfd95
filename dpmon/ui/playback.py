"""The screen of a run that is over: the same one, as of a time, with a time line and the keys that play it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from textual.binding import Binding, BindingType

from dpmon.run.reader import Pause
from dpmon.run.rundir import ExitInfo, RunError, RunInfo, load_exit, load_info, output_paths
from dpmon.run.standing import newest_stage, stages
from dpmon.store.as_of import AsOf
from dpmon.store.opened import open_store
from dpmon.store.tables import HistoryError
from dpmon.ui.dialogs import Dialog
from dpmon.ui.feed import Feed, Reader
from dpmon.ui.keys import PLAYED
from dpmon.ui.look import Look
from dpmon.ui.monitor import Monitor
from dpmon.ui.scene import SECOND, Playing, Scene, View
from dpmon.ui.timeline import position_at
from dpmon.ui.view import PanelView

SPEEDS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 100.0)


class Player:
    """The clock of a playback, and what a screen asks of a run as of its time.

    Times are ns since the run's start; `clock` is what real time is measured with.
    """

    def __init__(self, directory: Path, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """Stands at the end of the run, stopped. Raises RunError if there is no run, or nothing to be played."""
        self.directory = directory
        self.info: RunInfo = load_info(directory)
        self._end = load_exit(directory)
        try:
            with open_store(directory) as store:
                newest = store.newest_ns()
        except HistoryError as error:
            raise RunError(f"{directory.name} cannot be played back: {error}") from None
        self.length_ns = max(int(self._end.seconds * 1e9) if self._end is not None else 0, newest, 1)
        self._clock = clock
        self._clocked = clock()
        self._position = self.length_ns
        self.playing = False
        self.speed = 1.0

    # ------------------------------------------------------------------------------------------ the clock

    @property
    def position_ns(self) -> int:
        """How far the playback is; moves while it plays, and stops at the end by itself."""
        now = self._clock()
        passed, self._clocked = now - self._clocked, now
        if self.playing:
            self._position += int(max(passed, 0) * self.speed)
            if self._position >= self.length_ns:
                self._position, self.playing = self.length_ns, False
        return self._position

    def now_ns(self) -> int:
        """The same on the monotonic clock of the run: what a screen takes for now."""
        return self.info.start_ns + self.position_ns

    def play(self, playing: bool = True) -> None:
        """Go on, or stop; from the end it begins anew."""
        if playing and self.position_ns >= self.length_ns:
            self.seek(0)
        self._clocked = self._clock()
        self.playing = playing

    def seek(self, position_ns: int) -> None:
        """Set the clock; playing or not stays as it is."""
        _ = self.position_ns
        self._position = min(max(position_ns, 0), self.length_ns)

    def step(self, by: int) -> None:
        """To the end of the next step of the training (`by` 1), or of the one before (-1); stops."""
        self.playing = False
        here = self.position_ns
        with suppress(HistoryError), open_store(self.directory) as store:
            rows = AsOf(store, here if by > 0 else here - 1)
            ends = [end for each in store.processes if (end := rows.step_end(each, forward=by > 0)) is not None]
            if ends:
                self.seek(min(ends) if by > 0 else max(ends))

    def faster(self, by: int) -> None:
        """The next of SPEEDS, or the one before."""
        at = min(range(len(SPEEDS)), key=lambda index: abs(SPEEDS[index] - self.speed))
        _ = self.position_ns  # what has passed until now passed at the old speed
        self.speed = SPEEDS[min(max(at + by, 0), len(SPEEDS) - 1)]

    # ------------------------------------------------------------------------------------------ what a screen asks

    def refresh(self) -> RunInfo:
        """run.json; it changes no more."""
        return self.info

    def close(self) -> None:
        """Nothing is held."""

    def stage(self) -> tuple[str, int] | None:
        """The run's stage at this time, before its first call, and when it began (monotonic ns)."""
        return newest_stage(stages(self.directory, self.now_ns()))

    def waits_for_input(self) -> int | None:
        """Not in the record."""
        return None

    def activities(self) -> Mapping[int, tuple[str, int]]:
        """Not in the record: what a process was in the middle of."""
        return {}

    def exit(self) -> ExitInfo | None:
        """How the run ended, once the playback is there."""
        return self._end if self.position_ns >= self.length_ns else None

    def command_alive(self) -> bool | None:
        """Whether the command ran then."""
        return self.position_ns < self.length_ns

    def request_mode(self, mode: str) -> int:
        """Nobody is there to be asked."""
        return 0

    def request_pause(self, paused: bool) -> int:
        """Nobody is there to be asked."""
        return 0

    def request_sample(self) -> int:
        """Nobody is there to be asked."""
        return 0

    def pause_refusal(self) -> str | None:
        """Why it cannot be paused."""
        return "this is a playback"

    def paused(self) -> Any:
        """Nothing is asked for in what has been."""
        return Pause(False, False, None)

    def pending(self) -> bool:
        """Nothing is."""
        return False

    @property
    def output_paths(self) -> tuple[Path, ...]:
        """The script's output, all of it: when each line was printed is not in the record."""
        return output_paths(self.directory, self.info)


class _PlaybackFeed(Feed):
    """What is known of a run as of the time at which the playback is."""

    def __init__(self, directory: Path, open_player: Callable[[], Player]) -> None:
        super().__init__(directory, self._opened, self._clocked)
        self._open_player = open_player
        self.player: Player | None = None

    def _opened(self) -> Reader:
        self.player = self._open_player()
        return self.player

    def _clocked(self) -> int:
        return 0 if self.player is None else self.player.now_ns()

    def _position_ns(self) -> int | None:
        player = self.player
        return None if player is None or player.position_ns >= player.length_ns else player.position_ns

    def tick(self) -> None:
        """As of a run that goes on; before its end it has not ended."""
        player = self.player
        if player is not None and player.position_ns < player.length_ns:
            self._ended = self._exit = self._gone_ns = None
        super().tick()
        self._see_end()

    def _see_end(self) -> None:
        """The clock may come to the end at any time it is looked at: then the end is known in the same picture."""
        player = self.player
        if player is not None and self._ended is None and player.exit() is not None:
            super().tick()

    def toggle_refusal(self) -> str | None:
        """Nobody is there to be asked."""
        return "this is a playback of a run that is over"

    def pause_refusal(self) -> str | None:
        """Nobody is there to be asked."""
        return "this is a playback; space plays and stops it"

    def can_type(self) -> bool:
        """Nobody is there to read it."""
        return False

    def scene(self, view: View, stopping: str | None = None) -> Scene:
        """With where the playback is."""
        player = self.player
        if player is None:
            return super().scene(view, stopping)
        here = player.position_ns
        self._see_end()
        playing = Playing(here, player.length_ns, player.playing, player.speed)
        return replace(super().scene(view, stopping), now_ns=here, playing=playing, can_type=False)


class Playback(Monitor):
    """Plays one finished run."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding(deed.names, deed.action, show=False) for deed in PLAYED]

    def __init__(
        self,
        directory: Path,
        look: Look,
        *,
        refresh: float = 1.0,
        open_player: Callable[[], Player] | None = None,
        direct: bool = True,
    ) -> None:
        super().__init__(directory, look, refresh=refresh, direct=direct)
        self._playing_feed = _PlaybackFeed(directory, open_player or (lambda: Player(directory)))
        self.feed = self._playing_feed

    @property
    def _player(self) -> Player | None:
        return self._playing_feed.player if not self._dialog_open else None

    def _have(self, do: Callable[[Player], None]) -> None:
        """Have the player do this, and draw at once. The message is cleared: it belongs to another time."""
        player = self._player
        if player is not None:
            do(player)
            self.view = replace(self.view, message=None)
            self.feed.tick()
            self.draw()

    def on_panel_view_picked(self, event: PanelView.Picked) -> None:
        """A click on the time line sets the clock; elsewhere as ever."""
        player = self._player
        if event.panel != "timeline":
            super().on_panel_view_picked(event)
            return
        event.prevent_default()
        if player is not None:
            fraction = position_at(self.panel_rows("timeline")[0], event.x)
            if fraction is not None:
                self.action_seek_to(fraction)

    def action_play(self) -> None:
        """Go on or stop; at the end from the beginning."""
        self._have(lambda player: player.play(not player.playing))

    def action_step(self, by: int) -> None:
        """To the next step of the training, or the one before."""
        self._have(lambda player: player.step(by))

    def action_faster(self, by: int) -> None:
        """Faster or slower."""
        self._have(lambda player: player.faster(by))

    def action_seek(self, seconds: int) -> None:
        """So many seconds further, or back."""
        self._have(lambda player: player.seek(player.position_ns + seconds * SECOND))

    def action_seek_to(self, fraction: float) -> None:
        """To a part of the whole, from 0.0 to 1.0."""
        self._have(lambda player: player.seek(int(player.length_ns * fraction)))

    def action_freeze(self) -> None:
        """There is nothing that would go on behind a frozen picture."""

    def action_leave(self, interrupt: bool = False) -> None:
        """Close; nothing has to be asked."""
        if isinstance(self.screen, Dialog):
            self.screen.settle(None)
        else:
            self.exit("ended")
