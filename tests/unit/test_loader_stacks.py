"""Sampling a loader does not collect garbage, because finalizers of the script would run on its thread."""

from __future__ import annotations

import gc
from threading import Thread, get_ident

import pytest

from dpmon.tracer.steps import loader_stacks


@pytest.mark.parametrize("is_collecting", [True, False])
def test_no_garbage_is_collected_by_a_sample(is_collecting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_stacks, "SAMPLE_S", 0.3)
    monkeypatch.setattr(loader_stacks, "INTERVAL_S", 0.001)
    collections = list[int]()

    def note(phase: str, info: object) -> None:
        collections.append(get_ident())

    thresholds, was_collecting = gc.get_threshold(), gc.isenabled()
    thread = Thread(target=loader_stacks._append_samples, args=("/nonexistent/samples",))
    gc.callbacks.append(note)
    try:
        gc.set_threshold(3)  # a sample makes more objects than this
        gc.enable() if is_collecting else gc.disable()
        thread.start()
        ident = thread.ident
        thread.join()
        assert gc.isenabled() == is_collecting
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*thresholds)
        gc.enable() if was_collecting else gc.disable()
    assert collections.count(ident or 0) < 50, "once in a few objects before and after all samples, not in each sample"
