"""Which processes a GPU's memory belongs to, and which of NVML's GPUs each of torch's is."""

from __future__ import annotations

from typing import Any

import pytest

from dpmon.gpu.device_record import MAX_PROCESSES, MissingValue, RunContext, TorchReservation, build_device_record

WHO = {"uuid": "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "name": "Fake"}
UUIDS = frozenset({"8932f937-d72c-4106-c12f-20bd9faed9f6", "11111111-2222"})
NONE: dict[int, int | None] = {}


def sample(run: RunContext, **found: Any) -> Any:
    return build_device_record(0, {**WHO, "compute": NONE, "graphics": NONE, **found}, run, UUIDS)


def torch(uuid: str, reserved: int | None = 100, process: int = 0, device: str = "cuda:1") -> RunContext:
    return RunContext(frozenset({1, 2}), False, (TorchReservation(process, device, uuid, reserved),))


@pytest.mark.parametrize(
    ("held", "of_run", "mine", "others"),
    [
        ({}, False, 0, 0),
        ({7: 100}, False, 0, 100),
        ({1: 100, 7: 50}, True, 100, 50),
        ({1: 100, 2: 50}, True, 150, 0),
        ({1: None, 2: 50, 7: 10}, True, None, 10),
        ({1: 10, 7: None}, True, 10, None),
    ],
)
def test_by_the_drivers_list(held: Any, of_run: bool, mine: int | None, others: int | None) -> None:
    found = sample(RunContext(frozenset({1, 2})), compute=held)
    assert (found["of_run"], found["mem_run_bytes"], found["mem_others_bytes"]) == (of_run, mine, others)
    missing = {n for n, v in (("mem_run_bytes", mine), ("mem_others_bytes", others)) if v is None}
    assert {n for n in missing if found["absent"][n] == "the driver does not report memory by process"} == missing


@pytest.mark.parametrize("held", [{}, {1: 100}, {7: 100}])
def test_in_a_container_an_id_may_be_anybodys(held: Any) -> None:
    found = sample(RunContext(frozenset({1, 2}), False), compute=held)
    assert (found["of_run"], found["mem_run_bytes"], found["mem_others_bytes"]) == (None, None, None)
    assert "container" in found["absent"]["of_run"]


def test_torchs_uuid_decides_where_process_ids_cannot() -> None:
    found = sample(torch("8932F937-d72c-4106-c12f-20bd9faed9f6"))
    assert found["of_run"] is True
    assert found["ordinals"] == [{"process": 0, "device": "cuda:1"}]
    assert found["mem_torch_bytes"] == 100
    assert found["mem_run_bytes"] is None


def test_an_instance_is_of_its_gpu() -> None:
    assert sample(torch("MIG-11111111-2222"))["of_run"] is True


def test_another_gpu_is_not_taken_for_it() -> None:
    found = sample(torch("00000000-d72c-4106-c12f-20bd9faed9f6"))
    assert (found["of_run"], found["ordinals"], found["mem_torch_bytes"]) == (None, [], 0)


def test_a_gpu_that_torch_sees_and_does_not_use() -> None:
    found = sample(torch(WHO["uuid"], reserved=0))
    assert found["of_run"] is None
    assert found["ordinals"] == [{"process": 0, "device": "cuda:1"}]


def test_ranks_that_all_call_theirs_cuda_0() -> None:
    uses = tuple(TorchReservation(rank, "cuda:0", f"GPU-{rank}", 10) for rank in range(3))
    for rank in range(3):
        found = build_device_record(rank, {"uuid": f"GPU-{rank}"}, RunContext(reservations=uses), {str(rank)})
        assert found["ordinals"] == [{"process": rank, "device": "cuda:0"}]


def test_without_a_uuid_nothing_is_matched() -> None:
    found = build_device_record(0, {"uuid": MissingValue("no permission")}, torch("8932"), frozenset())
    assert (found["ordinals"], found["of_run"]) == (None, None)
    assert found["absent"]["ordinals"] == "NVML does not report the GPU's UUID"


def test_the_list_of_processes_is_bounded_and_counted() -> None:
    held = {pid: pid * 10 for pid in range(1, 101)}
    found = sample(RunContext(frozenset({1, 2})), compute=held)
    assert (len(found["processes"]), found["process_count"]) == (MAX_PROCESSES, 100)
    assert [one["pid"] for one in found["processes"][:3]] == [2, 1, 100]


def test_a_process_in_both_lists_holds_its_memory_once() -> None:
    found = sample(RunContext(frozenset({1})), compute={1: 100}, graphics={1: 40, 5: 7})
    assert (found["mem_run_bytes"], found["mem_others_bytes"]) == (100, 7)


def test_a_failed_process_list_leaves_the_sum_unknown() -> None:
    found = sample(RunContext(frozenset({1})), compute={1: 100}, graphics=MissingValue("no permission"))
    assert (found["of_run"], found["mem_run_bytes"]) == (None, None)
    assert found["absent"]["mem_run_bytes"] == "no permission"
    found = sample(RunContext(frozenset({1})), compute={1: 100}, graphics=MissingValue("not supported"))
    assert (found["of_run"], found["mem_run_bytes"]) == (True, 100)
