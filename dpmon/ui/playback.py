"""The screen of a run that is over: the same one, with a time line and the keys that play it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from textual.binding import Binding, BindingType

from dpmon.model import State, fold
from dpmon.model.past import fold_past
from dpmon.run.playback import PlaybackReader
from dpmon.ui.dialogs import Dialog
from dpmon.ui.feed import Feed, Reader
from dpmon.ui.keys import PLAYED
from dpmon.ui.look import Look
from dpmon.ui.monitor import Monitor
from dpmon.ui.scene import Playing, Scene, View
from dpmon.ui.timeline import position_at
from dpmon.ui.view import PanelView

__all__ = ["Playback"]

_SECOND = 1_000_000_000


class _PlaybackFeed(Feed):
    """What is known of a run as of the time at which the playback is."""

    def __init__(self, directory: Path, open_player: Callable[[], PlaybackReader]) -> None:
        super().__init__(directory, self._opened, self._clocked)
        self._open_player = open_player
        self._caught_up = True  # a poll gives all that is due
        self.player: PlaybackReader | None = None
        self._stands: tuple[int, int] | None = None

    def _opened(self) -> Reader:
        self.player = self._open_player()
        return self.player

    def _clocked(self) -> int:
        return 0 if self.player is None else self.player.now_ns()

    def tick(self, budget_s: float | None = None) -> None:
        """As of a run that goes on; before its end it has not ended."""
        player = self.player
        if player is not None and player.position_ns < player.length_ns:
            self._ended = self._exit = self._gone_ns = None
        super().tick(budget_s)
        self._see_end()

    def _see_end(self) -> None:
        """The clock may come to the end at any time it is looked at: then the end is known in the same picture."""
        player = self.player
        if player is not None and self._ended is None and player.exit() is not None:
            super().tick(0.0)

    def _take_in(self, reader: Reader, budget_s: float | None) -> None:
        player = self.player
        if player is None:
            return
        before = player.generation
        records = player.poll()
        if player.generation != before:  # the clock was set: what was known is of another time
            self.state = State()
            for past in player.past():
                self.state = fold_past(self.state, past)
        for record in records:
            self.state = fold(self.state, record)
        self._busy = False
        # Where it stands still as much is compared as a report does.
        stands = (player.generation, player.position_ns) if not player.playing else None
        if stands != self._stands:
            self._stands, self._more = stands, self._to_compare(player) if stands is not None else None

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
        open_player: Callable[[], PlaybackReader] | None = None,
        direct: bool = True,
    ) -> None:
        super().__init__(directory, look, refresh=refresh, direct=direct)
        self._playing_feed = _PlaybackFeed(directory, open_player or (lambda: PlaybackReader(directory)))
        self.feed = self._playing_feed

    @property
    def _player(self) -> PlaybackReader | None:
        return self._playing_feed.player if not self._dialog_open else None

    def _moved(self) -> None:
        """Draw at once what is to be seen now; what was said is of another time."""
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
        player = self._player
        if player is not None:
            player.play(not player.playing)
            self._moved()

    def action_step(self, by: int) -> None:
        """To the next step of the training, or the one before."""
        player = self._player
        if player is not None:
            player.step(by)
            self._moved()

    def action_faster(self, by: int) -> None:
        """Faster or slower."""
        player = self._player
        if player is not None:
            player.faster(by)
            self._moved()

    def action_seek(self, seconds: int) -> None:
        """So many seconds further, or back."""
        player = self._player
        if player is not None:
            player.seek(player.position_ns + seconds * _SECOND)
            self._moved()

    def action_seek_to(self, fraction: float) -> None:
        """To a part of the whole, from 0.0 to 1.0."""
        player = self._player
        if player is not None:
            player.seek(int(player.length_ns * fraction))
            self._moved()

    def action_freeze(self) -> None:
        """There is nothing that would go on behind a frozen picture."""

    def action_leave(self, interrupt: bool = False) -> None:
        """Close; nothing has to be asked."""
        if isinstance(self.screen, Dialog):
            self.screen.settle(None)
        else:
            self.exit("ended")
