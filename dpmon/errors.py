"""What dpmon raises for what a person or a file did wrong. The text is one sentence for a person.

    DpmonError
    ├── UsageError       a command line that means nothing                dpmon.cli.options
    ├── ConfigError      a setting, or a file of settings                 dpmon.config
    ├── CommandError     a command that cannot be run                     dpmon.supervise.program
    │   └── NotFoundError
    ├── RunError         no such run, or a directory that is of no use    dpmon.run.rundir
    ├── RingError        a file that is no usable ring                    dpmon.ring_file
    ├── HistoryError     a history that cannot be read or written         dpmon.store.tables
    ├── RecordError      bytes that are no record                         dpmon.record.kinds
    ├── ExportError      what cannot be exported                          dpmon.export.command
    ├── PageError        a page that cannot be made                       dpmon.report.page
    └── JobError         a job of the screen that failed                 dpmon.ui.jobs

Only `dpmon.cli` ends a command for one of these. Two exceptions stay within their packages: dpmon.gpu.failure.Failure,
an answer that NVML did not give, and dpmon.tracer.replicas.Unsuited, which ends an attempt at dp.
"""

from __future__ import annotations


class DpmonError(Exception):
    """The base of them all."""
