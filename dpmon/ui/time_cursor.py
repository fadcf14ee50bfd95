"""The time of a run that the screen shows, and how keys and the clock move it."""

from __future__ import annotations

from dataclasses import dataclass, replace

SPEEDS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 100.0)


@dataclass(frozen=True, slots=True)
class TimeCursor:
    """The time of a run that the screen shows. Times are ns since the run's start.

    An earlier time stands still or plays. A frozen picture stands still, and from there the user can look back: then
    the histories still go until the time of the freeze. A playback shows nothing from after its time, and has a time
    line.
    """

    time_ns: int | None = None
    """The time to show; None for the present, or for the end of a run that has ended."""
    frozen_ns: int | None = None
    """When the picture was frozen; None if it moves, and in a playback."""
    is_playback: bool = False
    is_playing: bool = False
    speed: float = 1.0
    """How much faster than real time it plays."""
    present_ns: int = 0
    """The newest time that can be shown: now, or the end of the run."""
    recorded_ns: int = 0
    """The time until which the records of the run are complete; a freeze keeps it."""
    has_ended: bool = False
    """Whether the run has ended, whatever time is shown."""

    @property
    def position_ns(self) -> int:
        """The time to show."""
        return self.present_ns if self.time_ns is None else self.time_ns

    @property
    def is_frozen(self) -> bool:
        """Whether the picture stands still at the time of the freeze."""
        return self.frozen_ns is not None and self.time_ns == self.frozen_ns

    @property
    def is_looking_back(self) -> bool:
        """Whether the picture shows a time before the freeze."""
        return self.frozen_ns is not None and self.time_ns != self.frozen_ns

    @property
    def shows_past(self) -> bool:
        """Whether an earlier time is shown, in a look back or a playback. A frozen picture does not count."""
        return self.is_playback or self.is_looking_back

    @property
    def can_return(self) -> bool:
        """Whether `esc` returns from an earlier time of a live run to the present."""
        return self.is_looking_back or (self.is_playback and not self.has_ended)

    def return_to_present(self) -> TimeCursor:
        """Return the cursor at the present; the playback of a run that has ended stays one."""
        is_playback = self.is_playback and self.has_ended
        return replace(self, time_ns=None, frozen_ns=None, is_playing=False, is_playback=is_playback)

    def freeze(self) -> TimeCursor:
        """Return the cursor of a frozen picture."""
        return replace(self, time_ns=self.recorded_ns, frozen_ns=self.recorded_ns)

    def seek(self, time_ns: int) -> TimeCursor:
        """Return the cursor at another time: playing or stopped as before, or looking back in a live run."""
        if self.is_playback or self.has_ended:
            if time_ns >= self.present_ns:
                return self.return_to_present()
            return replace(self, time_ns=max(time_ns, 0), frozen_ns=None, is_playback=True)
        frozen_ns = self.recorded_ns if self.frozen_ns is None else self.frozen_ns
        if time_ns >= frozen_ns:
            return self.return_to_present()
        return replace(self, time_ns=max(time_ns, 0), frozen_ns=frozen_ns)

    def play(self) -> TimeCursor:
        """Return the cursor of a playback that plays."""
        return replace(self, frozen_ns=None, is_playback=True, is_playing=True)

    def stop(self) -> TimeCursor:
        """Return the cursor of a playback that stands still."""
        return replace(self, is_playing=False)

    def change_speed(self, offset: int) -> TimeCursor:
        """Return the cursor with the next higher or lower of SPEEDS."""
        index = SPEEDS.index(self.speed) + offset
        return replace(self, speed=SPEEDS[min(max(index, 0), len(SPEEDS) - 1)])

    def advance(self, elapsed_ns: int) -> TimeCursor:
        """Return the cursor after this much real time. A playback stops at the present."""
        return self.seek(self.position_ns + int(elapsed_ns * self.speed)) if self.is_playing else self
