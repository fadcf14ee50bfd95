"""The state of the mirror's connection to one node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dpmon.mirror.chunk_receiver import ChunkReceiver
from dpmon.store.node_table import NodeRow


@dataclass
class NodeConnection:
    """The state of the connection to one node, in addition to the node's row in the history."""

    node: NodeRow
    is_run_unknown: bool = False
    """Whether `attach` failed to reach the node. Until it replies, only its job is known, not its run."""
    receiver: ChunkReceiver | None = None
    """None after this process has closed a connection, until the next one opens. Late lines are ignored."""
    clock_request: tuple[int, int] = (0, 0)
    """Number of the last clock request, and when it was sent (ns of the run)."""
    clock_replies: int = 0
    """How many clock requests the node has answered on this connection."""
    last_received_id: int = 0
    """The last id that the node has sent."""
    unwritten_bytes: int = 0
    """How much the node has sent that is not written yet."""
    output_at: int | None = None
    """Offset in the node's output up to which it was received; None if nothing was received yet."""
    beat: Mapping[str, Any] = field(default_factory=dict)
    """The last beat; empty while disconnected."""
    rank_report: Mapping[str, Any] | None = None
    """The newest message with the activities of the node's ranks that was not passed on; None if there is none."""

    @property
    def is_over(self) -> bool:
        """Whether no more records are expected. A node that was never reached may not belong to the job."""
        return self.node.state in ("ended", "refused") or (self.is_run_unknown and self.node.why is not None)
