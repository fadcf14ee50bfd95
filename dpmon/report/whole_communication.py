"""The communication of the ranks over a whole run."""

from __future__ import annotations

from collections.abc import Mapping

from dpmon.model.communication import Communication, communication, newest_wrappers, ranks_in
from dpmon.store.collective_queries import communicated
from dpmon.store.queries import Store
from dpmon.store.window import Window


def communication_of(store: Store, window: Window, ranks: Mapping[int, int | None]) -> Communication | None:
    """The communication in a window of the whole run; None if no ranks train together. `ranks`: by process."""
    found = ranks_in(window, ranks)
    wrappers = newest_wrappers(event.data for event in store.events("ddp"))
    steps = sum(one.steps for one in found)
    return communication(found, wrappers, communicated(store), steps, lately=False)
