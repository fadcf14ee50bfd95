"""The entry point: dispatches each command to its module, which does the expensive imports."""

from __future__ import annotations

import errno
import os
import pkgutil
import sys
from collections.abc import Sequence

_HANDLERS = {
    "run": "dpmon.cli.launch:run",
    "doctor": "dpmon.cli.doctor:doctor",
    "try": "dpmon.cli.trials:try_changes",
    "why": "dpmon.cli.why:why",
    "compare": "dpmon.cli.compare_command:compare",
    "status": "dpmon.cli.status:status",
}
"""The function of each command that has a module of its own."""
NO_RUN = 4
"""The exit status of `status` and `why` without such a run."""


def main(words: Sequence[str]) -> int:
    """Run the command line and return its exit status; 2, with one sentence on stderr, if it cannot run."""
    from dpmon.cli.options import UsageError, names_remote_hosts, parse
    from dpmon.config import Settings, load_settings
    from dpmon.errors import DpmonError
    from dpmon.run.run_directory import RunError

    command = ""
    try:
        command, options = parse(words)
        if command == "help":
            return 2
        # An invalid theme must not prevent listing or stopping runs.
        options.settings = load_settings(os.environ) if command in ("run", "attach") else Settings()
        module = "multi_node" if names_remote_hosts(options) else "commands"
        handler = pkgutil.resolve_name(_HANDLERS.get(command, f"dpmon.cli.{module}:{command}"))
        return int(handler(options))
    except DpmonError as error:
        from dpmon.cli.messages import print_message
        from dpmon.record.shared_names import hide_secrets

        (text,) = hide_secrets([str(error)])
        print_message(f"{text}; dpmon --help lists commands and options" if isinstance(error, UsageError) else text)
        return NO_RUN if command in ("status", "why") and isinstance(error, RunError) else 2


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
    sys.exit(status)
