"""The entry point: dispatches each command to its module, which does the expensive imports."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence


def main(words: Sequence[str]) -> int:
    """Run the command line and return its exit status; 2, with one sentence on stderr, if it cannot run."""
    from dpmon.cli.options import MULTI_NODE_COMMANDS, UsageError, names_remote_hosts, parse, suggest_command
    from dpmon.config import Settings, load_settings
    from dpmon.errors import DpmonError

    try:
        command, options = parse(words)
        if command == "help":
            return 2
        # An invalid theme must not prevent listing or stopping runs.
        options.settings = load_settings(os.environ) if command in ("run", "attach") else Settings()
        if command == "run":
            from dpmon.cli.launch import run

            return run(options)
        if command == "doctor":
            from dpmon.cli.doctor import doctor

            return doctor(options)
        if command == "try":
            from dpmon.cli.trials import try_changes

            return try_changes(options)
        if command == "why":
            from dpmon.cli.why import why

            return why(options)
        if command == "compare":
            from dpmon.cli.compare_command import compare

            return compare(options)
        if command == "status":
            from dpmon.cli.status import status

            return status(options)
        if command in MULTI_NODE_COMMANDS and names_remote_hosts(options):
            from dpmon.cli import multi_node

            return int(getattr(multi_node, command)(options))
        from dpmon.cli import commands

        return int(getattr(commands, command)(options))
    except DpmonError as error:
        from dpmon.cli.messages import print_message
        from dpmon.record.shared_names import hide_secrets
        from dpmon.supervise.command_resolver import NotFoundError

        hint = ""
        if isinstance(error, UsageError):
            hint = "; dpmon --help lists commands and options"
        elif isinstance(error, NotFoundError) and (suggestion := suggest_command(error.word)) is not None:
            hint = f" (did you mean {suggestion}?)"
        (text,) = hide_secrets([str(error)])
        print_message(f"{text}{hint}")
        return 2


def entry() -> None:
    """Run the console script."""
    try:
        status = main(sys.argv[1:])
        if sys.stdout is not None:
            sys.stdout.flush()  # now, when a full disk can still be reported
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        # The reader of our output has exited: there is nothing to report, and nothing to flush at exit.
        sys.stdout = sys.stderr = None
        status = 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        sys.stdout = None
        print(f"dpmon: the output cannot be written: {error.strerror}", file=sys.stderr)
        status = 2
    nvml = sys.modules.get("dpmon.gpu.nvml")  # doctor may have loaded it, and a call to the driver may be in flight
    if nvml is not None:
        nvml.exit_past_nvml(status)
    sys.exit(status)
