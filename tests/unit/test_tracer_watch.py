"""What the thread that watches writes: sequence numbers of process groups, and stacks."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from dpmon.span_reader import SpanReader
from dpmon.span_ring import HEADER_BYTES, MAX_GROUPS, NO_NUMBER, HeaderWord, SpanRing
from dpmon.tracer import responder_thread
from support.run_harness import wait_for


@pytest.fixture
def words() -> memoryview:
    """The words of a ring's header."""
    return memoryview(bytearray(HEADER_BYTES)).cast("Q")


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    begin()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def begin() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def numbers(words: memoryview) -> list[int]:
    responder_thread.write_group_sequences(words)
    found = []
    for at in range(HeaderWord.GROUPS, HeaderWord.GROUPS + 2 * MAX_GROUPS, 2):
        if not words[at]:
            break
        found.append(words[at + 1])
    return found


def test_the_numbers_are_those_of_the_collectives_that_were_started(words: memoryview, alone: None) -> None:
    (first,) = numbers(words)
    for _ in range(7):
        dist.all_reduce(torch.ones(2))
    dist.barrier()
    assert numbers(words) == [first + 8]
    group = dist.new_group([0])
    dist.all_reduce(torch.ones(2), group=group)
    whole, part = numbers(words)
    assert part < whole
    identities = words[HeaderWord.GROUPS], words[HeaderWord.GROUPS + 2]
    assert identities[0] != identities[1]
    assert [identity & 0xFFFFFFFF for identity in identities] == [1, 1]


def test_the_number_of_a_group_that_is_made_again_falls(words: memoryview, alone: None) -> None:
    for _ in range(5):
        dist.all_reduce(torch.ones(2))
    (before,) = numbers(words)
    dist.destroy_process_group()
    assert numbers(words) == []
    begin()
    assert numbers(words)[0] < before


def test_without_process_groups_there_is_no_number(words: memoryview, monkeypatch: pytest.MonkeyPatch) -> None:
    assert numbers(words) == []
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", SimpleNamespace())
    assert numbers(words) == []


class Group:
    """A process group whose backend has no sequence numbers."""

    def _get_sequence_number_for_group(self) -> int:
        raise RuntimeError("no support")


def test_a_backend_without_numbers_and_more_groups_than_fit(words: memoryview, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [Group() for _ in range(MAX_GROUPS + 3)]
    world = SimpleNamespace(
        pg_names={group: str(i) for i, group in enumerate(groups)},
        pg_group_ranks={group: {rank: rank for rank in range(i + 1)} for i, group in enumerate(groups)},
    )
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", SimpleNamespace(_world=world))
    assert numbers(words) == [NO_NUMBER] * MAX_GROUPS
    assert words[HeaderWord.GROUPS + 4] & 0xFFFFFFFF == 3
    assert words[HeaderWord.GROUPS + 2 * MAX_GROUPS] == 0


def test_groups_with_the_same_name_and_other_ranks_are_two(words: memoryview, monkeypatch: pytest.MonkeyPatch) -> None:
    """split_group gives the groups of different ranks the same name."""
    found = []
    for ranks in ((0, 1), (2, 3)):
        group = Group()
        world = SimpleNamespace(pg_names={group: "1"}, pg_group_ranks={group: dict.fromkeys(ranks, 0)})
        monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", SimpleNamespace(_world=world))
        numbers(words)
        found.append(words[HeaderWord.GROUPS])
    assert found[0] != found[1]


def test_stacks_that_are_requested_before_the_thread_runs_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responder_thread, "POLL_INTERVAL_S", 0.01)
    ring, over, ended = SpanRing(str(tmp_path / "process-0.ring"), process=0, slots=64), threading.Lock(), Mock()
    reader = SpanReader(str(tmp_path / "process-0.ring"))
    asked = reader.request_stacks()
    reader.close()
    config = SimpleNamespace(directory=str(tmp_path))
    session = SimpleNamespace(ring=ring, is_off=False, config=config, process_index=0, count_error=pytest.fail)
    over.acquire()
    watching = responder_thread.ResponderThread(session, SimpleNamespace(training_thread=None, threads={}))  # type: ignore[arg-type]
    thread = threading.Thread(target=watching._run, args=(ring, threading.get_ident(), over, ended))
    thread.start()
    noted = tmp_path / "process-0.stacks"
    try:
        wait_for(lambda: noted.read_bytes().endswith(b"\n"), 20, "the stacks")
    finally:
        over.release()
        thread.join()
    assert json.loads(noted.read_text())["asked"] == asked
