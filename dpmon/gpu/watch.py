"""The threads that ask NVML: one that starts it and counts the GPUs, and one for each GPU.

A call that never returns blocks only its own thread; a GPU then gets a second one. No thread waits for these threads:
samples are composed from the answers that they have stored (`Card.sample`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from dpmon.gpu.card import RETRY_S, SILENT_S, Asker, Card
from dpmon.gpu.nvml import CallFailed, Nvml
from dpmon.gpu.sample import NOT_ASKED

NVML_PERIOD_S = 1.0
"""Shortest period of questions to NVML, because the driver answers while it holds a lock that the training needs."""
MAX_GPUS = 64
_MAX_ASKERS = 2
"""Most threads of one GPU."""
_STACK_BYTES = 1 << 20


class GpuWatch:
    """All GPUs of this machine. `report` is called with a card once a period, usually after its questions."""

    def __init__(
        self, nvml: Nvml, interval_s: float, report: Callable[[Card], None], warn: Callable[[str], None]
    ) -> None:
        """`warn` is called with a text when a GPU fails for a new reason, or is back."""
        self._nvml = nvml
        self._period_s = max(interval_s, NVML_PERIOD_S)
        self._report = report
        self._warn = warn
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._opening_s: float | None = None
        self._absent: str | None = "NVML has not answered yet"
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

    def look(self) -> None:
        """Find calls that do not return: warn, let a second thread ask, and pass on the last answers."""
        now = time.monotonic()
        for card in self.cards:
            card.askers = tuple(asker for asker in card.askers if not asker.ended)
            silences = [asker.silence(now) for asker in card.askers]
            silent = max(silences, default=0.0) >= SILENT_S
            if silent != card.silent:
                card.silent = silent
                self._warn(f"NVML {'does not answer' if silent else 'answers again'} for GPU {card.index}")
            if not silences or (silences[-1] >= SILENT_S and len(silences) < _MAX_ASKERS):
                self._ask_with(card, Asker(card, self._nvml))
            if not silences or silences[-1] >= self._period_s / 2:  # its thread will not pass them on in this period
                self._report(card)

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
        self._threads = [*(each for each in self._threads if each.is_alive()), thread]

    # ---------------------------------------------------------------- the threads

    def _keep_open(self) -> None:
        pause = 0.0
        while not self._stop.wait(pause):
            if not self.cards or self._nvml.uninitialised:
                self._opening_s = time.monotonic()
                try:
                    count, self._absent = self._nvml.count()
                except Exception as error:  # noqa: BLE001 - NVML is tried again
                    count, self._absent = 0, f"NVML cannot count the GPUs: {_words(error)}"
                self._opening_s = None
                for index in range(len(self.cards), min(count, MAX_GPUS)):
                    card = Card(index)
                    asker = Asker(card, self._nvml)
                    self.cards = (*self.cards, card)
                    self._ask_with(card, asker)
            pause = RETRY_S if self._absent is not None else self._period_s

    def _ask_with(self, card: Card, asker: Asker) -> None:
        try:
            self._spawn(lambda: self._ask(card, asker), f"dpmon gpu {card.index}")
        except Exception as error:  # noqa: BLE001 - at the limit of threads; `look` tries it again
            card.askers = tuple(each for each in card.askers if each is not asker)
            self._warn(f"GPU {card.index}: no thread can be started: {_words(error)}")

    def _ask(self, card: Card, asker: Asker) -> None:
        """Ask one GPU until `stop`, or until this thread is left behind."""
        pause = 0.0
        while asker.newest and not self._stop.wait(pause):
            began = time.monotonic()
            if card.handle is not None or began >= card.retry_at_s:
                self._round(card, asker)
            if asker.newest and not self._stop.is_set():
                self._report(card)
            pause = max(0.0, began + self._period_s - time.monotonic())
        asker.ended = True

    def _round(self, card: Card, asker: Asker) -> None:
        was = card.lost
        try:
            asker.round()
        except Exception as error:  # noqa: BLE001 - if the thread died, all later values would be missing
            if asker.newest and not self._stop.is_set():
                reason = _words(error)
                if card.lost != reason:
                    self._warn(f"GPU {card.index}: {reason}")
                card.lose(reason, time.monotonic())
            return
        if was not in ("", card.lost, NOT_ASKED.reason):
            self._warn(f"GPU {card.index} is back")


def _words(error: Exception) -> str:
    return error.reason if isinstance(error, CallFailed) else f"{type(error).__name__}: {error}"
