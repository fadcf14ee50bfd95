"""From spans to steps and calls: what one process's training did, concluded with hindsight in the supervisor.

Pure: no files, no clock. `nesting` groups the spans of each thread, `step_rules` decides where a step begins and ends,
`recorder` turns the spans of a step into payloads, and `assembler` puts them together.
"""

from dpmon.assemble.assembler import Assembler

__all__ = ["Assembler"]
