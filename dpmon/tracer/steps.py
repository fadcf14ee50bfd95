"""Turns of the training loop, cut where the script fetches a batch, and what each turn's time went to.

With a DataLoader a turn runs from one fetch to the next. Without one it runs from one step of the first optimizer to
the next; without an optimizer, from one call of the first root module to its next. The phases of a turn are exclusive:
a forward inside an optimizer's closure counts as forward, not twice.

Everything here runs on one thread, the one that made the first traced call; other threads do not disturb it.

This is the hot path. In a training loop the processor's caches hold the training's data and not our code, so that
every function entered costs several times what a warm loop suggests: hence few functions, some of them longer than
elsewhere, and integers rather than objects.
"""

from __future__ import annotations

import struct
import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from time import monotonic_ns
from typing import Any

import torch

from dpmon.record.wire import FAILED, GRAD, STEP_TAG, STEP_WORDS, TRAINING, Untimed, with_extras
from dpmon.ring import HEADER_BYTES, Activity, Frame, Ring
from dpmon.tracer import timing
from dpmon.tracer.frames import drop_frames, named_like
from dpmon.tracer.session import Session

__all__ = ["Steps"]

STALE_STEPS = 64
"""Optimizer steps without a fetch after which a loader no longer counts (a script that keeps using one batch)."""
IDLE_FETCHES = 4
"""Fetches, or steps of the optimizer, without a call after which somebody should look where the calls are."""
UNSEEN_STEPS = 3
"""Steps of an optimizer before the first call, after which somebody should say so."""
MAX_NESTED = 8
"""Optimizers inside optimizers."""
STALE_CALLS = 64
"""Calls without an optimizer step after which an optimizer no longer counts (it was made, but never used)."""

LEARNS = TRAINING | GRAD
"""Flags of a call, neither of which an evaluation's has."""
PLAIN, BUSY = -1, -2
"""Of `Steps.free`: in a call that is traced the short way; in a fetch or a backward pass."""

WORD, BYTE = Activity.WORD, Activity.BYTE
_FRAME = Frame(STEP_WORDS)
_STEP = struct.Struct(STEP_WORDS)
HELD, PAUSE, PAUSE_ANSWERED = Ring.HELD, Ring.PAUSE, Ring.PAUSE_ANSWERED
QUICK_NS = 2_000_000
QUICK_TURNS = 4
FIRST_TURNS = 64
MAX_HELD = 32
"""Turns shorter than QUICK_NS are written up to MAX_HELD at a time, and the calls of such a turn are not staged, once
QUICK_TURNS of them have followed each other, and never among the first: a short run is recorded to its last call."""


class Steps:
    """The clock of the training loop of one process.

    A phase's time is 0 until it has run in the turn. Whoever times a phase saves `inner`, sets it to 0, runs the
    phase, takes what `inner` then is off the phase's own time, and leaves in `inner` the saved value and all of its
    time: what runs inside a phase is counted once.
    """

    __slots__ = (
        "ahead",
        "backward",
        "backwards",
        "boundary",
        "boundary_lives",
        "brought",
        "calls",
        "copies",
        "copying",
        "count",
        "countdown",
        "data",
        "due",
        "exhausted",
        "failed",
        "fetcher",
        "fetches",
        "first",
        "forward",
        "free",
        "hurry",
        "inner",
        "last",
        "late",
        "learns",
        "loader",
        "looking",
        "map",
        "mine",
        "mode",
        "number",
        "on_backward",
        "on_close",
        "on_end",
        "on_first_fetch",
        "on_first_fetched",
        "on_idle",
        "on_pause",
        "on_step",
        "on_unseen",
        "open",
        "optimizer",
        "other",
        "ours",
        "outer",
        "previous",
        "quick",
        "ring",
        "root",
        "samples",
        "session",
        "since_fetch",
        "since_optimizer",
        "start",
        "stepped",
        "stepping",
        "thread",
        "unseen",
        "words",
    )

    def __init__(self, session: Session) -> None:
        self.session = session
        self.on_close: Callable[[], int] = lambda: 1 << 30
        """Called when `countdown` turns have ended; returns the next countdown, and adds to `ours` what it took."""
        self.on_unseen: Callable[[], None] = lambda: None
        """Called when an optimizer steps and steps, and no call was ever seen."""
        self.on_end: Callable[[], None] = lambda: None
        """Called when a loader has come to its end."""
        self.on_idle: Callable[[], None] = lambda: None
        self.on_first_fetch: Callable[[Any], bool] = lambda iterator: False
        """Called with a loader's iterator that fetches before the first call; returns whether to report the end."""
        self.on_first_fetched: Callable[[BaseException | None], None] = lambda error: None
        self.on_pause: Callable[[int], None] = lambda step: None
        """Called between two turns, with the number of the one that is over, when a reader has asked for a pause."""
        self.on_step: Callable[[Any], int] = lambda optimizer: 0
        """Called when an optimizer stepped on the slow path, as its first step does; returns the time (ns) it took."""
        self.reset()

    def reset(self) -> None:
        """Start afresh, as after a fork."""
        self.map: Any = bytearray(HEADER_BYTES)
        self.words: Any = memoryview(self.map).cast("Q")
        """The ring's memory, once there is a ring: see `attach`."""
        self.on_backward: Callable[[], int] | None = None
        """Called when a backward pass is over; returns the time (ns) that the call took: see `watch_backward`."""
        self.thread = 0
        """The training thread; 0 before the first call, when any may turn out to be it."""
        self.number = 0
        """The turn under way, or the last one: 1 for the first."""
        self.calls = 0
        self.failed = 0
        """Whether the turn's last call raised: if Python comes to its end then, that was no turn."""
        self.countdown = 1
        self.inner = 0
        self.count = 0
        """Calls so far."""
        self.free = self.mine = 0
        """`free` is the training thread's number while it is between two phases and all is as usual, else 0, PLAIN,
        BUSY or, in an optimizer, minus that number: see `settle`. `mine` is what a short way sets it to at its end: 0
        once the tracer has given up."""
        self.ring: Ring | None = None
        self.quick = False
        """Whether turns, which are the loader's, are so short that some may be held back."""
        self.hurry = FIRST_TURNS
        """Short turns yet to come before any is held back."""
        self.backwards = 0
        """1 while the training thread is in a backward pass: modules run in it are recomputed, not called."""
        self.unseen = 0
        self.ours = 0
        """Time (ns) that `on_close` took for something that belongs to no turn."""
        self.learns = False
        """Whether the training thread has gone backward or stepped: then it is the right one."""
        self.due = False
        """An optimizer stepped inside a backward pass, where no turn can end."""
        self.late = False
        """Without a loader: an optimizer stepped inside a call, so the step ends with that call."""
        self.open = False
        self.samples = -1
        self.ahead = 0
        """Number of batches fetched directly after another one; each may have its own call in the same step."""
        self.previous = (0, 0)
        """While `ahead` is not 0: the module of the last call that learns, and the value of `backward` then."""
        self.mode = 0
        self.start = self.last = 0
        self.data = self.forward = self.backward = self.optimizer = 0
        self.copies = self.brought = 0
        """Time (ns) in copies to devices, and their bytes: see dpmon.tracer.copies."""
        self.copying = False
        self.loader = False
        self.exhausted = False
        """Whether the loader has ended and nothing was fetched since. A step that begins now ends with its last phase,
        not at the next loop's fetch. (An iterator that fetches one batch ahead returns its last batch now.)"""
        self.looking = False
        """Without a loader: whether the previous step was an evaluation."""
        self.fetches = 0
        self.since_fetch = 1
        self.fetcher = 0
        self.boundary = self.other = 0
        self.first = 0
        """The optimizer that ended the first step, until it or the boundary steps again. A step ends with the last
        optimizer of the loop's body, so the optimizers before it belong to the step."""
        self.boundary_lives: Callable[[], Any] = lambda: None
        self.since_optimizer = 0
        """Outermost calls, but for those that went a short way: without a loader no more than one a turn does."""
        self.root = 0
        self.stepped = self.outer = 0
        """When the optimizer that steps now began, 0 if none does, and `inner` as it was then."""
        self.stepping: list[tuple[int, int]] = []

    def attach(self, ring: Ring) -> None:
        """Tell the ring from now on what the training thread does."""
        self.ring, self.map, self.words = ring, ring.map, ring.words
        if self.open:  # its batch was fetched before the ring existed
            self.words[WORD] = self.start << 3

    def detach(self) -> None:
        """No short way is gone from now on: phases are timed on their devices, too, which the long ways do."""
        self.ring = None
        self.free = self.mine = 0
        self.quick = False

    def watch_backward(self, on_backward: Callable[[], int] | None) -> None:
        """Call `on_backward` after every backward pass from the next step on; all phases then take their slow path."""
        self.on_backward = on_backward
        if on_backward is not None:
            self.mine = 0

    def settle(self, was: int) -> None:
        """A phase that went the long way is over; `was` is what `free` was before it.

        Fetch, call, backward and optimizer have a short way each, for the training thread between two phases, and
        `free` says that it may be gone: nobody is inside of anything, the ring is there, a turn is open. A short way
        need not look at any of that, and leaves things so. Whatever is unusual, an exception included, leaves 0 in
        `free`; then the long ways are gone, which look at everything, until all is as usual again.
        """
        if was == 0 or was == self.thread:
            was = 0
            if (
                self.open
                and (self.loader or self.boundary)
                and self.ring is not None
                and self.thread == get_ident()
                and self.on_backward is None
                and not (self.backwards or self.stepped or self.stepping or self.due)
                and not (self.session.off or self.session.local.depth or self.exhausted)
            ):
                was = self.mine = self.thread
        self.free = was

    def inside(self) -> bool:
        """Whether this thread is in a call that is traced the short way."""
        return self.free == PLAIN and self.thread == get_ident()

    # ---------------------------------------------------------------- data

    def fetching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The traced form of the DataLoader iterator's __next__: what the loop waits for, where its turns begin."""
        session = self.session
        clock = monotonic_ns

        def __next__(iterator: Any) -> Any:
            began = 0
            try:
                if self.free != get_ident() or not self.calls:
                    return any_fetch(iterator)
                began = clock()
                self.free = BUSY
                try:
                    began = self.turn(began)
                    self.fetches = 1
                    self.since_fetch = 0
                    self.loader = True
                    self.words[WORD] = began << 3 | Activity.DATA
                except Exception as error:  # noqa: BLE001 - ours must not reach the script
                    session.fault("fetch", error)
                batch = original(iterator)
            except BaseException as error:
                if began:
                    fetched(began, 0, 0, True)
                drop_frames(error)
                iterator = None
                raise
            self.free = self.mine  # first: no signal is handled between the fetch and here
            self.last = now = clock()
            self.data += now - began - self.inner
            self.map[BYTE] = Activity.OTHER  # what comes now is the script's own
            return batch

        def any_fetch(iterator: Any) -> Any:
            thread, was = self.thread, self.free
            if session.off or (thread and thread != get_ident()):
                return original(iterator)
            began = outer = 0
            noted = again = False
            try:
                self.free = BUSY
                if not thread:
                    self.fetcher = get_ident()
                began = monotonic_ns()
                goes_on = self.loader and not self.exhausted
                self.loader = True
                self.since_fetch = 0
                self.fetches = 1 if self.calls else self.fetches + 1
                if not self.open or self.calls:
                    if self.open and self.stepped:  # it raised, and never said that it ended
                        self.stepped = 0
                        self.stepping.clear()
                        was = 0 if was == -self.thread else was
                    ends = 0 if goes_on or self.last <= self.start else self.last
                    began = self._next(began, was != PLAIN, ends)
                    if session.timing is not None:
                        began = monotonic_ns()  # what reading the devices' times took is no wait for data
                else:
                    again = was != BUSY
                if self.exhausted:
                    self.ahead = min(self.ahead, 1)  # the outer loader may have read one batch ahead
                self.exhausted = False
                if self.fetches == IDLE_FETCHES:
                    self.on_idle()
                self.words[WORD] = began << 3 | Activity.DATA
                outer = self.inner
                self.inner = 0
                if session.timing is not None:
                    session.timing.begin(timing.DATA)
                noted = session.ring is None and self.on_first_fetch(iterator)
            except Exception as error:  # noqa: BLE001 - ours must not reach the script
                session.fault("fetch", error)
            exhausted = True
            try:
                batch = original(iterator)
                exhausted = False
                self.ahead += again
                return batch
            finally:
                if noted:
                    self.on_first_fetched(sys.exc_info()[1] if exhausted else None)
                if thread or self.thread in (0, get_ident()):  # else this fetch turned out to be another loop's
                    fetched(began, outer, was, exhausted)

        def fetched(began: int, outer: int, was: int, exhausted: bool) -> None:
            try:
                now = self.last = monotonic_ns()
                took = now - began
                self.data += took - self.inner
                self.inner = outer + took
                self.map[BYTE] = Activity.OTHER
                if session.timing is not None:
                    session.timing.end(timing.DATA)
                if exhausted and was != BUSY:  # a loader that a fetch goes through within is no end of the turn
                    self._abandon()
                self.settle(was)
            except Exception as error:  # noqa: BLE001 - the batch is there, whatever we make of it
                session.fault("fetch", error)

        return named_like(__next__, original)

    def _abandon(self) -> None:
        # The loader is at its end: what follows is no turn until the next fetch.
        self.exhausted = True
        if self.open and not self.calls:
            self.open = False
            self.number -= 1
            if self.session.timing is not None:
                self.session.timing.no_step()
        if self.ring is not None:
            self.ring.flush()
        elif self.session.timing is not None:
            self.session.timing.read()
        self.on_end()

    def copy_ends(self, began: int, outer: int, activity: int, size: int) -> None:
        """A copy to a device is over, which brought so many bytes; `outer` and `activity` as they were before it."""
        try:
            now = self.last = monotonic_ns()
            took = now - began
            self.copies += took - self.inner
            self.brought += size
            self.inner = outer + took
            self.map[BYTE] = activity
            if self.session.timing is not None:
                self.session.timing.end(timing.COPY)
        except Exception as error:  # noqa: BLE001 - the copy is there
            self.session.fault("copy", error, fatal=False)

    # ---------------------------------------------------------------- calls

    def call_begins(self, root: int, mode: int, now: int, outside: bool = True) -> int:
        """An outermost call of the module with id `root` on the training thread; `number` is its turn.

        Returns when it begins: later than `now` if the training was paused before it; `outside` as for `_next`.
        """
        if self.calls:
            if self.late:
                now = max(now, self._next(self.last, outside))
                self.mode = mode
            ends = None if self.loader or not self.calls else self._ends_before(root, now)
            if ends is not None:
                now = self._next(now, outside, ends)
                self.mode = mode
        else:
            if not self.thread:
                self._found_thread()
            if not self.open:
                self._begin(self.stepped or now)  # in the closure of an optimizer the turn began with it
            self.mode = mode
            if not self.root:
                self.root = root
        self.calls += 1
        self.since_optimizer += 1
        self.fetches = 0
        self.map[BYTE] = Activity.FORWARD
        if self.session.timing is not None:
            self.session.timing.begin(timing.FORWARD)
        return now

    def _found_thread(self) -> None:
        """The first call: this is the training thread. Batches that another one fetched say nothing of its turns."""
        self.thread = get_ident()
        if self.fetcher not in (0, self.thread):
            self.free = 0
            self.loader = self.quick = False
            self.since_fetch = 1
            if self.open:
                self.open = False
                self.number -= 1

    def _moves_here(self) -> bool:
        """Whether this thread turns out to be the training thread: it goes backward, and the one taken for it never."""
        if self.learns or not self.thread or torch._C._current_graph_task_id() != -1:
            return False
        if self.open and self.calls:
            self.close(self.last)
        elif self.open:
            self.number -= 1
        self.thread = get_ident()
        self.free = self.mine = 0
        self.loader = self.open = self.quick = False
        self.since_fetch = 1
        self.calls = self.inner = 0
        return True

    def _ends_before(self, root: int, now: int) -> int | None:
        """The end of the step if a call of the module with id `root` at `now` begins another one, without a loader.

        Training after an evaluation does not belong to the evaluation, nor does the time between them.
        """
        looks = self._evaluates()
        learns = looks and torch.is_grad_enabled()
        if root != self.root:
            return self.last if learns and self.looking else None
        if not looks and not self._by_calls():
            return None
        self.looking = looks
        return self.last if learns else now

    def _evaluates(self) -> bool:
        # A loop that only looks, without a loader: each of its calls is a turn.
        return self.samples < -1 and not (self.backward or self.stepped)

    def _by_calls(self) -> bool:
        if self.stepped:  # in a closure: the optimizer's step is not over
            return False
        # With an optimizer the turn ends there; with gradients but none yet, it will step soon, or never.
        return self.since_optimizer > STALE_CALLS or not (self.boundary or self.backward)

    def ran_as(self, mode: int) -> None:
        """The turn's first call ran in another mode than it began in."""
        if self.calls == 1:
            self.mode = mode

    def call_ends(self, root: int, began: int, now: int, outer: int, rows: int, flags: int) -> None:
        """The outermost call of `root` is over; `rows` of its batch or -1; `flags` as in dpmon.record.wire."""
        if self.session.timing is not None:
            self.session.timing.end(timing.FORWARD)
        self.forward += now - began - self.inner
        self.inner = outer + now - began
        self.last = now
        if not flags & LEARNS:
            self.looks(rows)
        elif self.ahead:
            self.add(root, rows)
        elif rows > self.samples:
            self.samples = rows
        self.fetches = 0
        self.failed = flags & FAILED

    def stage(self, values: tuple[int, ...], now: int) -> None:
        """Keep the record of a call that has ended: see Ring.stage and, in a short turn, Ring.held."""
        ring: Any = self.ring
        if self.quick:
            before, ring.staged = ring.staged, values
            self.words[HELD] += 1
            if before is not None:
                held = ring.held
                held += ((before, None, None),)
            if now - self.start >= QUICK_NS:
                self.quick = False
                ring.flush()
        else:
            ring.stage(values)

    def add(self, root: int, rows: int) -> None:
        """Count the rows of a call that learns. If batches were fetched ahead, add the rows of a micro-batch.

        A micro-batch calls the same module as the previous call, with a backward pass and no optimizer step between.
        A GAN makes several calls per batch, but not in this way.
        """
        before, self.previous = self.previous, (root, self.backward)
        if self.calls > 1 and before[0] == root and before[1] != self.backward and not self.optimizer:
            self.ahead -= 1
            self.samples += rows
        elif rows > self.samples:
            self.samples = rows

    def looks(self, rows: int) -> None:
        """The call that ends is one of an evaluation: its rows count only in a turn that has no others.

        So `samples` is -1 while nothing is known, below that (-3 less the rows) for an evaluation's rows.
        """
        if self.samples < 0:
            self.samples = min(self.samples, -3 - rows)

    # ---------------------------------------------------------------- backward and optimizer

    def going_back(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The traced form of the autograd engine's entry, which Tensor.backward and autograd.grad all go through."""
        is_compiling = torch.compiler.is_dynamo_compiling
        clock = monotonic_ns

        def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(*args, **kwargs)
            began = 0
            try:
                if self.free != get_ident():
                    return any_backward(args, kwargs)
                began = clock()
                self.free = BUSY
                self.backwards = 1
                self.learns = True
                self.map[BYTE] = Activity.BACKWARD
                self.inner = 0
                result = original(*args, **kwargs)
            except BaseException as error:
                if began:
                    self.backwards = 0  # before a call: a signal may be handled there
                    gone_back(began, 0, 0)
                drop_frames(error)
                args, kwargs = (), {}
                raise
            self.backwards = 0
            self.free = self.mine
            self.last = now = clock()
            self.backward += now - began - self.inner
            if self.due:
                going_on(now, 0)
            return result

        def any_backward(args: Any, kwargs: Any) -> Any:
            if self.backwards or (self.thread != get_ident() and not self._moves_here()):
                return original(*args, **kwargs)
            was, outer, began = self.free, self.inner, monotonic_ns()
            try:
                self.free = BUSY
                self.backwards = 1
                self.learns = True
                self.map[BYTE] = Activity.BACKWARD
                self.inner = 0
                if self.session.timing is not None:
                    on_devices(self.session.timing.begin)
                return original(*args, **kwargs)
            finally:
                self.backwards = 0
                gone_back(began, outer, was)

        def gone_back(began: int, outer: int, was: int) -> None:
            now = self.last = monotonic_ns()
            took = now - began
            self.backward += took - self.inner
            self.inner = outer + took
            if self.session.timing is not None:
                on_devices(self.session.timing.end)
            going_on(now, was)

        def on_devices(mark: Callable[[int], None]) -> None:
            try:
                mark(timing.BACKWARD)
            except Exception as error:  # noqa: BLE001 - the gradients are worth more than their time
                self.session.fault("events", error, fatal=False)

        def going_on(now: int, was: int) -> None:
            try:
                if self.on_backward is not None:
                    took = self.on_backward()
                    self.inner += took  # not part of the enclosing phase
                    now += took
                if self.due:
                    self._optimizer_ends_turn(now)
                self.settle(was)
            except Exception as error:  # noqa: BLE001 - the gradients are there
                self.session.fault("backward", error)

        return named_like(_engine_run_backward, original)

    def optimizer_hooks(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """The global optimizer pre- and post-hook."""
        fault = self.session.fault
        is_compiling = torch.compiler.is_dynamo_compiling  # an optimizer's step may be compiled, with its hooks in it
        clock = monotonic_ns

        def before(optimizer: Any, args: Any, kwargs: Any) -> None:
            if is_compiling():
                return
            try:
                me = get_ident()
                if self.free != me:
                    self._optimizer_begins()
                    return
                self.free = -me
                self.inner = 0
                self.map[BYTE] = Activity.OPTIMIZER
                self.stepped = clock()
            except Exception as error:  # noqa: BLE001 - ours must not reach the script
                fault("optimizer", error)

        def after(optimizer: Any, args: Any, kwargs: Any) -> None:
            if is_compiling():
                return
            try:
                if (
                    self.free != -get_ident()
                    or self.boundary != id(optimizer)
                    or self.since_fetch  # or there is no loader, and the turn ends here
                    or self.stepping
                ):
                    self._optimizer_ends(optimizer)
                    return
                self.last = now = clock()
                self.optimizer += now - self.stepped - self.inner
                self.stepped = self.since_optimizer = self.other = 0
                self.since_fetch = 1
                self.free = self.mine
            except Exception as error:  # noqa: BLE001 - the step is done, whatever we make of it
                fault("optimizer", error)

        return before, after

    def _optimizer_begins(self) -> None:
        if self.thread and self.thread != get_ident():
            return
        if self.stepped:  # an optimizer inside an optimizer, or one that raised, and never said that it ended
            around = _steps_around()
            self.stepping.append((self.stepped, self.outer))
            self._forget_steps(min(around, MAX_NESTED))
        self.outer = self.inner
        self.inner = 0
        self.map[BYTE] = Activity.OPTIMIZER
        if self.session.timing is not None:
            self.session.timing.begin(timing.OPTIMIZER)
        self.stepped = monotonic_ns()

    def _forget_steps(self, around: int) -> None:
        """Of the optimizers that are stepping, only so many are, the outermost; the others have raised."""
        for _, outer in self.stepping[around:]:
            self.inner += outer
        del self.stepping[around:]

    def _optimizer_ends(self, optimizer: Any) -> None:
        """An optimizer has stepped; without a loader that is the end of a turn."""
        now = monotonic_ns()
        mine = self.thread == get_ident()
        self._optimizer_ended(optimizer, now)
        if mine and not self.stepped:
            self.settle(0 if self.free == -self.thread else self.free)

    def _optimizer_ended(self, optimizer: Any, now: int) -> None:
        if not self.stepped or self.thread != get_ident():
            if not self.thread:  # before the first call: no turn, and nobody's time
                self.stepped = 0
                self.stepping.clear()
                self.unseen += 1
                if self.unseen == UNSEEN_STEPS:
                    self.on_unseen()
            self.on_step(optimizer)
            return
        self.learns = True
        if self.session.timing is not None:
            self.session.timing.end(timing.OPTIMIZER)
        if self.stepping and len(self.stepping) > (around := _steps_around()):
            self.inner += self.outer
            self.stepped, self.outer = self.stepping[around]
            self._forget_steps(around + 1)
            del self.stepping[around:]
        took = now - self.stepped
        self.optimizer += took - self.inner
        self.inner = self.outer + took
        self.last = now
        self.stepped = 0
        if self.stepping:
            self.stepped, self.outer = self.stepping.pop()
        took = self.on_step(optimizer)
        self.inner += took
        now += took
        self.since_optimizer = 0
        if self.stepped:  # a part of the one that steps around it, which is the loop's
            return
        if self.boundary != id(optimizer):
            if self.other != id(optimizer) and self.boundary_lives() is not None:
                if self.first and self.first != id(optimizer):  # new, so it comes later in the loop's body
                    self.boundary = id(optimizer)
                    self.boundary_lives = weakref.ref(optimizer)
                else:
                    self.other = id(optimizer)
                    self.first = 0
                return
            # The first optimizer, or the first after the boundary has gone, or one that stepped twice without it.
            self.first = 0 if self.boundary else id(optimizer)
            self.boundary = id(optimizer)
            self.boundary_lives = weakref.ref(optimizer)
        else:
            self.first = 0
        self.other = 0
        if self.backwards:
            self.due = True
            return
        if not self.loader and (self.free == PLAIN or self.session.local.depth):
            self.late = True
            return
        self._optimizer_ends_turn(now)

    def _optimizer_ends_turn(self, now: int) -> None:
        self.due = False
        self.since_fetch += 1
        if self.since_fetch > STALE_STEPS:
            self.loader = self.quick = self.exhausted = False
        if self.loader or not self.open or self.session.off:
            return
        if self.calls:
            self._next(now)
        else:
            self.fetches += 1
            if self.fetches == IDLE_FETCHES:
                self.on_idle()

    # ---------------------------------------------------------------- boundaries

    def _begin(self, now: int) -> None:
        self.number += 1
        self.open = True
        self.calls = self.failed = 0
        self.late = False
        self.samples = -1
        self.start = now
        self.data = self.forward = self.backward = self.optimizer = 0
        self.inner = self.copies = self.brought = 0
        if not self.loader:
            self.words[WORD] = now << 3

    def _next(self, now: int, outside: bool = True, ends: int = 0) -> int:
        """Begin the next step at `now`; an open step ends at `ends` (0: also at `now`).

        Return when the next step began: later than `now` if we measured something or the training was paused.
        `outside`: this is not within a call, so the training may be paused here.
        """
        ended = self.open
        if ended:
            if self.backward or self.optimizer:
                self.looking = False
            self.close(ends or now)
        self._begin(now)
        if ended:
            self.countdown -= 1
            if self.countdown <= 0:
                now = self._look(now)
        words = self.words
        if words[PAUSE] != words[PAUSE_ANSWERED] and outside and self.free != PLAIN and not self.session.local.depth:
            now = self._pause(now)
        return now

    def turn(self, now: int) -> int:
        """The turn is over at `now` and the next begins: `_next`, written out for what is usual."""
        ring = self.ring
        if ring is None:
            return self._next(now)
        staged, ring.staged = ring.staged, None
        start = self.start
        held = ring.held
        step = (
            STEP_TAG | self.mode << 8,
            self.number,
            start,
            now - start,
            self.samples if self.samples >= -1 else -3 - self.samples,
            self.data or -1,
            self.forward or -1,
            self.backward or -1,
            self.optimizer or -1,
        )
        at_once = False
        # No call until all of it is done: a signal would be handled there, and the turn be written twice.
        if staged is not None:
            self.words[HELD] += 1
            held += ((staged, step, None),)
        elif held:
            self.words[HELD] += 1
            held += ((step, None, _FRAME),)
        else:
            at_once = True
        self.number += 1
        self.samples = -1
        self.start = now
        self.calls = self.failed = self.data = self.forward = self.backward = self.optimizer = self.inner = 0
        if at_once or not self.quick or now - start >= QUICK_NS or len(held) >= MAX_HELD:
            if now - start >= QUICK_NS:
                self.hurry = max(self.hurry, QUICK_TURNS)
            elif self.hurry:
                self.hurry -= 1
            self.quick = not self.hurry
            if at_once:
                ring.put(_FRAME, step)
            else:
                ring.flush()
            if ring.head >= self.session.renew_at:
                self.session.renew()
            words = self.words
            if words[PAUSE] != words[PAUSE_ANSWERED]:
                now = self._pause(now)
        self.countdown -= 1
        if self.countdown <= 0:
            now = self._look(now)
        return now

    def _look(self, now: int) -> int:
        """Do what is done now and then; the turn that began at `now` is put off by what that took, if it was much."""
        self.ours = 0
        self.countdown = self.on_close()
        if self.ours:
            self.start = now = now + self.ours
        return now

    def _pause(self, now: int) -> int:
        """Wait for as long as the training is to be paused; the turn that began at `now` is put off by that."""
        began = monotonic_ns()
        was, self.free = self.free, 0  # and 0 it stays after an exception: see `settle`
        try:
            self.on_pause(self.number - 1)
            self.free = was
        except Exception as error:  # noqa: BLE001 - ours must not reach the script
            self.session.fault("pause", error, fatal=False)
            self.free = was
        finally:
            self.start = now = now + monotonic_ns() - began
            self.words[WORD] = now << 3
        return now

    def close(self, now: int) -> None:
        """The turn is over at `now`: write it, together with its call if that is staged."""
        self.open = False
        start = self.start
        session = self.session
        ring = session.ring
        if ring is not None:
            step = (
                STEP_TAG | self.mode << 8,
                self.number,
                start,
                now - start,
                self.samples if self.samples >= -1 else -3 - self.samples,
                self.data or -1,
                self.forward or -1,
                self.backward or -1,
                self.optimizer or -1,
            )
            if session.timing is not None:
                payload = _STEP.pack(*step)
                if self.copies:
                    payload = with_extras(payload, {"copy": self.copies, "copied_bytes": self.brought})
                session.timing.step(payload)
                return
            staged, ring.staged = ring.staged, None
            if staged is not None:
                self.words[HELD] += 1
                ring.held.append((staged, step, None))
            ring.flush()
            if staged is None:
                ring.put(_FRAME, step)
            if ring.head >= session.renew_at:
                session.renew()

    def _is_cut(self) -> bool:
        """Whether an exception (an interrupt, say) ends a turn that was to learn before it did: no evaluation."""
        learns = self.samples >= -1 and not (self.backward or self.optimizer)
        return learns and getattr(sys, "last_type", None) is not None

    def at_exit(self) -> None:
        """The process ends: write the turn under way, up to the end of its last phase."""
        try:
            if self.open and self.calls and not self.failed and not self._is_cut():
                self.close(self.last)
            if self.session.timing is not None:
                self.session.timing.read(Untimed.ENDED)
            if self.session.ring is not None:
                self.session.ring.flush()
                self.session.ring.activity(Activity.ENDED, monotonic_ns())
        except Exception as error:  # noqa: BLE001 - the interpreter is ending
            self.session.fault("exit", error)


def _steps_around() -> int:
    """Of an optimizer that begins to step: how many others it is within, by what is on the stack."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    code = frame.f_code if frame is not None else None  # torch's function around every step, which calls the hooks
    found = 0
    while frame is not None:
        frame = frame.f_back
        found += frame is not None and frame.f_code is code
    return found
