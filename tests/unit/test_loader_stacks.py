"""What sampling a loader changes in its process while it lasts: garbage collection, and the switch interval."""

from __future__ import annotations

import gc
import os
import sys
from threading import Thread, get_ident
from types import FrameType

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


def test_a_child_forked_during_sampling_has_the_usual_switch_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    usual_s, children = sys.getswitchinterval(), list[int]()

    def fork(frame: FrameType) -> None:
        if children:
            return
        assert sys.getswitchinterval() == pytest.approx(loader_stacks.SWITCH_INTERVAL_S)
        child = os.fork()
        if not child:
            os._exit(0 if sys.getswitchinterval() == usual_s else 1)
        children.append(os.waitpid(child, 0)[1])

    monkeypatch.setattr(loader_stacks, "SAMPLE_S", 0.3)
    monkeypatch.setattr(loader_stacks, "_find_line", fork)
    loader_stacks._append_samples("/nonexistent/samples")
    assert children == [0]
    assert sys.getswitchinterval() == usual_s
