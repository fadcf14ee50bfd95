"""Turns the spans of one process into steps and calls, in the supervisor, after the fact.

Pure: no files, no clock. `nesting` groups the spans of each thread. `step_rules` finds where a step begins and ends.
`recorder` turns the spans of a step into payloads. `assembler` connects them.
"""

from dpmon.assemble.assembler import Assembler

__all__ = ["Assembler"]
