"""Simulates torch.cuda for a training on the CPU: devices with queued work of known duration (ms).

A device has the sum of its queued work, and the part of it that is done. A recorded event gets the present sum, and
occurs when this much is done. `cpu` and `cpu:0` are the first GPU, `cpu:1` the second, and so on.
"""

import sys
import threading

import torch


class Device:
    def __init__(self):
        self.queued = 0.0
        self.lag = 0.0
        """How much of the queued work is not done yet."""

    def done(self):
        return self.queued - self.lag


class Played:
    """Operations on torch.cuda, with their threads."""

    def __init__(self):
        self.devices = [Device() for _ in range(4)]
        self.capturing = False
        """On the current stream."""
        self.graphs = 0
        """Graphs that are captured on any stream, by any thread."""
        self.asked_by = set()
        self.while_capturing = 0
        self.waits = 0

    def work(self, ms, device=0):
        self.devices[device].queued += ms


PLAYED = Played()


class Stream:
    def __init__(self, device):
        self.device = device


class Graph:
    def capture_begin(self):
        PLAYED.graphs += 1

    def capture_end(self):
        PLAYED.graphs -= 1


class Event:
    def __init__(self, enable_timing=False):
        assert enable_timing
        self.at = self.device = None

    def record(self, stream):
        PLAYED.while_capturing += PLAYED.capturing or bool(PLAYED.graphs)
        assert self.device in (None, stream.device), "an event belongs to one device"
        self.device = stream.device
        self.at = PLAYED.devices[stream.device].queued

    def query(self):
        PLAYED.while_capturing += PLAYED.capturing or bool(PLAYED.graphs)
        PLAYED.asked_by.add(threading.get_ident())
        return self.at <= PLAYED.devices[self.device].done()

    def elapsed_time(self, last):
        assert all((self.query(), last.query())), "it would raise"
        return last.at - self.at

    def synchronize(self):
        PLAYED.waits += 1


def gpu_of(name):
    kind, _, index = name.partition(":")
    return int(index or 0) if kind == "cpu" else -1


def begin():
    """Simulate GPUs from here on."""
    torch.cuda.is_initialized = lambda: True
    torch.cuda.Event = Event
    torch.cuda.CUDAGraph = Graph
    torch.cuda.current_stream = Stream
    torch.cuda.memory_stats = lambda index: {}
    # In a torch built for CUDA, they would search for a driver.
    torch._C._CudaEventBase = Event
    torch._C._cuda_getCurrentRawStream = lambda device: device
    torch._C._cuda_isCurrentStreamCapturing = lambda: PLAYED.capturing
    torch._C._cuda_attach_out_of_memory_observer = lambda observer: None
    if "dpmon.tracer.devices.device_timing" in sys.modules:  # else there is no tracer
        for name in ("devices.device_timing", "calls.stages", "calls.replicas"):
            sys.modules[f"dpmon.tracer.{name}"].gpu_of = gpu_of
