"""Whether calls run as dp or single, and replicas that share a device."""
