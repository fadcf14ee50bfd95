"""Device times of phases on GPUs, measured with events."""
