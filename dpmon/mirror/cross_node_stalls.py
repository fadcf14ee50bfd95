"""The verdict about a stall of a job on several machines: each of their supervisors sees only its own ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpmon.record.safe_json import int_member, ns_member, number_member, text_member
from dpmon.record.schema import SECOND
from dpmon.run.run_directory import RunInfo
from dpmon.stalls.rank_inspector import RankInspector
from dpmon.stalls.stacks import ProcessStacks
from dpmon.stalls.stall_detection import RankActivity
from dpmon.stalls.why_reply import parse_rank
from dpmon.supervise.stall_watch import StallRecorder, StallWatch

_MOST_RANKS = 512
"""Most ranks of one machine."""


class _ReportedRanks(RankInspector):
    """The ranks of the machines, as their supervisors describe them while one stands still."""

    def __init__(self, directory: Path, info: RunInfo) -> None:
        super().__init__(directory, info.cwd)
        self.heard: dict[int, list[RankActivity]] = {}
        """By machine; empty if none of its ranks stands still. A machine that does not answer is missing."""

    def inspect_ranks(self, steps: Mapping[int, int | None], now_ns: int) -> list[RankActivity]:
        if not all(self.heard.values()):
            return []  # a rank that moves holds nobody up for long
        known = [rank for node in self.heard.values() for rank in node]
        living = {rank.rank for rank in known if not rank.is_over}
        return [
            rank for rank in known if not rank.is_over or rank.rank not in living
        ]  # a job may start its ranks again

    def with_exceptions(self, ranks: list[RankActivity]) -> list[RankActivity]:
        return ranks

    def take_stacks(self, *, native: bool = False, still_ns: int = 0) -> Mapping[int, ProcessStacks]:
        return {}  # they come with the facts

    def query_nccl(self) -> None:
        """Nothing: the supervisors ask it."""


class CrossNodeStallDetector:
    """Judges the ranks of all machines of one job, and records stalls in the place of their supervisors."""

    def __init__(
        self,
        directory: Path,
        info: RunInfo,
        record: StallRecorder,
        nodes: int,
        number: Callable[[int, int], int | None],
    ) -> None:
        """`nodes`: how many machines. `number`: the number of a process in this run, by machine and number there."""
        self.info = info
        self._directory, self._record, self._number = directory, record, number
        self._look = _ReportedRanks(directory, info)
        self._nodes = nodes
        self._expected = set(range(nodes))
        """The machines that have neither answered yet, nor been lost."""
        self._watch: StallWatch | None = None
        self._judged: set[int] = set()
        self._begun: set[tuple[int, int | None]] = set()

    def receive_rank_report(self, node: int, name: str, found: Mapping[str, Any], age_ns: int) -> None:
        """Take what a supervisor wrote (`why_reply.describe_ranks`) `age_ns` ago. ValueError if it is not that."""
        now, ranks = time.monotonic_ns() - age_ns, found.get("ranks")
        if not isinstance(ranks, list) or not all(isinstance(rank, dict) for rank in ranks[:_MOST_RANKS]):
            raise ValueError("not a list of ranks")
        facts = [parse_rank(rank, name, now) for rank in ranks[:_MOST_RANKS]]
        self._expected.discard(node)
        # The ranks of a machine that belong to another job, or to none, are judged among themselves.
        self._look.heard[node] = [
            rank._replace(
                process=None if rank.process is None else self._number(node, rank.process),
                job=rank.job and hash((node, rank.job)),
            )
            for rank in facts
        ]
        if facts:
            self._judged.add(node)
            if self._watch is None:
                self._watch = StallWatch(
                    self._directory, self.info, self._record, is_takeover=True, inspector=self._look
                )

    def drop_node(self, node: int) -> None:
        """The machine does not answer: what its ranks do is unknown."""
        self._expected.discard(node)
        self._look.heard.pop(node, None)

    def should_store_stall(self, node: int, stall: Mapping[str, Any]) -> bool:
        """Whether the record of a stall by a machine's own supervisor goes into this run's record.

        Not if its ranks are judged here. The end of a stall is kept if its beginning was.
        """
        key = node, ns_member(stall, "since_s")
        if "ranks" not in stall:
            return key in self._begun
        if node not in self._judged:
            self._begun.add(key)
        return node not in self._judged

    def poll(self) -> None:
        """Judge, once a second; never waits, never raises."""
        heard = self._look.heard
        if self._watch is None or self._expected:
            return
        if self._watch.stall is not None and len(heard) < self._nodes and all(heard.values()):
            return  # no rank moves, so that the stall goes on, whatever those do that are not seen
        self._watch.poll()

    def close(self) -> None:
        """A stall that goes on stays open in the record."""
        if self._watch is not None:
            self._watch.close()

    def merge_replies(
        self, answers: Mapping[int, tuple[str, Mapping[str, Any]]], now_ns: int, without: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Join the machines' answers to "why is it stuck", each with the machine's name, into one.

        The ranks that the others wait for come first. `without`: the machines without an answer, and why.
        """
        stall, waits = (None, {}) if self._watch is None else (self._watch.stall, self._watch.waits)
        texts: list[str] = []
        nccl: list[str] = []
        ranks: list[dict[str, Any]] = []
        for node, (name, found) in answers.items():
            judged = node in self._judged
            texts += [f"{name}: {text}"] if (text := text_member(found, "text")) is not None and not judged else []
            nccl += [f"{name}: {line}" for line in _list_member(found, "nccl")]
            for rank in _list_member(found, "ranks"):
                if isinstance(rank, dict):
                    part = (
                        _stall_role(waits.get((name, int_member(rank, "pid") or 0)), stall is not None)
                        if judged
                        else {}
                    )
                    process = int_member(rank, "process")
                    number = None if process is None else self._number(node, process)
                    ranks.append({**rank, **part, "node": name, "process": number})
        ranks.sort(key=_sort_key)
        since_ns = None if stall is None else stall.since_ns
        if stall is not None and self._watch is not None:
            texts.insert(0, self._watch.stall_text)
        begun = [since for _, found in answers.values() if (since := number_member(found, "since_s")) is not None]
        return {
            "t_s": (now_ns - self.info.start_ns) / SECOND,
            "since_s": min(begun, default=None) if since_ns is None else (since_ns - self.info.start_ns) / SECOND,
            "text": "; ".join(texts) or None,
            "nccl": nccl,
            **({"without": list(without)} if without else {}),
            "ranks": ranks,
        }


def _list_member(found: Mapping[str, Any], key: str) -> list[Any]:
    value = found.get(key)
    return value[:_MOST_RANKS] if isinstance(value, list) else []


def _sort_key(rank: Mapping[str, Any]) -> tuple[bool, bool, int]:
    """What sorts the ranks: those that the others wait for come first."""
    number = int_member(rank, "rank")
    return rank.get("apart") is True, rank.get("waits") is True, -1 if number is None else number


def _stall_role(waits: bool | None, stalled: bool) -> dict[str, bool]:
    """The part of a rank in the stall. `waits`: None if it has none."""
    return {"waits": waits is True, "apart": stalled and waits is None}
