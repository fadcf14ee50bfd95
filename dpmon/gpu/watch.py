"""The threads that ask NVML: one that starts it and counts the GPUs, and two for each GPU.

A call that never returns blocks only its own thread. No thread waits for these threads: samples are composed from the
values that they have stored (`Card.sample`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from dpmon.gpu.card import RETRY_S, SILENT_S, Asker, Card
from dpmon.gpu.failure import CallFailed
from dpmon.gpu.nvml import NO_GPU, Nvml
from dpmon.gpu.questions import CHEAP, CHEAP_CALLS, EXPENSIVE, EXPENSIVE_CALLS, OPENING_CALLS

NVML_PERIOD_S = 1.0
"""Shortest period of questions to NVML, whatever the interval: the driver answers under a lock that training needs."""
FIRST_S = 0.5
"""For this time after a GPU is found, all cheap questions are asked at once: its first sample has the answers."""
MAX_GPUS = 64
_STACK_BYTES = 1 << 20

_NO_ANSWER_YET = "NVML has not answered yet"


class GpuWatch:
    """All GPUs of this machine. `tell` is called with a card after each round of cheap questions."""

    def __init__(
        self, nvml: Nvml, interval_s: float, tell: Callable[[Card], None], warn: Callable[[str], None]
    ) -> None:
        """`warn` is called with a text when a GPU fails for a new reason, or is back."""
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
        """Start the threads; returns at once."""
        self._spawn(self._keep_open, "dpmon nvml")

    def absent(self) -> str | None:
        """Return why there is no GPU; None if there is one."""
        since = self._opening_s
        if self.cards or since is None or time.monotonic() - since < SILENT_S:
            return self._absent
        return f"NVML has not answered for {time.monotonic() - since:.0f} s"

    def stop(self, until_s: float) -> bool:
        """End by `until_s` (monotonic). Return False, without a shutdown, if a call is still in flight."""
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
            if not self.cards or self._nvml.uninitialised:
                self._opening_s = time.monotonic()
                self._absent = self._open()
                self._opening_s = None
            pause = RETRY_S if self._absent is not None else self._period_s

    def _open(self) -> str | None:
        """Start the library, and two threads for each new GPU. Return why there is no GPU, or None."""
        try:
            absent = self._nvml.open()
            if absent is not None:
                return absent
            count = min(self._nvml.count(), MAX_GPUS)
        except CallFailed as failure:
            return f"NVML cannot count the GPUs: {failure.reason}"
        except Exception as error:  # noqa: BLE001 - if the thread died, all later samples would be missing
            return f"NVML failed: {type(error).__name__}: {error}"
        if not count and not self.cards:
            return NO_GPU
        for index in range(len(self.cards), count):
            card = Card(index)
            cheap, expensive = Asker(card, CHEAP, CHEAP_CALLS), Asker(card, EXPENSIVE, EXPENSIVE_CALLS)
            self.cards = (*self.cards, card)
            self._spawn(lambda c=card, a=cheap: self._ask(c, a, True), f"dpmon gpu {index}")  # type: ignore[misc]
            self._spawn(lambda c=card, a=expensive: self._ask(c, a, False), f"dpmon gpu {index} expensive")  # type: ignore[misc]
        return None

    # ---------------------------------------------------------------- one GPU

    def _ask(self, card: Card, asker: Asker, first: bool) -> None:
        """Ask one GPU until `stop`. The first of its two threads also looks for a lost GPU, and calls `tell`."""
        ask = asker.guarded(self._nvml.guard, time.monotonic)
        pause = 0.0
        while not self._stop.wait(pause):
            began = time.monotonic()
            if not self._nvml.uninitialised:
                try:
                    self._round(card, asker, ask, first)
                except Exception as error:  # noqa: BLE001 - if the thread died, all later samples would be missing
                    self._warn(f"GPU {card.index}: NVML failed: {type(error).__name__}: {error}")
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
        except CallFailed as failure:
            if self._stop.is_set():
                return
            if card.lost != failure.reason:
                self._warn(f"GPU {card.index}: {failure.reason}")
            card.lose(failure.reason, time.monotonic())
