"""The rule that calls a run stalled, and the rank that it names."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpmon.record.record_types import Step
from dpmon.record.schema import SECOND
from dpmon.run import proc
from dpmon.run.stdin_terminal import is_reading_stdin
from dpmon.stalls import rank_inspector, stacks
from dpmon.stalls.run_state import (
    ENDED,
    EVALUATING,
    PAUSED,
    QUIET,
    RUNNING,
    SAVING,
    STALLED,
    STARTING,
    TRAINING,
    WAITING_FOR_DATA,
    WAITING_FOR_INPUT,
    StateInputs,
    decide_state,
)
from dpmon.stalls.stacks import WORK_WAIT, Frame, ProcessStacks, Stack, parse_py_spy_json
from dpmon.stalls.stall_detection import (
    LearnedDurations,
    LoaderWorker,
    ProcessGroupView,
    RankActivity,
    describe_activity,
    find_stall,
    sentence,
)
from dpmon.stalls.stall_report import RankReport, StallReport
from dpmon.stalls.why_text import format_report
from support.run_harness import wait_for

NOW = 1000 * SECOND
TORCH = "/env/lib/python3.11/site-packages/torch"
BACKWARD = (
    Frame("_engine_run_backward", f"{TORCH}/autograd/graph.py", 979),
    Frame("Tensor.backward", f"{TORCH}/_tensor.py", 623),
    Frame("main", "/job/train.py", 90),
)
BARRIER = (
    Frame("barrier", f"{TORCH}/distributed/distributed_c10d.py", 5000),
    Frame("_exception_logger.<locals>.wrapper", f"{TORCH}/distributed/c10d_logger.py", 83),
    Frame("main", "/job/train.py", 99),
)
LOADER = (
    Frame("Queue.get", "/usr/lib/python3.11/multiprocessing/queues.py", 113),
    Frame("_BaseDataLoaderIter.__next__", f"{TORCH}/utils/data/dataloader.py", 700),
    Frame("main", "/job/train.py", 88),
)
SCRIPT = (Frame("checkpoint", "/job/train.py", 12), Frame("main", "/job/train.py", 95))


def rank(
    number: int, frames: tuple[Frame, ...] = (), for_s: float = 30, sequence: int = 5, **more: Any
) -> RankActivity:
    """A rank of two that stands at these frames."""
    facts = RankActivity(
        pid=100 + number,
        process=number,
        rank=number,
        world=2,
        since_ns=NOW - int(for_s * SECOND),
        step=60,
        busy=False,
        groups=(ProcessGroupView(1, 2, sequence),),
        stack=Stack(frames) if frames else None,
    )
    return facts._replace(**more)


def told(*ranks: RankActivity, usual: LearnedDurations | None = None) -> str | None:
    """The sentence about these ranks; None if they are not stalled."""
    found = find_stall(ranks, usual or LearnedDurations(), NOW)
    return None if found is None else sentence(found, ranks, "/job")


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((rank(0, SCRIPT, world=1),), "in checkpoint (train.py:12)"),
        ((rank(0, SCRIPT, world=1, state="stopped"),), "it is stopped (SIGSTOP), in checkpoint (train.py:12)"),
        (
            (rank(0, BACKWARD, sequence=6), rank(1, SCRIPT)),
            "rank 1 in checkpoint (train.py:12); rank 0 waits in backward (train.py:90)",
        ),
        (
            (rank(0, BACKWARD, sequence=6), rank(1, LOADER, doing="data", worker=LoaderWorker(7, "dead"))),
            "rank 1 in DataLoader.__next__ (train.py:88); its worker (pid 7) is dead; rank 0 waits in backward"
            " (train.py:90)",
        ),
        (
            (*(rank(i, BACKWARD, sequence=6) for i in (0, 1, 2)), rank(3, SCRIPT)),
            "rank 3 in checkpoint (train.py:12); the other 3 wait for it in backward (train.py:90)",
        ),
        (
            (rank(0, BACKWARD, sequence=6), rank(1, SCRIPT, state="stopped")),
            "rank 1 is stopped (SIGSTOP), in checkpoint (train.py:12); rank 0 waits in backward (train.py:90)",
        ),
        (
            (rank(0, BACKWARD), rank(1, BARRIER)),
            "rank 1 waits in barrier (train.py:99); rank 0 waits in backward (train.py:90): different collectives",
        ),
        (
            (rank(0, BACKWARD, sequence=6), rank(1, BARRIER)),
            "rank 1 waits in barrier (train.py:99); rank 0 waits in backward (train.py:90): different collectives",
        ),
        (
            (rank(0, BACKWARD), rank(1, doing="gone", state="gone")),
            "rank 1 has exited; rank 0 waits in backward (train.py:90)",
        ),
        (
            (rank(0, BACKWARD), rank(1, doing="ended", raised="RuntimeError: out of memory (train.py:31)")),
            "rank 1 ended: RuntimeError: out of memory (train.py:31); rank 0 waits in backward (train.py:90)",
        ),
        ((rank(0, BACKWARD), rank(1, BACKWARD)), "all 2 ranks wait in backward (train.py:90): no rank is behind"),
        # Without stacks, the activities and the number of collectives must do.
        (
            (rank(0, doing="backward", sequence=6), rank(1, doing="other")),
            "rank 1 in the script; rank 0 waits in backward",
        ),
        # One rank stands still while the other, which does not wait for it, goes on.
        ((rank(0, for_s=0.1), rank(1, SCRIPT)), "rank 1 in checkpoint (train.py:12)"),
    ],
)
def test_the_guilty_rank_comes_first(ranks: tuple[RankActivity, ...], expected: str) -> None:
    assert told(*ranks) == expected


@pytest.mark.parametrize(
    "ranks",
    [
        (rank(0, for_s=9), rank(1, for_s=9)),
        (rank(0, SCRIPT, doing="paused"),),
        (rank(0, doing="ended"), rank(1, doing="gone")),
        # A sign of life: a first compilation, download or checkpoint may take long.
        (rank(0, BACKWARD, for_s=600), rank(1, SCRIPT, for_s=600, busy=True)),
        (rank(0, BACKWARD, for_s=600), rank(1, SCRIPT, for_s=600, busy=None)),
        (rank(0, BACKWARD, for_s=170), rank(1, LOADER, for_s=170, doing="data", busy=True)),
    ],
)
def test_no_alarm(ranks: tuple[RankActivity, ...]) -> None:
    assert told(*ranks) is None


def test_a_rank_that_spins_in_a_collective_shows_no_sign_of_life() -> None:
    assert told(rank(0, BACKWARD, busy=True), rank(1, BARRIER, busy=True)) is not None


def line_of_source(directory: Path, source: str) -> Stack:
    """The stack, as py-spy reports it, of a process at the only line of a script."""
    script = directory / "work.py"
    script.write_text(f"{source}\n")
    found = parse_py_spy_json(dumped([frame("main", str(script), 1)]), 1).main
    assert found is not None
    return found


@pytest.mark.parametrize("source", ["work.wait()", "handles[0].wait(timeout)", "[h.wait() for h in handles]"])
def test_a_wait_in_cpp_code_waits_for_other_ranks(tmp_path: Path, source: str) -> None:
    """Only the line tells: C++ code has no Python frame."""
    waits = line_of_source(tmp_path, source)
    ranks = [rank(0, stack=waits, world=3), rank(1, stack=waits, world=3), rank(2, BARRIER, world=3)]
    stall = find_stall(ranks, LearnedDurations(), NOW)
    assert stall is not None
    assert (stall.blockers, stall.waiters) == ((2,), (0, 1))
    assert sentence(stall, ranks, str(tmp_path)) == (
        "rank 2 waits in barrier (train.py:99); ranks 0, 1 wait in Work.wait (work.py:1): different collectives"
    )


@pytest.mark.parametrize("source", ["time.sleep(60)", "os.wait()", "wait(handles)"])
def test_another_line_is_no_wait_for_ranks(tmp_path: Path, source: str) -> None:
    assert line_of_source(tmp_path, source).operation_kind == ""


@pytest.mark.parametrize(
    ("first", "second", "blocker"),
    [
        # Nothing tells which one has skipped a collective, or has started one too many.
        ({"frames": BACKWARD}, {"frames": BARRIER}, 1),
        # One has started more collectives.
        ({"frames": BACKWARD}, {"frames": BARRIER, "sequence": 6}, 0),
        ({"frames": BARRIER, "sequence": 6}, {"frames": BACKWARD}, 1),
        # Rank 1 has started less than the rank whose frames say nothing.
        ({"frames": SCRIPT, "sequence": 6}, {"frames": BARRIER}, 1),
        # A stopped rank does not wait.
        ({"frames": SCRIPT, "sequence": 6, "state": "stopped"}, {"frames": BARRIER}, 0),
    ],
)
def test_of_two_ranks_one_is_blamed(first: dict[str, Any], second: dict[str, Any], blocker: int) -> None:
    found = find_stall([rank(0, **first), rank(1, **second)], LearnedDurations(), NOW)
    assert found is not None
    assert found.blockers == (blocker,)


def test_a_rank_that_is_behind_in_the_same_place_is_named() -> None:
    assert told(rank(0, BACKWARD, sequence=6), rank(1, BACKWARD)) == (
        "ranks 0, 1 wait in backward (train.py:90): rank 1 has started fewer collectives"
    )


def test_a_rank_that_is_ahead_waits_though_its_stack_does_not_say_so() -> None:
    """Under NCCL a rank waits for its GPU, somewhere in the script."""
    item = (Frame("main", "/job/train.py", 91),)
    assert told(rank(0, item, sequence=6), rank(1, SCRIPT)) == (
        "rank 1 in checkpoint (train.py:12); rank 0 waits in main (train.py:91)"
    )
    assert told(rank(0, item, sequence=6, busy=True), rank(1, SCRIPT)) == (
        "rank 1 in checkpoint (train.py:12); rank 0 waits in main (train.py:91)"
    )


def test_numbers_are_compared_within_a_group_only() -> None:
    own = (ProcessGroupView(7, 1, 3),), (ProcessGroupView(8, 1, 9),), (ProcessGroupView(7, 1, None),)
    for groups in (own[:2], (own[2], own[0])):
        ranks = [rank(i, BACKWARD, groups=each) for i, each in enumerate(groups)]
        assert told(*ranks) == "all 2 ranks wait in backward (train.py:90): no rank is behind"


def test_a_rank_alone_on_its_machine_waits_for_others() -> None:
    alone = rank(0, BACKWARD, for_s=1201)
    assert told(alone) == "rank 0 waits in backward (train.py:90): no rank of this machine is behind"


def test_a_rank_of_another_machine_may_save_for_ten_minutes() -> None:
    """Its signs of life are not seen here: the others may wait for it as long as for one that shows some."""
    assert told(rank(0, BACKWARD, for_s=900), rank(1, BACKWARD, for_s=900, world=4)) is None


@pytest.mark.parametrize("more", [{"sequence": 4}, {"frames": BARRIER}])
def test_no_rank_is_blamed_where_one_of_another_machine_may_be_guilty(more: dict[str, Any]) -> None:
    """Ranks 0 and 1 wait at two places, or for two groups, because rank 2 does not come; it runs elsewhere."""
    first, second = rank(0, BACKWARD, 1300), rank(1, **{"frames": BACKWARD, **more}, for_s=1300)
    there = [each._replace(world=4) for each in (first, second)]
    words = told(*there)
    assert words is not None
    assert words.endswith("no rank of this machine is behind")
    culprit = rank(2, SCRIPT, 1300, world=4, node="b")
    waits = rank(3, BACKWARD, 1300, world=4, node="b")
    both = [*(each._replace(node="a") for each in there), culprit, waits]
    words = told(*both)
    assert words is not None
    assert words.startswith("rank 2 (b) in checkpoint (train.py:12); ")


def test_ranks_of_several_machines_are_named_with_their_machine() -> None:
    ranks = [rank(i, BACKWARD, sequence=6, world=8, node="ab"[i // 4]) for i in range(8)]
    ranks[5] = rank(5, SCRIPT, world=8, node="b")
    assert told(*ranks) == "rank 5 (b) in checkpoint (train.py:12); the other 7 wait for it in backward (train.py:90)"
    ranks[4] = rank(4, BARRIER, sequence=6, world=8, node="b")
    words = "rank 5 (b) in checkpoint (train.py:12); rank 4 (b) waits in barrier (train.py:99); "
    assert told(*ranks) == f"{words}ranks 0-3, 6, 7 wait in backward (train.py:90)"
    ranks[5] = rank(5, BARRIER, sequence=6, world=8, node="b")
    words = "ranks 4, 5 (b) wait in barrier (train.py:99); ranks 0-3, 6, 7 wait in backward (train.py:90)"
    assert told(*ranks) == f"{words}: different collectives"


def test_a_machine_that_does_not_answer_may_hold_up_the_others() -> None:
    ranks = [rank(i, BACKWARD, sequence=6 - i % 2, world=8, node="a", for_s=1300) for i in range(4)]
    words = "all 4 ranks wait in backward (train.py:90): no rank of the nodes that answer is behind"
    assert told(*ranks) == words
    assert told(*(each._replace(since_ns=NOW - 60 * SECOND) for each in ranks)) is None


def test_what_another_supervisor_has_learned_holds_here() -> None:
    ranks = [rank(0, BACKWARD), rank(1, SCRIPT)]
    assert told(*ranks) is not None
    assert told(ranks[0], ranks[1]._replace(usual_ns=60 * SECOND)) is None


def test_ranks_of_two_jobs_do_not_wait_for_each_other() -> None:
    """Rank 1 of the second job is stuck; the ranks of the first job are in a slow step."""
    going = [rank(i, BACKWARD, for_s=4, job=1, namesake=True) for i in (0, 1)]
    stuck = [rank(0, BACKWARD, pid=200, job=2, namesake=True), rank(1, SCRIPT, pid=201, job=2, namesake=True)]
    assert told(*going, *stuck) == (
        "rank 1 (pid 201) in checkpoint (train.py:12); rank 0 (pid 200) waits in backward (train.py:90)"
    )
    waits = [each._replace(since_ns=NOW - 30 * SECOND) for each in going]
    assert told(*waits, *stuck) == (
        "rank 1 (pid 201) in checkpoint (train.py:12); rank 0 (pid 200) waits in backward (train.py:90);"
        " all 2 ranks wait in backward (train.py:90): no rank is behind"
    )


def test_one_of_several_trials_is_named() -> None:
    """A search for parameters runs independent processes."""
    trials = [rank(i, SCRIPT, for_s=1, rank=None, world=1, job=i) for i in range(3)]
    assert told(*trials) is None
    trials[1] = trials[1]._replace(since_ns=NOW - 30 * SECOND)
    assert told(*trials) == "process 1 in checkpoint (train.py:12)"


def test_a_process_that_waits_between_two_loops_is_not_stuck() -> None:
    """An evaluation beside the training waits for the next checkpoint."""
    waits = rank(1, SCRIPT, for_s=600, rank=None, world=1, job=1, between_loops=True)
    training = rank(0, for_s=0.1, rank=None, world=1, job=2)
    assert told(training, waits) is None
    assert told(rank(0, BACKWARD), rank(1, SCRIPT, between_loops=True)) is not None


@pytest.mark.parametrize(
    ("frame", "for_s", "more"),
    [
        (Frame("save", f"{TORCH}/serialization.py", 900), 600, {"state": "disk wait"}),
        (Frame("save", f"{TORCH}/serialization.py", 900), 50, {}),
        (Frame("compile_fx", f"{TORCH}/_inductor/compile_fx.py", 400), 600, {}),
    ],
)
def test_a_first_checkpoint_or_compilation_may_take_long(frame: Frame, for_s: float, more: dict[str, Any]) -> None:
    assert told(rank(0, BACKWARD, for_s=for_s), rank(1, (frame, *SCRIPT), for_s=for_s, **more)) is None
    assert told(rank(0, BACKWARD), rank(1, (frame, *SCRIPT), for_s=1300, **more)) is not None


@pytest.mark.parametrize(("for_s", "more"), [(50, {}), (600, {"state": "disk wait"}), (600, {"busy": True})])
def test_a_rank_that_saves_is_known_without_its_stack(for_s: float, more: dict[str, Any]) -> None:
    assert told(rank(0, BACKWARD, for_s=for_s), rank(1, for_s=for_s, doing="checkpoint", **more)) is None
    assert told(rank(0, BACKWARD), rank(1, for_s=1300, doing="checkpoint", **more)) is not None
    assert told(rank(0, BACKWARD, for_s=for_s), rank(1, for_s=for_s, doing="other")) is not None


def test_a_phase_is_learned_whatever_its_line() -> None:
    usual, step = LearnedDurations(), rank(0, LOADER, doing="data", for_s=60)
    usual.add_duration(step.timing_key, 30 * SECOND)
    assert told(rank(0, (Frame("f", "/job/data.py", 3),), doing="data", for_s=60), usual=usual) is None
    assert told(rank(0, SCRIPT, for_s=60), usual=usual) is not None
    usual.add_duration(
        rank(0, LOADER, doing="data", step=None).timing_key, 300 * SECOND
    )  # the first batch is not usual
    assert told(step._replace(since_ns=NOW - 100 * SECOND), usual=usual) is not None


def test_the_first_batch_of_a_loop_is_learned_by_itself() -> None:
    """A loader that takes 13 s for its first batch does so in each epoch."""
    usual, first = LearnedDurations(), rank(0, LOADER, doing="data", for_s=13)
    usual.add_duration(first._replace(step=None).timing_key, 13 * SECOND)
    assert told(first._replace(loop_begins=True), usual=usual) is None
    assert told(first._replace(loop_begins=True, since_ns=NOW - 40 * SECOND), usual=usual) is not None
    assert told(first, usual=usual) is not None


DDP_INIT = (Frame("DistributedDataParallel.__init__", f"{TORCH}/nn/parallel/distributed.py", 1), SCRIPT[1])
JOINING = "joining the process group: gloo, rank 1 of 2 at 127.0.0.1:29500"


def starting(number: int, frames: tuple[Frame, ...], doing: str = "in the script", **more: Any) -> RankActivity:
    """A rank that has not made its first call, for 21 minutes."""
    return rank(number, frames, 1260, step=None, process=None, groups=(), doing=doing, **more)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (
            (starting(0, SCRIPT), starting(1, DDP_INIT)),
            "rank 0 in checkpoint (train.py:12); rank 1 waits in DistributedDataParallel.__init__ (train.py:95)",
        ),
        ((starting(0, SCRIPT), starting(1, BARRIER, JOINING)), f"rank 1 waits {JOINING} (train.py:99)"),
        ((starting(0, SCRIPT), starting(1, (), JOINING, state="stopped")), f"rank 1 is stopped (SIGSTOP), {JOINING}"),
        # It may prepare its data for hours, or not train at all.
        ((starting(0, SCRIPT, busy=True), starting(1, DDP_INIT)), None),
        ((starting(0, SCRIPT, world=1),), None),
        ((starting(0, SCRIPT, world=1, state="stopped"),), "it is stopped (SIGSTOP), in checkpoint (train.py:12)"),
    ],
)
def test_a_rank_may_be_stuck_before_its_first_call(ranks: tuple[RankActivity, ...], expected: str | None) -> None:
    words = told(*ranks)
    assert words == expected or (words is not None and expected in words.split("; "))


def test_a_stopped_rank_is_named_wherever_it_was_slow() -> None:
    usual, stopped = LearnedDurations(), rank(1, SCRIPT, state="stopped")
    usual.add_duration(stopped.timing_key, 60 * SECOND)
    assert told(rank(0, BACKWARD, sequence=6), stopped, usual=usual) is not None


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the run in `tmp_path`, which has noted a stage ten seconds ago, and waits for a line of input."""
    command = [sys.executable, "-c", "import time; input(); time.sleep(600)"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env={"DPMON_RUN": str(tmp_path)}) as process:
        stages = f"1 5 {JOINING}\n{process.pid} {time.monotonic_ns() - 10 * SECOND} {JOINING}\n"
        (tmp_path / "stages.log").write_text(stages)
        yield process
        process.kill()


def test_a_process_before_its_first_call_is_inspected(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    def activity() -> RankActivity:
        (found,) = inspector.inspect_ranks({}, time.monotonic_ns())
        assert (found.pid, found.rank, found.world, found.doing) == (sleeper.pid, 1, 2, JOINING)
        return found

    with closing(rank_inspector.RankInspector(tmp_path, "/")) as inspector:
        if is_reading_stdin(sleeper.pid) is not None:
            wait_for(lambda: activity().state == "input wait", what="the wait for input")
            assert describe_activity(activity(), "/") == f"waits for input, {JOINING}"
        sleeper.send_signal(signal.SIGSTOP)
        wait_for(lambda: activity().state == "stopped", what="the stop")
        assert describe_activity(activity(), "/") == f"is stopped (SIGSTOP), {JOINING}"
        sleeper.kill()
        sleeper.wait()
        assert inspector.inspect_ranks({}, time.monotonic_ns()) == []


def test_a_place_may_take_as_long_as_before() -> None:
    """A checkpoint of 60 s raises no alarm again; the same time elsewhere does."""
    usual, here, there = LearnedDurations(), rank(0, SCRIPT, for_s=100), rank(0, (SCRIPT[1],), for_s=100)
    assert told(here, usual=usual) is not None
    usual.add_duration(here.timing_key, 60 * SECOND)
    assert told(here, usual=usual) is None
    assert told(here._replace(since_ns=NOW - 181 * SECOND), usual=usual) is not None
    assert told(there, usual=usual) is not None


# ------------------------------------------------------------------------------------------------ stacks


def dumped(frames: list[dict[str, Any]], **more: Any) -> bytes:
    return json.dumps([{"pid": 1, "os_thread_id": 1, "thread_name": "main", "frames": frames, **more}]).encode()


def frame(name: str, file: str, line: int) -> dict[str, Any]:
    return {"name": name, "filename": file, "line": line}


FORWARD = (
    Frame("Linear.forward", f"{TORCH}/nn/modules/linear.py", 125),
    Frame("Module._call_impl", f"{TORCH}/nn/modules/module.py", 1790),
    Frame("Module._wrapped_call_impl", f"{TORCH}/nn/modules/module.py", 1779),
)
COMPILE = (
    Frame("AsyncCompile.wait", f"{TORCH}/_inductor/async_compile.py", 400),
    Frame("_compile_fx_inner", f"{TORCH}/_inductor/compile_fx.py", 900),
)
TRAINER = Frame("Trainer.fit", "/env/lib/python3.11/site-packages/lightning/trainer.py", 500)


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        (FORWARD, "forward"),
        (BACKWARD[:2], "backward"),
        ((Frame("Adam.step", f"{TORCH}/optim/adam.py", 1),
          Frame("Optimizer.profile_hook_step.<locals>.wrapper", f"{TORCH}/optim/optimizer.py", 1)), "optimizer.step"),
        ((Frame("_save", f"{TORCH}/serialization.py", 1), Frame("save", f"{TORCH}/serialization.py", 2)), "torch.save"),
        ((Frame("save", f"{TORCH}/distributed/checkpoint/state_dict_saver.py", 1),
          Frame("_api_bc_check.<locals>.inner_func", f"{TORCH}/distributed/checkpoint/utils.py", 1)),
         "torch.distributed.checkpoint.save"),
        (BARRIER[:2], "barrier"),
        (LOADER[:2], "DataLoader.__next__"),
        ((Frame("DataLoader.__iter__", f"{TORCH}/utils/data/dataloader.py", 500),), "DataLoader.__iter__"),
        ((*COMPILE, *FORWARD), "torch.compile"),
        # Within a framework, the function of torch says more than the framework's.
        ((*BACKWARD[:2], TRAINER), "backward"),
        ((*FORWARD, TRAINER), "forward"),
        ((TRAINER,), "Trainer.fit"),
        ((Frame("{0.x}", "/env/lib/python3.11/site-packages/evil.py", 1),), "{0.x}"),
        # C code is no place that a user knows.
        ((Frame("poll", "/usr/lib/libc.so.6", 0), *LOADER[:2]), "DataLoader.__next__"),
        ((Frame("poll", "/usr/lib/libc.so.6", 0),), None),
    ],
)  # fmt: skip
def test_functions_of_torch_have_the_names_that_people_know(frames: tuple[Frame, ...], expected: str | None) -> None:
    assert Stack((*frames, SCRIPT[1])).library_operation == expected


DDP = f"{TORCH}/nn/parallel/distributed.py"


@pytest.mark.parametrize(
    ("frames", "kind"),
    [
        ((Frame("_sync_buffers", DDP, 1), Frame("_pre_forward", DDP, 2), *FORWARD[1:]), "collective"),
        ((Frame("_pre_forward", DDP, 2), *FORWARD[1:]), "collective"),  # rebuilds its buckets in C++
        ((*FORWARD, Frame("_run_ddp_forward", DDP, 3), *FORWARD[1:]), ""),
        ((Frame("_verify_param_shape_across_processes", f"{TORCH}/distributed/utils.py", 1),), "collective"),
        ((Frame("_create_c10d_store", f"{TORCH}/distributed/rendezvous.py", 1),), "collective"),
        ((Frame("_wait_for_unshard", f"{TORCH}/distributed/fsdp/_runtime_utils.py", 1), *FORWARD[1:]), "collective"),
        ((Frame("_single_tensor_adam", f"{TORCH}/optim/adam.py", 1),
          Frame("step", f"{TORCH}/distributed/optim/zero_redundancy_optimizer.py", 1)), ""),
        ((Frame("save", f"{TORCH}/distributed/checkpoint/state_dict_saver.py", 1),), "save"),
        ((WORK_WAIT, Frame("finish", "/env/lib/python3.11/site-packages/megatron/handles.py", 1)), "collective"),
        ((Frame("<module>", f"{TORCH}/_dynamo/convert_frame.py", 1), Frame("_compile", f"{TORCH}/_compile.py", 1),
          Frame("DistributedDataParallel.__init__", DDP, 1)), ""),  # an import
        ((TRAINER, Frame("wrapper", f"{TORCH}/distributed/elastic/multiprocessing/errors/__init__.py", 1)), ""),
    ],
)  # fmt: skip
def test_a_rank_waits_for_others_whatever_the_file(frames: tuple[Frame, ...], kind: str) -> None:
    assert Stack((*frames, SCRIPT[1])).operation_kind == kind


PACKAGES = "/env/lib/python3.11/site-packages"
MODULE = (
    Frame("upload", f"{PACKAGES}/trainer/storage.py", 3),
    Frame("main", f"{PACKAGES}/trainer/train.py", 8),
    Frame("<module>", f"{PACKAGES}/trainer/train.py", 9),
)
RUNPY = (Frame("_run_code", "<frozen runpy>", 88), Frame("_run_module_as_main", "<frozen runpy>", 198))
COMMAND = Frame("<module>", "/env/bin/trainer", 8)


@pytest.mark.parametrize(
    ("frames", "activity"),
    [
        ((*MODULE, *RUNPY), "in upload (trainer/storage.py:3)"),
        ((*MODULE[:2], COMMAND), "in upload (trainer/storage.py:3)"),
        ((Frame("wait", "/usr/lib/python3.11/threading.py", 320), *MODULE, *RUNPY),
         "in wait (trainer/storage.py:3)"),
        ((TRAINER, *MODULE, *RUNPY), "in Trainer.fit (trainer/storage.py:3)"),
        ((*BACKWARD[:2], TRAINER, *MODULE, *RUNPY), "in backward (trainer/storage.py:3)"),
        ((*SCRIPT, *MODULE, *RUNPY), "in checkpoint (train.py:12)"),
        ((COMMAND,), "at trainer:8"),
        ((Frame("poll", f"{PACKAGES}/trainer/fast.so", 0), *FORWARD), "in forward"),
        (RUNPY, "in the script"),
    ],
)  # fmt: skip
def test_the_place_is_in_the_installed_package_that_runs_if_no_script_is_on_the_stack(
    frames: tuple[Frame, ...], activity: str
) -> None:
    assert describe_activity(rank(0, frames, doing="other"), "/job") == activity


def test_a_compiled_model_that_runs_does_not_compile() -> None:
    """Else it would have the time of a compilation in each step."""
    call = Frame("_fn", f"{TORCH}/_dynamo/eval_frame.py", 700)
    code = Frame("call", "/tmp/torchinductor_me/ab/cab.py", 90)
    assert Stack((code, call, *FORWARD, SCRIPT[1])).operation_kind == ""
    assert Stack((code, call, *FORWARD, SCRIPT[1])).library_operation == "forward"


def test_frames_of_the_tracer_are_left_out() -> None:
    found = parse_py_spy_json(
        dumped([frame("wrapper", "/x/dpmon/tracer/steps/span_recorder.py", 3), frame("main", "/job/a.py", 4)]), 1
    )
    assert found.main is not None
    assert found.main.frames == (Frame("main", "/job/a.py", 4),)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (None, "py-spy is not installed; install it next to dpmon: pip install py-spy"),
        ("echo 'Error: Permission Denied: Try running again with elevated permissions' >&2; exit 1", "--cap-add"),
        ("echo 'Error: Failed to find python version from target process' >&2; exit 1", "Failed to find python"),
        ("exit 3", "py-spy failed: without a message"),
        ("echo '{\"version\": 9}'", "different version?"),
        ("echo '[]'", "py-spy found no Python thread"),
        ("sleep 5", "py-spy gave no answer within 0 s"),
        ("", "py-spy cannot be started"),
    ],
)
def test_what_py_spy_cannot_do_is_a_reason(
    program: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "py-spy"
    path.write_text(f"#!/bin/sh\n{program}\n")
    path.chmod(0o700 if program else 0o600)
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None if program is None else str(path))
    monkeypatch.setattr(stacks, "MAX_DUMP_S", 0.05 if "no answer" in expected else 300.0)
    found = stacks.dump_stacks({1: 1, 2: 2})
    assert set(found) == {1, 2}
    for taken in found.values():
        assert taken.stacks == ()
        assert expected in (taken.reason or "")


def test_the_training_thread_is_found_by_its_number_or_its_name() -> None:
    threads = [
        {"pid": 1, "os_thread_id": number, "thread_name": name, "frames": [frame(f"f{number}", "/job/a.py", 1)]}
        for number, name in ((1, "MainThread"), (5, "trains"))
    ]
    assert [stack.main for stack in parse_py_spy_json(json.dumps(threads).encode(), 5).stacks] == [True, False]
    assert parse_py_spy_json(json.dumps(threads).encode(), 5).stacks[0].thread == "trains"
    for thread in threads:
        thread["os_thread_id"] = None
    assert parse_py_spy_json(json.dumps(threads).encode(), 5).stacks[0].thread == "MainThread"


def test_only_a_worker_with_work_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = (Frame("Queue.get", "/usr/lib/python3.11/multiprocessing/queues.py", 1), *SCRIPT)
    children = [proc.ProcessEntry(pid, "S", 1, 1, 1, 0.0, None) for pid in (7, 8)]
    taken = {7: ProcessStacks((Stack(idle),)), 8: ProcessStacks((Stack(idle),))}
    monkeypatch.setattr(rank_inspector, "dump_stacks", lambda pids: taken)
    look = rank_inspector.RankInspector(Path("/nowhere"), "/job")
    assert look._find_loader_worker(children) is None
    taken[8] = ProcessStacks((Stack(SCRIPT),))
    assert look._find_loader_worker(children) == (8, "in checkpoint (train.py:12)", Stack(SCRIPT))
    assert look._find_loader_worker([*children, replace(children[0], pid=9, state="T")]) == (9, "stopped", None)


# ------------------------------------------------------------------------------------------------ states


SLOW = Step(0, None, 1, "", 0, 3 * SECOND, None, {"backward": 1})


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (StateInputs(NOW, over=True, paused_ns=1), ENDED),
        (StateInputs(NOW, paused_ns=1, stalled_ns=1), PAUSED),
        (StateInputs(NOW, input_ns=NOW - 2 * SECOND, stalled_ns=1), WAITING_FOR_INPUT),
        (StateInputs(NOW, input_ns=NOW - SECOND // 2), STARTING),
        (StateInputs(NOW, stalled_ns=1, seen_ns=0), STALLED),
        (StateInputs(NOW), STARTING),
        (StateInputs(NOW, calls=1, seen_ns=NOW), TRAINING),
        (StateInputs(NOW, input_ns=NOW - 2 * SECOND, seen_ns=NOW), TRAINING),
        (StateInputs(NOW, activity=("data", NOW - 2 * SECOND)), WAITING_FOR_DATA),
        (StateInputs(NOW, seen_ns=NOW, activity=("data", NOW - SECOND // 2)), TRAINING),
        (StateInputs(NOW, seen_ns=NOW, activity=("checkpoint", NOW - 2 * SECOND)), SAVING),
        (StateInputs(NOW, seen_ns=NOW, activity=("checkpoint", NOW - SECOND // 2)), TRAINING),
        (StateInputs(NOW, stalled_ns=1, activity=("checkpoint", NOW - 2 * SECOND)), STALLED),
        (StateInputs(NOW, step_word="evaluation", seen_ns=NOW), EVALUATING),
        (StateInputs(NOW, step_word="forward only", seen_ns=NOW), RUNNING),
        (StateInputs(NOW, step_word="without gradients", seen_ns=NOW), TRAINING),
        (StateInputs(NOW, seen_ns=NOW - 6 * SECOND, activity=("other", 0)), QUIET),
        (StateInputs(NOW, step=SLOW, seen_ns=NOW - 6 * SECOND, activity=("other", 0)), TRAINING),
        (StateInputs(NOW, seen_ns=NOW - 60 * SECOND, activity=("forward", 0)), TRAINING),
    ],
)
def test_the_state_in_a_word(now: StateInputs, expected: str) -> None:
    assert decide_state(now).word == expected


# ------------------------------------------------------------------------------------------------ the answer in lines


def answered_rank(number: int, words: str, *, waits: bool) -> RankReport:
    frames = (
        Frame("select", "/usr/lib/python3.11/selectors.py", 415),
        Frame("main", "/home/me/a/long/way/to/the/train.py", 88),
    )
    return RankReport(
        rank=number, pid=7, step=60, for_s=27.0, waits=waits, words=words, cpu=0.0,
        groups=(ProcessGroupView(1, 2, 205),), stacks=(Stack(frames),),
    )  # fmt: skip


def test_a_narrow_answer_keeps_place_and_line() -> None:
    words = "in DataLoader.__next__ (train.py:88); its worker (pid 7) is in Samples.__getitem__ (train.py:31)"
    ranks = answered_rank(1, words, waits=False), answered_rank(0, "in backward (train.py:90)", waits=True)
    found = StallReport(30.0, 3.0, "rank 1 ...", ranks)
    assert "  12,345  " in format_report(replace(found, ranks=(replace(ranks[0], step=12345),)))[3][0]
    lines = [text for text, _ in format_report(found, width=76)]
    assert lines[2:5] == [
        "   RANK  STEP  FOR   IN                                          COLLECTIVES",
        ">  1     60    27 s  in DataLoader.__next__ (train.py:88); its…  205",
        "   0     60    27 s  waits in backward (train.py:90)             205",
    ]
    assert lines[6:8] == ["ranks 0, 1:", "  select (selectors.py:415)"]
    assert "  main (/home/me/a/long/way/to/the/train.py:88)" in lines
    assert "  main (train.py:88)" in [text for text, _ in format_report(found, width=40)]
    whole = [text for text, _ in format_report(found)]
    assert words in whole[3]
    assert whole[3].endswith("sleeping, 0% CPU")


def test_hostile_names_in_an_answer_are_cleaned() -> None:
    rank = replace(answered_rank(1, "in \x1b[2J (a.py:1)\n", waits=False), state="\x07", node="\x1b]52;c;x\x07")
    found = StallReport(30.0, 3.0, "\x1b[31m", (rank,))
    for width in (None, 40, 76):
        assert all(text.isprintable() for text, _ in format_report(found, width=width))
