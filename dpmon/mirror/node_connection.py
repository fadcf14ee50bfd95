"""What a mirror knows about a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dpmon.mirror.chunk_receiver import ChunkReceiver
from dpmon.store.query_results import NodeRow


@dataclass
class NodeConnection:
    """What this process knows about a machine besides its row in the history."""

    node: NodeRow
    sought: bool = False
    """Whether `attach` could not reach it: until it answers, only the job of its run is known."""
    receiver: ChunkReceiver | None = None
    """None after this process has ended a connection, until the next one: what still arrives is left out."""
    asked: tuple[int, int] = (0, 0)
    """Number and time of the question for the time."""
    measured: int = 0
    offset: int = 0
    """The last id that it has sent."""
    held: int = 0
    """Bytes that it has sent and that are not written yet."""
    output_at: int | None = None
    """Position in its output up to which it was received; None: nothing was received yet."""
    beat: Mapping[str, Any] = field(default_factory=dict)
    standing: Mapping[str, Any] | None = None

    @property
    def is_over(self) -> bool:
        """Whether no more records are expected. A machine that was never reached may not belong to the job."""
        return self.node.state in ("ended", "refused") or (self.sought and self.node.why is not None)
