"""The processor time and the first picture of the screen beside nvitop, at 120x60, 1 Hz, 8 GPUs and 8 replicas.

    python tests/benchmarks/bench_nvitop.py NVITOP [--seconds 30] [--rounds 4]

NVITOP: the path of nvitop 1.7, from an environment of its own. It reads the simulated NVML of tests/nvml. The screen of
dpmon reads generated records, 100 steps a second; its supervisor, which reads NVML, does not count.

Both run at the same time, so that they share what the machine does besides. Each is also measured in every other half
of the time as its own control: the two halves of one program differ by noise alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench_screen import Generated, Shown
from yardstick import processor_s

from support.fake_devices import compile_fake_library

SIZE = 60, 120
STEPS_PER_S = 100


def main() -> None:
    """Print the share of a core of both, their ratio, and the time to the first picture of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nvitop")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, Generated(Path(tempfile.mkdtemp(dir=place)), STEPS_PER_S, 2) as run:
        libraries = compile_fake_library(Path(place))
        control = Path(place) / "control"
        control.write_text("gpus 8\n")
        nvitop_variables = {"LD_LIBRARY_PATH": str(libraries), "FAKE_NVML_CONTROL": str(control)}
        nvitop_command = [options.nvitop, "--monitor", "full", "--interval", "1"]

        def start_nvitop() -> Shown:
            return Shown(run.directory, 1.0, size=SIZE, command=nvitop_command, variables=nvitop_variables)

        def start_dpmon() -> Shown:
            return Shown(run.directory, 1.0, size=SIZE)

        first: dict[str, list[float]] = {"dpmon": [], "nvitop": []}
        for _ in range(options.rounds):
            for name, start, text in (("dpmon", start_dpmon, b"Devices"), ("nvitop", start_nvitop, b"NVITOP")):
                began = time.monotonic()
                shown = start()
                shown.until(text)
                first[name].append(1000 * (time.monotonic() - began))
                shown.close()
        for name, times in first.items():
            print(f"{name}: first picture after {statistics.median(times):.0f} ms (median of {len(times)})", flush=True)

        screens = {"dpmon": start_dpmon(), "nvitop": start_nvitop()}
        shares: dict[str, list[float]] = {name: [] for name in screens}
        for shown in screens.values():
            shown.pump(3)
        for _ in range(2 * options.rounds):
            before = {name: processor_s(shown.process.pid) for name, shown in screens.items()}
            until = time.monotonic() + options.seconds / 2
            while time.monotonic() < until:
                for shown in screens.values():
                    shown.pump(0.1)
            for name, shown in screens.items():
                shares[name].append((processor_s(shown.process.pid) - before[name]) / (options.seconds / 2) * 100)
        for shown in screens.values():
            shown.close()
    for name, found in shares.items():
        even, odd = statistics.mean(found[::2]), statistics.mean(found[1::2])
        print(f"{name}: {statistics.mean(found):.2f}% of a core (control: {even:.2f} and {odd:.2f})", flush=True)
    ratio = statistics.mean(shares["dpmon"]) / statistics.mean(shares["nvitop"])
    print(f"dpmon needs {ratio:.1f} times the processor time of nvitop; load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
