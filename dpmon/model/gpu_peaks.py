"""Dense peaks of GPUs in matrix products that accumulate in fp32, by the name that NVML gives the GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping

_DTYPES = "bf16", "fp16", "tf32", "fp32", "fp8"
# The clock (MHz) at which tensor cores reach the TFLOP/s of _DTYPES. None: not certain, or the GPU lacks the dtype.
# Sources: the datasheets and architecture whitepapers of NVIDIA (Turing to Blackwell) and AMD (CDNA 3); a figure "with
# sparsity" is halved. What is not certain is left out, and so is the RTX 3080: two different GPUs have its name.
PEAKS: dict[str, tuple[float | None, ...]] = {
    **dict.fromkeys(("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"), (1410, 312, 312, 156, 19.5, None)),
    **dict.fromkeys(("NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"), (1410, 312, 312, 156, 19.5, None)),
    "NVIDIA A10": (1695, 125, 125, 62.5, 31.2, None),
    "NVIDIA H100 80GB HBM3": (1830, 989, 989, 495, 67, 1979),
    "NVIDIA H100 PCIe": (1620, 756, 756, 378, 51, 1513),
    "NVIDIA H200": (1830, 989, 989, 495, 67, 1979),
    "NVIDIA GH200 480GB": (None, 989, 989, 495, 67, 1979),
    "NVIDIA B200": (None, 2250, 2250, 1125, None, 4500),
    "NVIDIA L4": (2040, 121, 121, 60, 30.3, 242),
    "NVIDIA L40S": (2490, 362, 362, 183, 91.6, 733),
    "NVIDIA RTX A6000": (1800, 154.8, 154.8, 77.4, 38.7, None),
    **dict.fromkeys(("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"), (1530, None, 125, None, 15.7, None)),
    "Tesla T4": (1590, None, 65, None, 8.1, None),
    "NVIDIA GeForce RTX 3060": (1777, 25.5, 25.5, 12.7, 12.7, None),
    "NVIDIA GeForce RTX 3070": (1725, 40.6, 40.6, 20.3, 20.3, None),
    "NVIDIA GeForce RTX 3090": (1695, 71, 71, 35.6, 35.6, None),
    "NVIDIA GeForce RTX 4060": (2460, 30.2, 30.2, 15.1, 15.1, 60.5),
    "NVIDIA GeForce RTX 4070": (2475, 58.3, 58.3, 29.1, 29.1, 116.6),
    "NVIDIA GeForce RTX 4080": (2505, 97.5, 97.5, 48.7, 48.7, 194.9),
    "NVIDIA GeForce RTX 4090": (2520, 165.2, 165.2, 82.6, 82.6, 330.3),
    "NVIDIA GeForce RTX 5070": (2512, 61.7, 61.7, 30.9, 30.9, 123.5),
    "NVIDIA GeForce RTX 5080": (2617, 112.6, 112.6, 56.3, 56.3, 225.1),
    "NVIDIA GeForce RTX 5090": (2407, 209.5, 209.5, 104.8, 104.8, 419),
    "AMD Instinct MI300X": (2100, 1307, 1307, 654, 163, 2615),
}


def short_dtype(dtype: str) -> str:
    """Return a dtype of torch, or tf32, in the short form: bfloat16 -> bf16, float8_e4m3fn -> fp8."""
    return dtype.replace("bfloat", "bf").replace("float", "fp").partition("_")[0]


def find_peak(name: str | None, shares: Mapping[str, float]) -> tuple[float | None, float | None]:
    """Return the dense peak (FLOP/s) of a GPU, and its clock at that (MHz); None if unknown.

    `shares`: of the FLOPs, by dtype. The times that they take, each dtype at its own peak, add up.
    """
    boost_mhz, *tflops = PEAKS.get(name or "", (None,))
    peaks = dict(zip(_DTYPES, tflops, strict=False))
    peaks["tf32"] = peaks.get("tf32") or peaks.get("fp32")  # GPUs before Ampere have none
    times = [share / (peaks.get(short_dtype(dtype)) or math.nan) for dtype, share in shares.items()]
    return (None if math.isnan(sum(times)) else 1e12 / sum(times)), boost_mhz
