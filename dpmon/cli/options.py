"""Separates dpmon's part of the command line from the script's, and parses dpmon's part."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NoReturn

import dpmon
from dpmon.config import SETTINGS
from dpmon.errors import DpmonError
from dpmon.stalls.run_state import STATES

SEVERAL = ("attach", "ls", "doctor")
"""Commands that can look at several machines."""
MAX_REPLICAS = 4096
WAITED = ("fine", *STATES, "finished", "stopped", "interrupted", "failed", "killed")
"""The words of `status --wait`: states, and ends."""

_USAGE = """\
dpmon [OPTIONS] SCRIPT.py [ARGS...]     run a script and watch it
       dpmon [OPTIONS] -m MODULE [ARGS...]     run a module
       dpmon [OPTIONS] COMMAND [ARGS...]       any launcher: torchrun, accelerate, python -u
       dpmon attach [RUN] [--host HOST ...]    show a run again, live or finished, of one machine or several
       dpmon status [RUN] [--json]             say whether the training is fine: exit status 0 if it is
       dpmon why [RUN] [--json]                say which rank stands where, and what the others wait for
       dpmon ls                                list the runs
       dpmon stop RUN                          stop a run: SIGINT, SIGTERM, SIGKILL
       dpmon report [RUN] [--json | --html]    summarize a run
       dpmon compare A B                       say what differs between runs, and which are faster
       dpmon export [RUN] [--format FORMAT]    write the records: jsonl, csv, perfetto
       dpmon try [--steps N] SCRIPT.py ...     run a script shortly, several times, to see what a change can bring
       dpmon doctor                            check whether dpmon works here
       dpmon keep [--not] [RUN]                protect a run from automatic deletion; --not: unprotect it
       dpmon rm RUN [RUN ...]                  delete runs"""
_EPILOG = """\
Everything after the script's name belongs to the script. RUN is a name, an id, the unique start of either, or `last`.
The exit status is the script's own, 128+N for a signal; 2 for a wrong command line.
"""


_DESCRIPTIONS = {
    "attach": (
        "Show a run again, live or finished. Without RUN: the newest live run, else the newest one."
        " With --host and the like: the runs of one job on several machines, as one run."
    ),
    "status": "Say whether a run is fine. Exit status: 0 fine, 3 not training, 4 no such run, 5 stalled, 6 failed.",
    "why": (
        "Say which rank stands where, and what the others wait for. Without RUN: the newest live run."
        " Exit status: 0, or 4 if there is no such run."
    ),
    "ls": "List the runs, the newest last.",
    "stop": "Stop a run and all its processes: SIGINT, SIGTERM, SIGKILL, with a wait after each.",
    "report": "Summarize a run, live or finished. Without RUN: the newest one.",
    "compare": (
        "Say what differs between runs, and how their figures changed. Several runs a side: A1 A2 A3 -- B1 B2 B3."
        " Exit status with a threshold: 0 not slower, 4 slower, 3 inconclusive."
    ),
    "export": "Write the records of a run, live or finished. Without RUN: the newest one.",
    "try": (
        "Run a script for some steps, several times: as it is, and with one thing changed, such as batches that are"
        " loaded already. Say what each change brings."
    ),
    "doctor": "Check whether dpmon works here, with a remedy for each fault.",
    "keep": "Protect a run from automatic deletion. Without RUN: the newest one.",
    "rm": "Delete finished runs that are not protected by `dpmon keep`.",
}
COMMANDS = ("run", *_DESCRIPTIONS)


class UsageError(DpmonError):
    """A wrong command line; the text is one sentence for the user."""


_JSON = "one JSON object, for programs"
_PYTHON = "the Python that runs the script (default: the first that has torch)"
_METRICS = "write figures for Prometheus to FILE (node_exporter's textfile format)"
_MACHINES = ("--host", "--hosts", "--hostfile", "--slurm", "--via")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            word = unknown.split()[0]
            if word.partition("=")[0] in _MACHINES:
                raise UsageError(f"{word} is an option of attach, ls and doctor; other commands take the run of attach")
            raise UsageError(f"unknown option {word}" if word.startswith("-") else f"{word} is not expected here")
        raise UsageError(message.removeprefix("argument "))


def _setting_validator(name: str) -> Callable[[str], object]:
    """Return a check of the value of an option that is also a setting."""

    def check(text: str) -> object:
        try:
            return SETTINGS[name](text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"expected {error}, not {text!r}") from None

    return check


_batch_dim, _seconds = _setting_validator("batch_dim"), _setting_validator("refresh")


def _value_parser(
    expected: str, pattern: str, convert: Callable[[str], Any] = str, least: float = 0, most: float = inf
) -> Callable[[str], object]:
    """Return a function that checks an option's value and converts the first group of `pattern`.

    A number must lie between `least` and `most`. ArgumentTypeError if the value is wrong.
    """

    def check(text: str) -> object:
        found = re.fullmatch(pattern, text)
        value = None if found is None else convert(found[1])
        if value is None or (not isinstance(value, str) and not least <= value <= most):
            raise argparse.ArgumentTypeError(f"expected {expected}, not {text!r}")
        return value

    return check


_replicas = _value_parser(f"a number from 1 to {MAX_REPLICAS}", r"([0-9]{1,9})", int, 1, MAX_REPLICAS)
_count = _value_parser("a whole number from 1 on", r"([0-9]{1,9})", int, 1)
_offset = _value_parser("a whole number", r"([0-9]{1,15})", int)
_timeout = _value_parser("a number of seconds", r"([0-9]{1,9}(?:\.[0-9]{0,9})?)", float)
_percent = _value_parser(
    "a percentage such as 5%", r"([0-9]{1,3}(?:\.[0-9]{1,6})?) ?%", lambda text: float(text) / 100, 1e-8, 5
)
_trial = _value_parser(
    "cached-batches, single, one-rank or threads-N", r"(cached-batches|single|one-rank|threads-[1-9]\d{0,3})"
)
_run_name = _value_parser(
    "a name of letters, digits, . _ - (except `last`)", r"((?!last$)[A-Za-z0-9][A-Za-z0-9._-]{0,39})"
)


def _phase(text: str) -> str:
    from dpmon.model.run_comparison import GATE_METRICS  # expensive

    if text not in GATE_METRICS:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(GATE_METRICS)}, not {text!r}")
    return text


def _devices(text: str) -> str:
    names = [name.strip() for name in text.split(",")]
    if not all(re.fullmatch(r"cpu|cuda(:\d{1,3})?", name) for name in names):
        raise argparse.ArgumentTypeError(f"expected a list such as cuda:0,cuda:1 or cpu,cpu, not {text!r}")
    if len({name.partition(":")[0] for name in names}) > 1:
        raise argparse.ArgumentTypeError(f"all replicas must be on cpu or all on cuda, not {text!r}")
    return ",".join(names)


def run_parser() -> argparse.ArgumentParser:
    """The parser of the options before the script's name."""
    parser = _Parser(
        prog="dpmon",
        usage=_USAGE,
        description="Live terminal monitor for data-parallel PyTorch training.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--version", action="version", version=f"dpmon {dpmon.__version__}")
    add("-m", dest="module", metavar="MODULE", help="run a module instead of a script")
    add("--replicas", type=_replicas, metavar="N", help="use N GPUs, or N virtual replicas if there are fewer")
    add("--devices", type=_devices, metavar="LIST", help="the replicas' devices: cuda:0,cuda:1 or cpu,cpu")
    add(
        "--mode",
        choices=("auto", "script", "dp", "single"),
        default="auto",
        help="initial mode; script: leave the computation exactly as written; auto: follow the script and the options",
    )
    add("--batch-dim", type=_batch_dim, metavar="N", help="the batch's dimension in a model's first input (default: 0)")
    add("--no-loss", dest="loss", action="store_false", help="do not read the losses of the training")
    add("--replay", type=_count, metavar="N", help="give the first N batches of each loader again and again")
    add("--headless", action="store_true", help="no screen (the default without a terminal)")
    add("--detach", action="store_true", help="start in the background and return at once")
    add(
        "--json",
        nargs="?",
        const="-",
        metavar="=FILE",
        help="without a screen: one JSON line per second on stderr, or in FILE (--json=/dev/fd/3)",
    )
    add("--metrics", metavar="FILE", help=_METRICS)
    add(
        "--on-event",
        type=_setting_validator("on_event"),
        metavar="COMMAND",
        help="start COMMAND for each event of the run",
    )
    add("--refresh", type=_seconds, metavar="SECONDS", help="seconds between updates of the screen (default: 1)")
    add("--name", type=_run_name, help="the run's name (default: the script's)")
    add("--python", metavar="PYTHON", help=_PYTHON)
    return parser


def try_parser() -> argparse.ArgumentParser:
    """The parser of the options of `try`, before the script's name."""
    parser = _Parser(
        prog="dpmon try", usage="dpmon try [OPTIONS] SCRIPT.py [ARGS...]", description=_DESCRIPTIONS["try"],
        allow_abbrev=False
    )  # fmt: skip
    add = parser.add_argument
    add("-m", dest="module", metavar="MODULE", help="try a module instead of a script")
    add("--steps", type=_count, default=200, metavar="N", help="end each run after N steps (default: 200)")
    add("--rounds", type=_count, default=3, metavar="N", help="runs of each trial (default: 3)")
    add(
        "--only",
        action="append",
        type=_trial,
        metavar="TRIAL",
        help="only this trial: cached-batches, single, one-rank, threads-N",
    )
    add("--timeout", type=_timeout, default=600.0, metavar="SECONDS", help="longest run (default: 600)")
    add("--json", action="store_true", help=_JSON)
    add("--replicas", type=_replicas, metavar="N", help="as for a run")
    add("--devices", type=_devices, metavar="LIST", help="as for a run")
    add("--python", metavar="PYTHON", help=_PYTHON)
    return parser


def command_parser(command: str) -> argparse.ArgumentParser:
    """The parser of the words after one of COMMANDS."""
    if command == "try":
        return try_parser()
    parser = _Parser(prog=f"dpmon {command}", description=_DESCRIPTIONS[command], allow_abbrev=False)
    add = parser.add_argument
    if command == "rm":
        add("runs", metavar="RUN", nargs="+", help="an id, the unique start of an id, or a name that only one run has")
    elif command == "compare":
        add("runs", metavar="RUN", nargs="+", help="the run before and the run after; -- separates several of each")
    elif command not in ("doctor", "ls"):
        # Without a RUN, attach shows a live one.
        default = None if command in ("attach", "status", "why") else "last"
        optional = {"nargs": None} if command == "stop" else {"nargs": "?", "default": default}
        add("run", metavar="RUN", help="a name, an id, the unique start of either, or `last`", **optional)
    if command == "attach":
        add("--refresh", type=_seconds, metavar="SECONDS", help="seconds between updates of the screen")
        add("--headless", action="store_true", help="follow the run without a screen")
        add("--metrics", metavar="FILE", help=f"of a run on several machines: {_METRICS}")
        add("--json", nargs="?", const="-", metavar="=FILE", help="one JSON line per second, on stderr or in FILE")
    if command in SEVERAL:
        add("--host", action="append", metavar="HOST", help="a machine to look at, by ssh (repeatable)")
        add("--hosts", metavar="LIST", help="machines, such as gpu[1-4,7],login")
        add("--hostfile", metavar="FILE", help="machines, one per line, as for mpirun")
        add("--slurm", metavar="JOBID", help="the machines of a job of Slurm, by srun")
        add("--via", metavar="COMMAND", help="another way than ssh; {} is the machine: 'kubectl exec -i pod-{} --'")
    if command in ("doctor", "status", "why"):
        add("--json", action="store_true", help=_JSON)
    if command == "doctor":
        add("--python", metavar="PYTHON", help="the Python that would run the script")
    if command == "ls":
        add("--json", action="store_true", help="one JSON object per line")
        add("--script", metavar="SCRIPT", help="the figures of this script over its runs, oldest to newest")
    if command == "status":
        add("--all", action="store_true", help="all runs")
        add("--wait", choices=WAITED, metavar="STATE", help=f"wait for a state: {', '.join(WAITED)}")
        add("--timeout", type=_timeout, metavar="SECONDS", help="longest wait; then the exit status is 124")
    if command == "why":
        add("--all", action="store_true", help="the stacks of all threads, not only of the main thread")
        add("--native", action="store_true", help="also C frames; py-spy then stops each process for about 50 ms")
    if command == "keep":
        add("--not", dest="kept", action="store_false", help="end the protection")
    if command == "compare":
        limit: dict[str, Any] = {"type": _percent, "metavar": "PERCENT"}
        add("--fail-if-slower", **limit, help="exit with 4 if a step takes longer by more than this, such as 5%%")
        add("--phase", type=_phase, action="append", help="apply --fail-if-slower to this phase instead (repeatable)")
        add("--memory", **limit, help="exit with 4 if the peak of memory grew by more than this")
        add("--anyway", action="store_true", help="judge runs that differ in arguments, mode, ranks, devices or batch")
    if command in ("report", "compare"):
        form = parser.add_mutually_exclusive_group()
        form.add_argument("--json", action="store_true", help=_JSON)
        form.add_argument("--html", action="store_true", help="a self-contained page with plots")
        add("-o", "--output", metavar="FILE", help="output file (default: standard output; of --html, RUN.html)")
    if command == "export":
        from dpmon.record.record_specs import RECORDS

        forms = "jsonl: one JSON object per line; csv: one table per kind; perfetto: a trace for ui.perfetto.dev"
        add("--format", choices=("jsonl", "csv", "perfetto"), default="jsonl", help=forms)
        add("--kind", choices=tuple(RECORDS), help="only this kind of record (jsonl and csv)")
        add("-o", "--output", metavar="FILE", help="output file (default: standard output); for csv, a directory")
        add("--follow", action="store_true", help="write the rows of the history as they come, until the run's end")
        add("--from", dest="start", type=_offset, default=0, metavar="OFFSET", help="with --follow: only later rows")
        add("--rollups", action="store_true", help="with --follow: about one step a second, for a mirror of the run")
    return parser


def names_remote_hosts(options: argparse.Namespace) -> bool:
    """Whether the options name other machines."""
    return any(getattr(options, name, None) is not None for name in ("host", "hosts", "hostfile", "slurm", "via"))


def usage() -> list[tuple[str, str]]:
    """Each form of the command line with its description."""
    lines = (re.split(" {2,}", line.strip(), maxsplit=1) for line in _USAGE.splitlines())
    return [(form, description) for form, description in lines]


def options_with_value(parser: argparse.ArgumentParser) -> set[str]:
    """The options that need a value, which may be the next word."""
    return {option for action in parser._actions if action.nargs is None for option in action.option_strings}


def _split_words(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[list[str], list[str], bool]:
    """Split `words` into dpmon's own and the command's, at the first word that is no option or after `-m MODULE`.

    The third value is True if `--` separates them: then a program follows, even if it has the name of a command.
    """
    valued = options_with_value(parser)
    own: list[str] = []
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        word = words[at]
        at += 1
        if word == "--":
            return own, list(words[at:]), True
        own.append(word)
        if word in valued and at < len(words):
            # Joined, so that a value such as -1 is not parsed as an option.
            own[-1:] = [f"{word}={words[at]}"] if word.startswith("--") else [word, words[at]]
            at += 1
        if word.startswith("-m") and not word.startswith("--"):
            break
    return own, list(words[at:]), False


def suggest_command(word: str) -> str | None:
    """The command that the misspelled `word` probably means; None if no command is similar."""
    import difflib

    return next(iter(difflib.get_close_matches(word, COMMANDS, 1, 0.7)), None)


def parse(words: Sequence[str]) -> tuple[str, argparse.Namespace]:
    """The command (one of COMMANDS, or "help") and its options; for run, `options.words` is the script's command line.

    Raises UsageError; SystemExit(0) after --help and --version have printed.
    """
    parser = run_parser()
    own, rest, program = _split_words(parser, words)
    options = parser.parse_args(own)
    command = "run"
    if options.module is None and rest and rest[0] in COMMANDS and not program:
        command, rest = rest[0], rest[1:]
        if own and command != "run":
            raise UsageError(f"{own[0]} is an option of a run, not of {command}")
        if command not in ("run", "try"):
            return command, _parse_run_command(command, rest)
        if command == "try":
            parser, options = try_parser(), argparse.Namespace()
        own, rest, _ = _split_words(parser, rest)
        options = parser.parse_args(own, options)
    options.words = rest
    if options.module is None and not rest:
        if words:
            raise UsageError(f"no script to {command}")
        parser.print_help(sys.stderr)
        return "help", options
    if command == "run":
        _check(options)
    return command, options


def _parse_run_command(command: str, words: list[str]) -> argparse.Namespace:
    """The options of a command about runs that exist."""
    if command == "compare":
        return _parse_compare(words)
    # A word after --json is the run, not the output file.
    words = ["--json=-" if word == "--json" and command == "attach" else word for word in words]
    found = command_parser(command).parse_args(words)
    if command == "status":
        _check_status(found)
    if command == "export":
        _check_export(found)
    if command == "attach" and found.metrics and not names_remote_hosts(found):
        raise UsageError("attach takes --metrics only with several machines (--host); otherwise give it to the run")
    return found


def _parse_compare(words: list[str]) -> argparse.Namespace:
    """The options of compare, with the runs `before` and `after`; options may be on both sides of the --."""
    parser = command_parser("compare")
    at = words.index("--") if "--" in words else len(words)
    found = parser.parse_args(words[:at])
    found.before = found.runs
    if at < len(words):
        parser.parse_args(words[at + 1 :], found)
    elif len(found.runs) == 2:
        found.before, found.runs = found.runs[:1], found.runs[1:]
    else:
        raise UsageError("compare takes two runs, or several on each side of -- (A1 A2 A3 -- B1 B2 B3)")
    found.after = found.runs
    if found.phase and found.fail_if_slower is None:
        raise UsageError("--phase needs --fail-if-slower")
    return found


def _check_status(options: argparse.Namespace) -> None:
    if options.all and (options.run is not None or options.wait is not None):
        raise UsageError("--all shows all runs: it excludes RUN and --wait")
    if options.timeout is not None and options.wait is None:
        raise UsageError("--timeout limits a wait: it needs --wait")


def _check_export(options: argparse.Namespace) -> None:
    if options.follow and (options.format, options.kind, options.output) != ("jsonl", None, None):
        raise UsageError("--follow has a form of its own: it excludes --format, --kind and --output")
    if not options.follow and (options.start or options.rollups):
        raise UsageError(f"{'--from' if options.start else '--rollups'} needs --follow")


def _check(options: argparse.Namespace) -> None:
    if options.replicas is not None and options.devices is not None:
        count = len(options.devices.split(","))
        if count != options.replicas:
            raise UsageError(f"--replicas {options.replicas} contradicts --devices with {count} devices")
    if options.json is not None and options.detach:
        raise UsageError("--json does not work with --detach (dpmon attach --json follows a run)")
    if options.mode == "script" and (options.replicas is not None or options.devices is not None):
        raise UsageError("--mode script leaves the computation as written, so it excludes --replicas and --devices")
