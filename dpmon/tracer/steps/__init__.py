"""The parts of a training step that are not calls: spans, fetches, copies, optimizers, pauses."""
