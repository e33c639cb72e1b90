"""Where a process computes: on the GPU that it may use, or on the CPU."""

from __future__ import annotations

import os

import torch

PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""Dense bfloat16 operations a second that the makers of GPUs tell, by a part of the name."""


def compute_device() -> torch.device:
    """The GPU of this process, of those that it may use by its place among the ranks here; without any the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done all that it was told, so that what takes the time is measured."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_flops() -> float | None:
    """What this process's GPU could do at most; None where that is not known, or there is none."""
    device = compute_device()
    if device.type == "cpu":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
