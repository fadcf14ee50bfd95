"""Turns the spans of one process into steps and calls, after they were written.

Runs in the supervisor or, without one, in a reader. Pure: no files, no clock. `nesting` groups the spans of each
thread. `step_boundaries` finds where a step begins and ends. `step_row_builder` turns the spans of a step into rows.
`assembler` connects these modules.
"""

from dpmon.assemble.assembler import Assembler

__all__ = ["Assembler"]
