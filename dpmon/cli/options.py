"""Separates dpmon's part of the command line from the script's, and parses dpmon's part."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import dpmon
from dpmon.config import SETTINGS
from dpmon.errors import DpmonError
from dpmon.stalls.run_state import STATES

MULTI_NODE_COMMANDS = ("attach", "ls")
"""Commands that accept several hosts."""
WAIT_STATES = ("fine", *STATES, "finished", "stopped", "interrupted", "failed", "killed")
"""The values of `status --wait`: states, and ways to end."""

_USAGE = """\
dpmon [OPTIONS] SCRIPT.py [ARGS...]     run a script and watch it
       dpmon [OPTIONS] -m MODULE [ARGS...]     run a module
       dpmon [OPTIONS] COMMAND [ARGS...]       any launcher: torchrun, accelerate, python -u
       dpmon attach [RUN] [--host HOST ...]    show a live or finished run again, on one node or several
       dpmon status [RUN] [--json]             check the health of a run
       dpmon why [RUN] [--json]                show where each rank is and what the others wait for
       dpmon profile [RUN] [--steps N]         profile some steps: a trace for Perfetto, and the top operators
       dpmon ls                                list the runs
       dpmon stop RUN                          stop a run: SIGINT, SIGTERM, SIGKILL
       dpmon report [RUN] [--json | --html]    summarize a run
       dpmon compare A B                       compare runs: what differs, and which are faster
       dpmon export [RUN] [--format FORMAT]    write the records: jsonl, csv, perfetto
       dpmon try [--steps N] SCRIPT.py ...     measure what a change brings, with short runs of a script
       dpmon doctor                            check whether dpmon works here
       dpmon keep [--not] [RUN]                protect a run from automatic deletion; --not: unprotect it
       dpmon rm RUN [RUN ...]                  delete runs"""
_EPILOG = """\
Everything after the script's name belongs to the script. RUN is a name, an id, the unique start of either, or `last`.
The exit status is the script's own, 128+N for a signal; 2 for a wrong command line.
"""


def usage_lines() -> list[tuple[str, str]]:
    """Return each form of the command line with its description."""
    lines = (re.split(" {2,}", line.strip(), maxsplit=1) for line in _USAGE.splitlines())
    return [(form, description) for form, description in lines]


_COMMAND_USAGE = {form.split()[1]: description for form, description in usage_lines() if form.split()[1].isalpha()}
_DETAILS = {
    "attach": (
        "Without RUN: the newest live run, else the newest one. With --host and similar options: the runs of one job on"
        " several nodes, as one run."
    ),
    "status": (
        "Exit status: 0 fine, 3 not training (also after a run that ended well), 4 no such run, 5 stalled, 6 failed."
    ),
    "why": "Without RUN: the newest live run. Exit status: 0, or 4 if there is no such run.",
    "compare": (
        "Several runs per side: A1 A2 A3 -- B1 B2 B3. Exit status with a threshold: 0 not slower, 4 slower,"
        " 3 inconclusive."
    ),
    "try": "The runs alternate: unchanged, and with one change, such as preloaded batches.",
    "rm": "Only finished runs that are not protected by `dpmon keep`.",
}
"""What the help of a command adds to its line of usage."""
COMMANDS = ("run", *_COMMAND_USAGE)


class UsageError(DpmonError):
    """An invalid command line; the text is one sentence for the user."""


_JSON_HELP = "one JSON object, for programs"
_METRICS_HELP = "write metrics for Prometheus to FILE (node_exporter's textfile format)"


class _OptionParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            word, *_ = unknown.split()
            raise UsageError(f"unknown option {word}" if word.startswith("-") else f"{word} is not expected here")
        raise UsageError(message.removeprefix("argument "))


def _setting_validator(name: str) -> Callable[[str], object]:
    """Return a function that checks the value of an option that is also a setting."""

    def check(text: str) -> object:
        try:
            return SETTINGS[name](text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"expected {error}, not {text!r}") from None

    return check


_parse_batch_dim, _parse_seconds, _parse_command = map(_setting_validator, ("batch_dim", "refresh", "on_event"))


def _value_parser(expected: str, pattern: str, convert: Callable[[str], Any] = str) -> Callable[[str], object]:
    """Return a function that checks an option's value and converts the first group of `pattern`."""

    def check(text: str) -> object:
        match = re.fullmatch(pattern, text)
        if match is None:
            raise argparse.ArgumentTypeError(f"expected {expected}, not {text!r}")
        return convert(match[1])

    return check


_parse_replicas = _value_parser("a number from 1 to 9999", r"([1-9][0-9]{0,3})", int)
_parse_count = _value_parser("a positive integer", r"([1-9][0-9]{0,8})", int)
_parse_steps = _value_parser("a number from 1 to 20", r"([1-9]|1[0-9]|20)", int)
_parse_offset = _value_parser("a non-negative integer", r"([0-9]{1,15})", int)
_parse_timeout = _value_parser("a number of seconds", r"([0-9]{1,9}(?:\.[0-9]{0,9})?)", float)
_parse_percent = _value_parser(
    "a percentage such as 5%", r"([0-9]{1,3}(?:\.[0-9]{1,6})?) ?%", lambda text: float(text) / 100
)
_parse_trial = _value_parser(
    "cached-batches, single, one-rank or threads-N", r"(cached-batches|single|one-rank|threads-[1-9]\d{0,3})"
)
_parse_run_name = _value_parser(
    "a name of letters, digits, . _ - (except `last`)", r"((?!last$)[A-Za-z0-9][A-Za-z0-9._-]{0,39})"
)


def _parse_phase(text: str) -> str:
    from dpmon.model.run_comparison import GATE_METRICS  # expensive

    if text not in GATE_METRICS:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(GATE_METRICS)}, not {text!r}")
    return text


def _add_program_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a run and of its trials."""
    add = parser.add_argument
    add("-m", dest="module", metavar="MODULE", help="run a module instead of a script")
    add("--replicas", type=_parse_replicas, metavar="N", help="use N GPUs, or N virtual replicas if there are fewer")
    add("--devices", type=_parse_devices, metavar="LIST", help="the replicas' devices: cuda:0,cuda:1 or cpu,cpu")
    add("--python", metavar="PYTHON", help="the Python that runs the script (default: the first that has torch)")


def _parse_devices(text: str) -> str:
    names = [name.strip() for name in text.split(",")]
    if not all(re.fullmatch(r"cpu|cuda(:\d{1,3})?", name) for name in names):
        raise argparse.ArgumentTypeError(f"expected a list such as cuda:0,cuda:1 or cpu,cpu, not {text!r}")
    if len({name.partition(":")[0] for name in names}) > 1:
        raise argparse.ArgumentTypeError(f"all replicas must be on cpu or all on cuda, not {text!r}")
    return ",".join(names)


def run_parser() -> argparse.ArgumentParser:
    """Return the parser of the options before the script's name."""
    parser = _OptionParser(
        prog="dpmon",
        usage=_USAGE,
        description="Live terminal monitor for data-parallel PyTorch training.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--version", action="version", version=f"dpmon {dpmon.__version__}")
    _add_program_options(parser)
    mode_help = "initial mode; script: leave the computation as written; auto: follow the script and the options"
    add("--mode", choices=("auto", "script", "dp", "single"), default="auto", help=mode_help)
    add("--batch-dim", type=_parse_batch_dim, metavar="N", help="the batch's dimension in the first input (default: 0)")
    add("--no-loss", dest="loss", action="store_false", help="do not read the losses of the training")
    add("--headless", action="store_true", help="no screen (the default without a terminal)")
    add("--detach", action="store_true", help="start in the background and return at once")
    json_help = "without a screen: one JSON line per second on stderr, or in FILE (--json=/dev/fd/3)"
    add("--json", nargs="?", const="-", metavar="=FILE", help=json_help)
    add("--metrics", metavar="FILE", help=_METRICS_HELP)
    add("--on-event", type=_parse_command, metavar="COMMAND", help="start COMMAND for each event of the run")
    add("--refresh", type=_parse_seconds, metavar="SECONDS", help="seconds between updates of the screen (default: 1)")
    add("--name", type=_parse_run_name, help="the run's name (default: the script's)")
    return parser


def _command_parser(command: str, usage: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with the description of a command and no option."""
    usage_text = _COMMAND_USAGE[command]
    description = f"{usage_text[0].upper()}{usage_text[1:]}. {_DETAILS.get(command, '')}".rstrip()
    return _OptionParser(prog=f"dpmon {command}", usage=usage, description=description, allow_abbrev=False)


def try_parser() -> argparse.ArgumentParser:
    """Return the parser of the options of `try`, before the script's name."""
    parser = _command_parser("try", usage="dpmon try [OPTIONS] SCRIPT.py [ARGS...]")
    _add_program_options(parser)
    add = parser.add_argument
    add("--steps", type=_parse_count, default=200, metavar="N", help="end each run after N steps (default: 200)")
    add("--rounds", type=_parse_count, default=3, metavar="N", help="runs of each trial (default: 3)")
    only_help = "only this trial: cached-batches, single, one-rank, threads-N"
    add("--only", action="append", type=_parse_trial, metavar="TRIAL", help=only_help)
    add("--timeout", type=_parse_timeout, default=600.0, metavar="SECONDS", help="longest run (default: 600)")
    add("--json", action="store_true", help=_JSON_HELP)
    return parser


def command_parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of the words after one of COMMANDS."""
    if command == "try":
        return try_parser()
    parser = _command_parser(command)
    add = parser.add_argument
    if command == "rm":
        add("runs", metavar="RUN", nargs="+", help="an id, the unique start of an id, or a name that only one run has")
    elif command == "compare":
        add("runs", metavar="RUN", nargs="+", help="the run before and the run after; -- separates several of each")
    elif command not in ("doctor", "ls"):
        # Without a RUN, attach shows a live one.
        default = None if command in ("attach", "profile", "status", "why") else "last"
        run_options = {"nargs": None} if command == "stop" else {"nargs": "?", "default": default}
        last = "`last` (the default)" if default == "last" and command != "stop" else "`last`"
        add("run", metavar="RUN", help=f"a name, an id, the unique start of either, or {last}", **run_options)
    if command == "attach":
        add("--refresh", type=_parse_seconds, metavar="SECONDS", help="seconds between updates of the screen")
        add("--headless", action="store_true", help="follow the run without a screen")
        add("--metrics", metavar="FILE", help=f"for a run on several nodes: {_METRICS_HELP}")
        add("--json", nargs="?", const="-", metavar="=FILE", help="one JSON line per second, on stderr or in FILE")
    if command in MULTI_NODE_COMMANDS:
        add("--host", action="append", metavar="HOST", help="a host to connect to by ssh (repeatable)")
        add("--hosts", metavar="LIST", help="hosts, such as gpu[1-4,7],login")
        add("--slurm", metavar="JOBID", help="the nodes of a Slurm job, by srun")
        add("--via", metavar="COMMAND", help="a command instead of ssh; {} is the host: 'kubectl exec -i pod-{} --'")
    if command in ("compare", "doctor", "ls", "profile", "status", "why"):
        add("--json", action="store_true", help="one JSON object per line" if command == "ls" else _JSON_HELP)
    if command == "doctor":
        add("--python", metavar="PYTHON", help="the Python that would run the script")
    if command == "profile":
        add("--rank", type=_parse_offset, metavar="N", help="the rank (default: the straggler, else rank 0)")
        add("--steps", type=_parse_steps, default=3, metavar="N", help="how many steps, at most 20 (default: 3)")
    if command == "status":
        add("--explain", action="store_true", help="describe the run in at most 40 lines, for a person or an assistant")
        add("--all", action="store_true", help="all runs")
        add("--wait", choices=WAIT_STATES, metavar="STATE", help=f"wait for a state: {', '.join(WAIT_STATES)}")
        add("--timeout", type=_parse_timeout, metavar="SECONDS", help="longest wait; then the exit status is 124")
    if command == "why":
        add("--all", action="store_true", help="the stacks of all threads, not only of the main thread")
    if command == "keep":
        add("--not", dest="kept", action="store_false", help="end the protection")
    if command == "compare":
        gate_help = "exit with 4 if step time grew by more than this, such as 5%%"
        phase_help = "apply --fail-if-slower to this phase instead (repeatable)"
        add("--fail-if-slower", type=_parse_percent, metavar="PERCENT", help=gate_help)
        add("--phase", type=_parse_phase, action="append", help=phase_help)
        add("-o", "--output", metavar="FILE", help="output file (default: standard output)")
    if command == "report":
        output_group = parser.add_mutually_exclusive_group()
        output_group.add_argument("--json", action="store_true", help=_JSON_HELP)
        output_group.add_argument("--html", action="store_true", help="a self-contained page with plots")
        add("-o", "--output", metavar="FILE", help="output file (default: standard output; of --html, RUN.html)")
    if command == "export":
        from dpmon.record.record_specs import RECORDS

        format_help = "jsonl: one JSON object per line; csv: one table per kind; perfetto: a trace for ui.perfetto.dev"
        add("--format", choices=("jsonl", "csv", "perfetto"), default="jsonl", help=format_help)
        add("--kind", choices=tuple(RECORDS), help="only this kind of record (jsonl and csv)")
        add("-o", "--output", metavar="FILE", help="output file (default: standard output); for csv, a directory")
        add("--follow", action="store_true", help="write the rows of the history as they arrive, until the run ends")
        offset_help = "with --follow: only later rows"
        add("--from", dest="start", type=_parse_offset, default=0, metavar="OFFSET", help=offset_help)
        add("--rollups", action="store_true", help="with --follow: about one step per second, for a mirror of the run")
    return parser


def names_remote_hosts(options: argparse.Namespace) -> bool:
    """Return whether the options name other hosts."""
    return any(getattr(options, name, None) is not None for name in ("host", "hosts", "slurm", "via"))


def options_with_value(parser: argparse.ArgumentParser) -> set[str]:
    """Return the options that need a value, which may be the next word."""
    return {option for action in parser._actions if action.nargs is None for option in action.option_strings}


def _split_words(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[list[str], list[str], bool]:
    """Split `words` into dpmon's own and the command's, at the first word that is not an option or after `-m MODULE`.

    The third value is True if `--` separates them: then a program follows, even if it has the name of a command.
    """
    value_options = options_with_value(parser)
    own_words: list[str] = []
    index = 0
    while index < len(words) and words[index].startswith("-") and words[index] != "-":
        word = words[index]
        index += 1
        if word == "--":
            return own_words, list(words[index:]), True
        own_words.append(word)
        if word in value_options and index < len(words):
            # Joined, so that a value such as -1 is not parsed as an option.
            own_words[-1:] = [f"{word}={words[index]}"] if word.startswith("--") else [word, words[index]]
            index += 1
        if word.startswith("-m") and not word.startswith("--"):
            break
    return own_words, list(words[index:]), False


def parse(words: Sequence[str]) -> tuple[str, argparse.Namespace]:
    """Return the command (one of COMMANDS, or "help") and its options; for run, `options.words` is the command to run.

    Raises UsageError; SystemExit(0) after --help and --version have printed.
    """
    parser = run_parser()
    own_words, command_words, is_program = _split_words(parser, words)
    options = parser.parse_args(own_words)
    command = "run"
    first_word = next(iter(command_words), None)
    if options.module is None and first_word in COMMANDS and not is_program:
        command, *command_words = command_words
        if own_words and command != "run":
            option, *_ = own_words
            raise UsageError(f"{option} is an option of a run, not of {command}")
        if command not in ("run", "try"):
            return command, _parse_run_command(command, command_words)
        if command == "try":
            parser, options = try_parser(), argparse.Namespace()
        own_words, command_words, _ = _split_words(parser, command_words)
        options = parser.parse_args(own_words, options)
    options.words = command_words
    if options.module is None and not command_words:
        if words:
            raise UsageError(f"no script to {command}")
        parser.print_help(sys.stderr)
        return "help", options
    for conflict in _conflicts(command, options):
        raise UsageError(conflict)
    return command, options


def _parse_run_command(command: str, words: list[str]) -> argparse.Namespace:
    """Parse the options of a command for existing runs."""
    if command == "compare":
        return _parse_compare(words)
    # A word after --json is the run, not the output file.
    words = ["--json=-" if word == "--json" and command == "attach" else word for word in words]
    options = command_parser(command).parse_args(words)
    for conflict in _conflicts(command, options):
        raise UsageError(conflict)
    return options


def _parse_compare(words: list[str]) -> argparse.Namespace:
    """Parse the options of compare, with the runs `before` and `after`; options may be on both sides of the --."""
    parser = command_parser("compare")
    separator_index = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:separator_index])
    options.before = options.runs
    if separator_index < len(words):
        parser.parse_args(words[separator_index + 1 :], options)
    elif len(options.runs) == 2:
        options.before, options.runs = options.runs[:1], options.runs[1:]
    else:
        raise UsageError("compare needs two runs, or several on each side of -- (A1 A2 A3 -- B1 B2 B3)")
    options.after = options.runs
    if options.phase and options.fail_if_slower is None:
        raise UsageError("--phase needs --fail-if-slower")
    return options


def _conflicts(command: str, options: argparse.Namespace) -> Iterator[str]:
    """Yield sentences on options that contradict each other."""
    if command == "status":
        if options.all and (options.run is not None or options.wait is not None):
            yield "--all shows all runs: it excludes RUN and --wait"
        if options.timeout is not None and options.wait is None:
            yield "--timeout limits a wait: it needs --wait"
    if command == "export":
        if options.follow and (options.format, options.kind, options.output) != ("jsonl", None, None):
            yield "--follow has its own format: it excludes --format, --kind and --output"
        if not options.follow and (options.start or options.rollups):
            yield f"{'--from' if options.start else '--rollups'} needs --follow"
    if command == "attach" and options.metrics and not names_remote_hosts(options):
        yield "attach accepts --metrics only with several hosts (--host); otherwise give it to the run"
    if command == "run":
        count = options.replicas if options.devices is None else len(options.devices.split(","))
        if options.replicas not in (None, count):
            yield f"--replicas {options.replicas} contradicts --devices with {count} devices"
        if options.json is not None and options.detach:
            yield "--json does not work with --detach (dpmon attach --json follows a run)"
        if options.mode == "script" and count is not None:
            yield "--mode script leaves the computation as written, so it excludes --replicas and --devices"
