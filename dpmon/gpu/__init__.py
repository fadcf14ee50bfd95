"""Samples the devices: GPUs through NVML, the host through the kernel."""
