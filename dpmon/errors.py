"""The exceptions for user errors and bad files. Their texts are sentences for the user.

    DpmonError
    ├── UsageError       an invalid command line                          dpmon.cli.options
    ├── ConfigError      an invalid setting or configuration file         dpmon.config
    ├── CommandError     a command that cannot be run                     dpmon.supervise.command_resolver
    ├── RunError         no such run, or an unusable directory            dpmon.run.run_directory
    ├── HostError        an invalid list of hosts                         dpmon.mirror.remote_hosts
    ├── RingError        a file that is not a usable ring                 dpmon.span_ring
    ├── HistoryError     a history that cannot be read or written
    └── ExportError      data that cannot be exported                     dpmon.export

Only `dpmon.cli` ends a command because of such an exception. Two other exceptions stay within their packages:
dpmon.gpu.nvml.NvmlCallError, a failed NVML call, and dpmon.tracer.calls.replicas.ResultsWouldChange, which ends an
attempt at dp. A third, dpmon.ui.app.ScreenClosed, is a SystemExit.
"""

from __future__ import annotations


class DpmonError(Exception):
    """The base of all these exceptions."""


class HistoryError(DpmonError):
    """A history that cannot be read or written: the disk is full, it is damaged, or dpmon did not write it."""
