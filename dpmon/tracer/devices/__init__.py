"""Times of phases on GPUs, from events."""
