"""The threads that ask NVML: one that starts it and counts the GPUs, and two for each GPU.

A call that never returns holds up its own thread only. Nobody waits for any of them: what is shown is put together
from what they have left behind (`Card.sample`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from dpmon.gpu.card import RETRY_S, SILENT_S, Asker, Card
from dpmon.gpu.failure import Failure
from dpmon.gpu.nvml import NO_GPU, Nvml
from dpmon.gpu.questions import CHEAP, CHEAP_CALLS, DEAR, DEAR_CALLS, OPENING_CALLS

NVML_PERIOD_S = 1.0
"""NVML is asked no more often, whatever the interval: drivers answer under a lock that training needs too."""
FIRST_S = 0.5
"""For how long after a GPU was found all cheap questions are asked at once, so that its first sample is complete."""
MAX_GPUS = 64
_STACK_BYTES = 1 << 20

_NO_ANSWER_YET = "NVML has not answered yet"


class Watch:
    """All GPUs of this machine. `tell` is called with a card whenever its cheap questions have been answered."""

    def __init__(
        self, nvml: Nvml, interval_s: float, tell: Callable[[Card], None], warn: Callable[[str], None]
    ) -> None:
        """`warn` takes what went wrong, in words, as often as it is seen."""
        self._nvml = nvml
        self._period_s = max(interval_s, NVML_PERIOD_S)
        self._tell = tell
        self._warn = warn
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._opening_s: float | None = None
        self._absent: str | None = _NO_ANSWER_YET
        self.cards: tuple[Card, ...] = ()

    def start(self) -> None:
        """Begin; returns at once."""
        self._spawn(self._keep_open, "dpmon nvml")

    def absent(self) -> str | None:
        """Why there is no GPU, None if there is one."""
        since = self._opening_s
        if self.cards or since is None or time.monotonic() - since < SILENT_S:
            return self._absent
        return f"NVML has not answered for {time.monotonic() - since:.0f} s"

    def stop(self, until_s: float) -> bool:
        """End, at the latest at `until_s` (monotonic); False if a call is in flight then: nothing is shut down."""
        self._stop.set()
        for thread in list(self._threads):
            thread.join(max(0.0, until_s - time.monotonic()))
        return self._nvml.close()

    def _spawn(self, work: Callable[[], None], name: str) -> None:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=work, name=name, daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
        self._threads.append(thread)

    # ---------------------------------------------------------------- the library

    def _keep_open(self) -> None:
        pause = 0.0
        while not self._stop.wait(pause):
            if not self.cards or self._nvml.forgot:
                self._opening_s = time.monotonic()
                self._absent = self._open()
                self._opening_s = None
            pause = RETRY_S if self._absent is not None else self._period_s

    def _open(self) -> str | None:
        """Start the library and a pair of threads for each GPU that is new; why there is none."""
        try:
            absent = self._nvml.open()
            if absent is not None:
                return absent
            count = min(self._nvml.count(), MAX_GPUS)
        except Failure as failure:
            return f"NVML cannot count the GPUs: {failure.reason}"
        except Exception as error:  # noqa: BLE001 - a thread that dies would take every later sample with it
            return f"NVML could not be asked: {type(error).__name__}: {error}"
        if not count and not self.cards:
            return NO_GPU
        for index in range(len(self.cards), count):
            card = Card(index)
            cheap, dear = Asker(card, CHEAP, CHEAP_CALLS), Asker(card, DEAR, DEAR_CALLS)
            self.cards = (*self.cards, card)
            self._spawn(lambda c=card, a=cheap: self._ask(c, a, True), f"dpmon gpu {index}")  # type: ignore[misc]
            self._spawn(lambda c=card, a=dear: self._ask(c, a, False), f"dpmon gpu {index} dear")  # type: ignore[misc]
        return None

    # ---------------------------------------------------------------- one GPU

    def _ask(self, card: Card, asker: Asker, first: bool) -> None:
        """Ask one GPU until the end. The first of its two threads also looks for it, when it is lost, and tells."""
        ask = asker.guarded(self._nvml.guard, time.monotonic)
        pause = 0.0
        while not self._stop.wait(pause):
            began = time.monotonic()
            if not self._nvml.forgot:
                try:
                    self._round(card, asker, ask, first)
                except Exception as error:  # noqa: BLE001 - a thread that dies would take every later sample with it
                    self._warn(f"GPU {card.index} could not be asked: {type(error).__name__}: {error}")
            elif first:
                card.lose("NVML is being started again", began)
                card.retry_at_s = 0.0
            if first and not self._stop.is_set():
                self._tell(card)
            pause = max(0.0, began + self._period_s - time.monotonic())

    def _round(self, card: Card, asker: Asker, ask: Callable[[Callable[[], object]], object], first: bool) -> None:
        calls, first_s = asker.calls, 0.0
        try:
            if card.handle is None:
                if not first or time.monotonic() < card.retry_at_s:
                    return
                was = card.lost if card.opened else ""
                card.open(self._nvml.module, ask)
                calls -= OPENING_CALLS
                if card.opened == 1:
                    first_s = FIRST_S
                if was:
                    self._warn(f"GPU {card.index} is back")
            asker.round(self._nvml.module, ask, time.monotonic, calls, first_s)
        except Failure as failure:
            if self._stop.is_set():
                return
            if card.lost != failure.reason:
                self._warn(f"GPU {card.index}: {failure.reason}")
            card.lose(failure.reason, time.monotonic())
