"""The machines that a user names, the words that run dpmon on one of them, and one command on all of them at once.

The way to a machine is the user's own command: ssh, srun, or a template such as `kubectl exec -i pod-{} --`. It is a
list of words, never a line for a shell. But ssh gives its words to a shell there and others do not, so dpmon adds only
words that mean the same with and without one.
"""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from dpmon.errors import DpmonError
from dpmon.mirror.disconnect_reasons import MISSING
from dpmon.mirror.node_links import LineReceived, LinkClosed, NodeLinks
from dpmon.run import proc
from dpmon.run.safe_files import read_file

_SSH = (
    *("ssh", "-T", "-C", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5"),
    *("-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=3", "--"),
)
"""-T: no terminal; BatchMode: no questions; the rest: a connection that is cut ends after about 4 s.

-C: compression. Without it, a packet of ssh (32 KiB) takes longer than this at 56 kbit/s, so the connection would end.
"""
MOST_MACHINES = 1024
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@%+/-]{0,254}")
"""Without a blank, a sign of the shell, or a dash at the front, which would be an option of the command."""
PLAIN = re.compile(r"[A-Za-z0-9_./=,:@+-]+")
_JOB = re.compile(r"(\d+(?:[_+]\d+)?)(?:\.\w+)?")
_LIMIT_S = 60.0
_SILENT_S = 15.0
_MOST_BYTES = 8 << 20
_LINE_BYTES = 100
"""What an empty line takes, about."""


class HostError(DpmonError):
    """Machines that are named wrongly; the text is one sentence for the user."""


class RemoteHost(NamedTuple):
    """One machine: its name, the words of the way to it, and the words of dpmon there."""

    name: str
    way: tuple[str, ...]
    dpmon: tuple[str, ...] = ("dpmon",)

    @property
    def command_prefix(self) -> tuple[str, ...]:
        """The first words of a command of dpmon there."""
        return self.way + self.dpmon


class HostOutput(NamedTuple):
    """The lines that a command printed on one machine; `why`: why it failed, safe to show; empty if it did not.

    `for_good`: trying again is useless.
    """

    lines: list[bytes]
    why: str
    for_good: bool = False


def resolve_hosts(names: Sequence[str], *, via: str | None = None) -> list[RemoteHost]:
    """The named machines, each once, with the way to each: `via`, in which {} is the name, or ssh. Raises HostError."""
    try:
        template = None if via is None else shlex.split(via)
    except ValueError as error:
        raise HostError(f"--via {via!r} cannot be split into words: {error}") from None
    if template is not None and not any("{}" in word for word in template):
        raise HostError("--via needs {} in the place of a machine's name, as in 'kubectl exec -i pod-{} --'")
    found = []
    own = "localhost" if template is None else None
    for name in dict.fromkeys(proc.host_name() if name == own else name for name in names):
        if not _NAME.fullmatch(name):
            raise HostError(f"{name!r} is not the name of a machine")
        if template is not None:
            found.append(RemoteHost(name, tuple(word.replace("{}", name) for word in template)))
        elif name == proc.host_name():
            found.append(RemoteHost(name, (), _local_dpmon_command()))
        else:
            found.append(RemoteHost(name, (*_SSH, name)))
    if len(found) > MOST_MACHINES:
        raise HostError(f"{len(found)} machines are more than {MOST_MACHINES}")
    return found


def expand_hostlist(text: str) -> list[str]:
    """The names in a list such as `login,gpu[1-4,07-12]`, as Slurm writes it. Raises HostError."""
    names: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text.strip()):
        names += _expand_brackets(part, text)
        if len(names) > MOST_MACHINES:
            raise HostError(f"{text!r} names more than {MOST_MACHINES} machines")
    return names


def _expand_brackets(part: str, text: str) -> Iterator[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    inner, bracket, tail = rest.partition("]")
    for span in inner.split(","):
        ends = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", span)
        if not bracket or ends is None:
            raise HostError(f"{text!r} is not a list of machines, such as gpu[1-4,7]")
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if not first <= last < first + MOST_MACHINES:
            raise HostError(f"{text!r}: {span} is no range of up to {MOST_MACHINES} numbers")
        for number in range(first, last + 1):
            for end in _expand_brackets(tail, text):
                yield f"{head}{number:0{len(ends[1])}d}{end}"


def read_hostfile(path: str) -> list[str]:
    """The names in a host file of MPI or DeepSpeed: the first word of each line, without `:SLOTS`. Raises HostError."""
    try:
        lines = read_file(Path(path), 1 << 20).decode().splitlines()
    except (OSError, ValueError) as error:
        raise HostError(f"{path} cannot be read: {error}") from None
    words = [line.partition("#")[0].split() for line in lines]
    names = [
        name for first, *_ in filter(None, words) for name in expand_hostlist(re.sub(r"^([^:]+):\d+$", r"\1", first))
    ]
    if not names:
        raise HostError(f"{path} names no machine")
    return names


def slurm_hosts(job: str) -> list[RemoteHost]:
    """The machines of a job of Slurm, reached by `srun --overlap`. Raises HostError."""
    found = _JOB.fullmatch(job)
    if found is None:
        raise HostError(f"{job!r} is not the number of a job of Slurm")
    number = found[1]
    asked = RemoteHost("squeue", (), ("squeue",))
    (answer,) = run_on_hosts([asked], ("--noheader", "--jobs", number, "--format", "%T %N"))
    if answer.why:
        raise HostError(f"Slurm does not name the machines of job {number}: {answer.why}")
    state, _, nodes = (answer.lines or [b""])[0].decode("ascii", "replace").strip().partition(" ")
    if not nodes.strip():
        raise HostError(f"job {number} of Slurm has no machines: {f'it is {state}' if state else 'it is over'}")
    way = ("srun", "--overlap", "--quiet", "--jobid", number, "--nodes=1", "--ntasks=1", "--nodelist")
    return [RemoteHost(name, (*way, name)) for name in expand_hostlist(nodes)]


def _local_dpmon_command() -> tuple[str, ...]:
    return (sys.executable, "-m", "dpmon")


def run_on_hosts(
    machines: Sequence[RemoteHost], words: Sequence[str], *, silent_s: float = _SILENT_S
) -> list[HostOutput]:
    """Run dpmon with `words` on each machine, some at a time; not for longer than _LIMIT_S and `silent_s`.

    `silent_s`: how long a machine may print nothing.
    """
    limit_s = _LIMIT_S + silent_s
    answers = [HostOutput([], f"it did not end within {limit_s:.0f} s") for _ in machines]
    taken, waiting = [0] * len(machines), set(range(len(machines)))
    until = time.monotonic() + limit_s
    links = NodeLinks(
        len(machines), lambda node: [*machines[node].command_prefix, *words], once=True, silent_s=silent_s
    )
    try:
        while waiting and time.monotonic() < until:
            for report in links.poll(1.0):
                node = report.node
                if isinstance(report, LineReceived):
                    if node not in waiting:
                        continue  # the rest of a flood
                    taken[node] += len(report.text) + _LINE_BYTES
                    answers[node].lines.append(report.text)
                    if taken[node] > _MOST_BYTES:
                        answers[node].lines.clear()
                        report = links.close_link(node, f"it printed more than {_MOST_BYTES >> 20} MiB", for_good=True)
                if isinstance(report, LinkClosed):
                    waiting.discard(node)
                    answers[node] = answers[node]._replace(why=report.why, for_good=report.for_good)
    finally:
        links.close_all()
    return answers


def run_dpmon_on_hosts(
    machines: Sequence[RemoteHost], words: Sequence[str], *, silent_s: float = _SILENT_S
) -> tuple[list[RemoteHost], list[HostOutput]]:
    """The same; where dpmon is not in the PATH, also with the path of this dpmon. The machines are as they answered."""
    found, answers = list(machines), run_on_hosts(machines, words, silent_s=silent_s)
    missing = [
        at for at, answer in enumerate(answers) if answer.why == MISSING and found[at].dpmon != _local_dpmon_command()
    ]
    if missing and PLAIN.fullmatch(sys.executable):
        again = [machines[at]._replace(dpmon=_local_dpmon_command()) for at in missing]
        for at, machine, answer in zip(missing, again, run_on_hosts(again, words, silent_s=silent_s), strict=True):
            if not answer.why:
                found[at], answers[at] = machine, answer
    return found, answers
