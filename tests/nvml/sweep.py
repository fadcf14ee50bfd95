"""Makes each function of the fake library fail with each code, through the real pynvml; prints problems as JSON.

It runs in a separate process, with the fake library first on LD_LIBRARY_PATH. argv: the control file, and N: each
function fails with one code in N, the next function with the codes after those. The clock is simulated, so that half a
minute of rounds takes no time.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from dpmon.gpu.device_record import OPTIONAL_FIELDS, RunContext
from dpmon.gpu.gpu_state import GpuState
from dpmon.gpu.nvml import Nvml

CODES = [*range(1, 31), 99, 999, 31337]
GONE = {1, 15, 16, 28}
FINE = [
    "gpus 2",
    *(f"set * gpm{n} 1" for n in (2, 5, 10, 20, 21, 60, 61)),
    "set * mig 1",
    "set * xid 13",
    "set * nvlinks 4",
]
PROCESSES = {"of_run", "mem_run_bytes", "mem_others_bytes", "processes", "process_count"}
MIG = {"mig", "mig_devices"}
LINK = {"pcie_gen", "pcie_gen_max", "pcie_width", "pcie_width_max", "pcie_slow_readings"}
# Fields that may be missing if a function fails; none if there is another call or source.
COST: dict[str, set[str]] = {
    "nvmlDeviceGetUUID": {"uuid", "visible", "mig_devices"},
    "nvmlDeviceGetName": {"name"},
    "nvmlDeviceGetUtilizationRates": {"util_pct"},
    "nvmlDeviceGetMemoryInfo_v2": {"mem_used_bytes", "mem_total_bytes", "mem_reserved_bytes"},
    "nvmlDeviceGetMemoryInfo": {"mig_devices"},
    "nvmlDeviceGetPowerUsage": {"power_w"},
    "nvmlDeviceGetClockInfo": {"sm_clock_mhz", "mem_clock_mhz"},
    "nvmlDeviceGetCurrentClocksEventReasons": {"throttle"},
    "nvmlDeviceGetTemperature": {"temperature_c"},
    "nvmlDeviceGetEnforcedPowerLimit": {"power_limit_w"},
    "nvmlDeviceGetTotalEnergyConsumption": {"energy_j"},
    "nvmlDeviceGetFanSpeed": {"fan_pct"},
    "nvmlDeviceGetComputeRunningProcesses_v3": PROCESSES,
    "nvmlDeviceGetGraphicsRunningProcesses_v3": PROCESSES,
    "nvmlDeviceGetTemperatureThreshold": {"temperature_limit_c"},
    "nvmlDeviceGetCurrPcieLinkGeneration": LINK,
    "nvmlDeviceGetCurrPcieLinkWidth": LINK,
    "nvmlDeviceGetMaxPcieLinkGeneration": LINK,
    "nvmlDeviceGetMaxPcieLinkWidth": LINK,
    "nvmlDeviceGetFieldValues": {"nvlinks_down", "nvlink_errors"},
    "nvmlDeviceGetTotalEccErrors": {"ecc_corrected", "ecc_uncorrected"},
    "nvmlDeviceGetRemappedRows": {"remapped_rows"},
    "nvmlDeviceGetRetiredPages": {"retired_pages"},
    "nvmlDeviceGetPersistenceMode": {"persistence"},
    "nvmlDeviceGetMigMode": MIG,
    "nvmlDeviceGetMigDeviceHandleByIndex": {"mig_devices"},
    "nvmlEventSetCreate": {"xid"},
    "nvmlDeviceRegisterEvents": {"xid"},
    "nvmlEventSetWait_v2": {"xid"},
}
GPM = {"sm_active_pct", "tensor_active_pct", "dram_active_pct", "nvlink_rx_bytes_s", "nvlink_tx_bytes_s"}
COST.update(
    dict.fromkeys(("nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc", "nvmlGpmSampleGet", "nvmlGpmMetricsGet"), GPM)
)
TORCH = {"ordinals", "mem_torch_bytes"}
SECOND_WAYS = {  # asked only if the first is not supported
    "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetTemperature",
    "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetFanSpeed", "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetTemperatureThreshold",
}  # fmt: skip
NEVER = {3, 13, 22, 25, 26}
ALWAYS = {3, 15, 999}  # one of each kind: not supported, gone, any other


def tell(*lines: str) -> None:
    with open(sys.argv[1] + ".new", "w") as file:
        file.write("".join(f"{line}\n" for line in lines))
    os.replace(sys.argv[1] + ".new", sys.argv[1])


def watched(nvml: Nvml, index: int, seconds: int = 40) -> Any:
    """A GPU after so many seconds of being asked."""
    now = [1000.0]
    card = GpuState(index, nvml, lambda: now[0])
    for _ in range(seconds):
        now[0] += 1
        card.poll()
    return card.sample(RunContext(same_pids=True))


def missing(sample: Any) -> set[str]:
    wrong = {name for name in OPTIONAL_FIELDS if sample[name] is None and not sample["absent"].get(name)}
    if wrong:
        raise AssertionError(f"absent without a reason: {wrong}")
    return {name for name in OPTIONAL_FIELDS if sample[name] is None} - TORCH - {"visible"}


def main() -> None:
    nvml = Nvml()
    tell(*FINE)
    reason = nvml.open()
    if reason is not None:
        raise AssertionError(reason)
    found: list[str] = []
    if missing(watched(nvml, 0)):
        found.append(f"without any failure: {missing(watched(nvml, 0))}")
    tried = 0
    every = int(sys.argv[2])
    for index, (function, cost) in enumerate(COST.items()):
        for code in [code for at, code in enumerate(CODES) if (at + index) % every == 0 or code in ALWAYS]:
            tell(*FINE, f"rule {function} 0 {code}", f"rule {function} - {code}")
            lost = missing(watched(nvml, 0))
            tried += 1
            if code in GONE or (code == 10 and function == "nvmlEventSetWait_v2"):  # the GPU is lost; no event
                continue
            expected = set() if function in SECOND_WAYS and code in NEVER else cost - {"visible"}
            if function == "nvmlDeviceGetMemoryInfo_v2" and code in NEVER:
                expected = {"mem_reserved_bytes"}
            if lost - cost:
                found.append(f"{function} {code}: also lost {sorted(lost - cost)}")
            if expected - lost - {"mig_devices"}:
                found.append(f"{function} {code}: still there {sorted(expected - lost)}")
    tell(*FINE)
    other = missing(watched(nvml, 1))
    if other:
        found.append(f"afterwards: {other}")
    print(json.dumps({"tried": tried, "wrong": found[:40]}))


main()
