"""What the devices do: NVML for GPUs, the kernel for the host."""
