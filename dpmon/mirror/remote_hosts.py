"""Finds the nodes that the user names, and runs dpmon on them.

The connection command is the user's own: ssh, srun, or a template such as `kubectl exec -i pod-{} --`. It is a list of
words, never a line for a shell. But ssh passes its words to a shell on the node and other commands do not, so dpmon
adds only words that mean the same with and without a shell.
"""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dpmon.errors import DpmonError
from dpmon.mirror.disconnect_reasons import MISSING
from dpmon.mirror.node_links import LineReceived, LinkClosed, NodeLinks
from dpmon.run import proc

_SSH_COMMAND = (
    *("ssh", "-T", "-C", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5"),
    *("-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=3", "--"),
)
"""-T: no terminal. BatchMode: no questions. ServerAlive...: ssh ends about 4 s after the connection was lost.

-C: compression. Without it, a packet of ssh (32 KiB) takes longer than this at 56 kbit/s, so the connection would end.
"""
MAX_NODES = 1024
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@%+/-]{0,254}")
"""Host names without spaces, special characters of a shell, or a leading dash, which would make them an option."""
PLAIN_WORD = re.compile(r"[A-Za-z0-9_./=,:@+-]+")
_MAX_RUN_S = 60.0
_MAX_SILENCE_S = 15.0
_MAX_OUTPUT_BYTES = 8 << 20
_LINE_BYTES = 100
"""About how much memory an empty line takes."""


class HostError(DpmonError):
    """A mistake in the names of nodes; the text is one sentence for the user."""


class RemoteHost(NamedTuple):
    """One node: its name, the words of the connection command, and the words that run dpmon there."""

    name: str
    connection_words: tuple[str, ...]
    dpmon: tuple[str, ...] = ("dpmon",)

    @property
    def command_prefix(self) -> tuple[str, ...]:
        """The first words of a command that runs dpmon on the node."""
        return self.connection_words + self.dpmon


class HostOutput(NamedTuple):
    """The lines that a command printed on one node.

    `why`: why the command failed, safe to show; empty if it did not. `for_good`: trying again is useless.
    """

    lines: list[bytes]
    why: str
    for_good: bool = False


def resolve_hosts(names: Sequence[str], *, via: str | None = None) -> list[RemoteHost]:
    """Return the named nodes, each once. `via`: connection command with {} for the name, or ssh. Raises HostError."""
    try:
        template = None if via is None else shlex.split(via)
    except ValueError as error:
        raise HostError(f"--via {via!r} cannot be split into words: {error}") from None
    if template is not None and not any("{}" in word for word in template):
        raise HostError("--via needs {} in place of the node's name, as in 'kubectl exec -i pod-{} --'")
    hosts = []
    local_name = "localhost" if template is None else None
    for name in dict.fromkeys(proc.host_name() if name == local_name else name for name in names):
        if not _NAME.fullmatch(name):
            raise HostError(f"{name!r} is not a valid node name")
        if template is not None:
            hosts.append(RemoteHost(name, tuple(word.replace("{}", name) for word in template)))
        elif name == proc.host_name():
            hosts.append(RemoteHost(name, (), _local_dpmon_command()))
        else:
            hosts.append(RemoteHost(name, (*_SSH_COMMAND, name)))
    if len(hosts) > MAX_NODES:
        raise HostError(f"too many nodes: {len(hosts)}, but at most {MAX_NODES} are allowed")
    return hosts


def expand_hostlist(text: str) -> list[str]:
    """Return the names in a list as Slurm writes it, such as `login,gpu[1-4,07-12]`. Raises HostError."""
    names: list[str] = []
    for item in re.split(r",(?![^\[]*\])", text.strip()):
        names += _expand_brackets(item, text)
        if len(names) > MAX_NODES:
            raise HostError(f"{text!r} names more than {MAX_NODES} nodes")
    return names


def _expand_brackets(item: str, text: str) -> Iterator[str]:
    prefix, bracket, after_bracket = item.partition("[")
    if not bracket:
        yield item
        return
    ranges_text, bracket, suffix = after_bracket.partition("]")
    for range_text in ranges_text.split(","):
        range_match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", range_text)
        if not bracket or range_match is None:
            raise HostError(f"{text!r} is not a list of nodes, such as gpu[1-4,7]")
        first, last = int(range_match[1]), int(range_match[2] or range_match[1])
        if not first <= last < first + MAX_NODES:
            raise HostError(f"{text!r}: {range_text} is not a range of up to {MAX_NODES} numbers")
        for number in range(first, last + 1):
            for suffix_name in _expand_brackets(suffix, text):
                yield f"{prefix}{number:0{len(range_match[1])}d}{suffix_name}"


def slurm_hosts(job: str) -> list[RemoteHost]:
    """Return the nodes of a Slurm job, with `srun --overlap` as connection command. Raises HostError."""
    job_match = re.fullmatch(r"(\d+(?:[_+]\d+)?)(?:\.\w+)?", job)
    if job_match is None:
        raise HostError(f"{job!r} is not a Slurm job number")
    job_number = job_match[1]
    squeue = RemoteHost("squeue", (), ("squeue",))
    (output,) = run_on_hosts([squeue], ("--noheader", "--jobs", job_number, "--format", "%T %N"))
    if output.why:
        raise HostError(f"Slurm does not list the nodes of job {job_number}: {output.why}")
    state, _, nodes = (output.lines or [b""])[0].decode("ascii", "replace").strip().partition(" ")
    if not nodes.strip():
        reason = f"it is {state}" if state else "it has ended"
        raise HostError(f"Slurm job {job_number} has no nodes: {reason}")
    srun_words = ("srun", "--overlap", "--quiet", "--jobid", job_number, "--nodes=1", "--ntasks=1", "--nodelist")
    return [RemoteHost(name, (*srun_words, name)) for name in expand_hostlist(nodes)]


def _local_dpmon_command() -> tuple[str, ...]:
    return (sys.executable, "-m", "dpmon")


def run_on_hosts(hosts: Sequence[RemoteHost], words: Sequence[str]) -> list[HostOutput]:
    """Run dpmon with `words` on all hosts, some at a time, and return one output per host."""
    limit_s = _MAX_RUN_S + _MAX_SILENCE_S
    outputs = [HostOutput([], f"it did not end within {limit_s:.0f} s") for _ in hosts]
    received_bytes, running = [0] * len(hosts), set(range(len(hosts)))
    deadline_s = time.monotonic() + limit_s
    links = NodeLinks(
        len(hosts), lambda node: [*hosts[node].command_prefix, *words], once=True, silent_s=_MAX_SILENCE_S
    )
    try:
        while running and time.monotonic() < deadline_s:
            for report in links.poll(1.0):
                node = report.node
                if isinstance(report, LineReceived):
                    if node not in running:
                        continue  # printed after its link was closed
                    received_bytes[node] += len(report.text) + _LINE_BYTES
                    outputs[node].lines.append(report.text)
                    if received_bytes[node] > _MAX_OUTPUT_BYTES:
                        outputs[node].lines.clear()
                        report = links.close_link(
                            node, f"it printed more than {_MAX_OUTPUT_BYTES >> 20} MiB", for_good=True
                        )
                if isinstance(report, LinkClosed):
                    running.discard(node)
                    outputs[node] = outputs[node]._replace(why=report.why, for_good=report.for_good)
    finally:
        links.close_all()
    return outputs


def run_dpmon_on_hosts(hosts: Sequence[RemoteHost], words: Sequence[str]) -> tuple[list[RemoteHost], list[HostOutput]]:
    """Do the same as `run_on_hosts`, and try this dpmon's path on hosts where dpmon is not in the PATH.

    Returns the hosts, with the words for dpmon that worked, and their outputs.
    """
    resolved, outputs = list(hosts), run_on_hosts(hosts, words)
    missing = [
        index
        for index, output in enumerate(outputs)
        if output.why == MISSING and resolved[index].dpmon != _local_dpmon_command()
    ]
    if missing and PLAIN_WORD.fullmatch(sys.executable):
        retried = [hosts[index]._replace(dpmon=_local_dpmon_command()) for index in missing]
        for index, host, output in zip(missing, retried, run_on_hosts(retried, words), strict=True):
            if not output.why:
                resolved[index], outputs[index] = host, output
    return resolved, outputs
