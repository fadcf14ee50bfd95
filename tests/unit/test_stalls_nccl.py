"""The question to NCCL and its answer, from a stand-in on this machine."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from dpmon.stalls import nccl_ras
from dpmon.stalls.nccl_ras import query_ras_problems

# As NCCL prints it (src/ras/client_support.cc of 2.28), for two ranks of which one is behind and one process is gone.
ANSWER = """OK
NCCL version 2.28.3 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12090

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      1          2            1          2        2

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         1         2         2         2   RUNNING  MISMATCH

Errors
======

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 77 on node 127.0.0.1 managing GPU 1

Warnings
========

#0-0 (7bc6c1f9a2d8a4e1) MISMATCH
  Communicator ranks have different AllReduce operation counts
  Rank 1 has launched up to operation 205 -- GPU 1 managed by process 4001 on node 127.0.0.1\x1b[2J

"""
EXPECTED = (
    "DEAD",
    "  1 job process is considered dead (unreachable via the RAS network)",
    "  Process 77 on node 127.0.0.1 managing GPU 1",
    "#0-0 (7bc6c1f9a2d8a4e1) MISMATCH",
    "  Communicator ranks have different AllReduce operation counts",
    "  Rank 1 has launched up to operation 205 -- GPU 1 managed by process 4001 on node 127.0.0.1\ufffd[2J",
)


class Ras:
    """Answers one question."""

    def __init__(self, answer: bytes, *, ends: bool = True) -> None:
        self.asked = b""
        self._answer, self._ends, self._over = answer, ends, threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.settimeout(60)
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._socket.accept()
        with connection:
            while not self.asked.endswith(b"status\n"):
                self.asked += connection.recv(100)
            connection.sendall(self._answer)
            self._over.wait(0 if self._ends else 60)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._socket.close()


@pytest.fixture
def ras(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ras]:
    made = Ras(*request.param[:1], ends=request.param[-1] is not False)
    monkeypatch.setenv("NCCL_RAS_ADDR", made.address)
    yield made
    made.close()


@pytest.mark.parametrize("ras", [(ANSWER.encode(),)], indirect=True)
def test_ranks_that_are_gone_or_behind_are_named(ras: Ras) -> None:
    assert query_ras_problems({4000, 4001}) == EXPECTED
    assert ras.asked == b"timeout 1\nverbose status\n"


@pytest.mark.parametrize(
    "ras",
    [
        (ANSWER.replace("process 4001", "process 5001").replace("Process 77", "Process 78").encode(),),
        (ANSWER.partition("DEAD")[0].encode() + b"Warnings\n========\n\n",),
        (b"ERROR: Unknown command\n",),
        (b"\xff" * 1000,),
        (b"",),
        (b"Errors\nprocess 999999999999999999999 on node x\n",),
    ],
    ids=["another job's", "nothing is wrong", "too old", "rubbish", "nothing", "a long number"],
    indirect=True,
)
def test_nothing_is_said_without_a_name_of_this_run(ras: Ras) -> None:
    assert query_ras_problems({4000, 4001, 77}) == ()


@pytest.mark.parametrize("ras", [(ANSWER.encode(), False)], indirect=True)
def test_an_answer_without_an_end_is_not_waited_for(ras: Ras, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ras, "MAX_WAIT_S", 0.3)
    assert query_ras_problems({4001}) == ()


@pytest.mark.parametrize("ras", [(ANSWER.encode().replace(b"DEAD", b"DEAD\n" * 500),)], indirect=True)
def test_a_long_answer_is_cut(ras: Ras) -> None:
    assert len(query_ras_problems({4001})) == 20


@pytest.mark.parametrize(
    "address", ["10.0.0.1:28028", "node7:28028", "nonsense", "localhost:x", "localhost:99999", "localhost:0", "[::1]:0"]
)
def test_no_other_machine_and_no_wrong_address_is_asked(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_RAS_ADDR", address)
    asked: list[object] = []
    original = socket.create_connection

    def connect(to: tuple[str, int], limit: float) -> socket.socket:
        asked.append(to[0])
        return original(to, limit)

    monkeypatch.setattr(socket, "create_connection", connect)
    assert query_ras_problems({1}) == ()
    assert set(asked) <= {"localhost", "::1"}
