"""What a step is worth: tokens per second, TFLOP/s, model FLOPs utilisation, memory, time left."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil
import torch

# Dense bf16 peaks in TFLOP/s from the vendors' data sheets, by the name torch reports.
GPU_PEAK_TFLOPS = {
    "A100": 312.0,
    "A800": 312.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "H200": 989.0,
    "GB200": 2500.0,
    "B200": 2250.0,
    "L40S": 362.0,
    "V100": 125.0,
}
_PROBE = 1024


@dataclass(frozen=True)
class Peak:
    """Peak TFLOP/s of one rank, and where the figure is from."""

    tflops: float
    source: str


def find_peak(device: torch.device, stated: float | None) -> Peak:
    """The peak to divide by: the stated one, the GPU table's, or the best fp32 GEMM measured here."""
    if stated is not None:
        return Peak(stated, "stated")
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for key in sorted(GPU_PEAK_TFLOPS, key=len, reverse=True):
            if key in name:
                return Peak(GPU_PEAK_TFLOPS[key], f"{key}, dense bf16")
    return Peak(measure_gemm_tflops(device), f"measured fp32 GEMM of {_PROBE} cubed")


def measure_gemm_tflops(device: torch.device, repeats: int = 5) -> float:
    """Best TFLOP/s of an fp32 GEMM on ``device``, over a few repeats."""
    a = torch.ones(_PROBE, _PROBE, device=device)
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * _PROBE**3 / best / 1e12


def memory_gib(device: torch.device) -> float:
    """Peak allocated device memory on CUDA, resident memory of the process on CPU; in GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return float(psutil.Process().memory_info().rss) / 2**30


@dataclass(frozen=True)
class Throughput:
    """Speed of one or more steps over the whole run; TFLOP/s and MFU are per rank."""

    tokens_per_second: float
    tokens_per_second_per_rank: float
    tflops_per_rank: float
    mfu: float


def throughput(*, tokens: int, seconds: float, flops_per_token: float, world_size: int, peak: Peak) -> Throughput:
    """Throughput of ``tokens`` (global batch x sequence, masked ones included) in ``seconds``."""
    speed = tokens / seconds
    tflops = speed * flops_per_token / world_size / 1e12
    return Throughput(speed, speed / world_size, tflops, tflops / peak.tflops)
