"""Where a model computes: on a GPU it must give what it gives on the CPU."""

from __future__ import annotations

import pytest
import torch

from services.compute import device, hf
from services.compute.hf import HFBackend
from services.compute.packing import micro_batches, pack

from ..conftest import make_config
from .test_packing import group_of

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: pytest -m gpu"),
]


def test_each_rank_of_a_host_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert device.compute_device() == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert device.compute_device() == torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    assert device.peak_flops() == 989e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a new one")
    assert device.peak_flops() is None


def computed(tiny_model, dtype):
    """Log-probs, scores, a snapshot and gradients of one micro-batch, all on the CPU."""
    backend = HFBackend.load(str(tiny_model), make_config(tiny_model, learner={"dtype": dtype}).learner)
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in backend.shapes.items()}
    backend.write_snapshot(tensors)
    backend.use_snapshot(tensors)
    (rows,) = micro_batches([group_of(6, [9, 4, 7]), group_of(30, [5, 5])], 1000)
    logprobs, entropy = backend.logprobs(pack(rows), 0.7)
    (logprobs.sum() + entropy.sum()).backward()
    backend.collect_gradients()
    gradient = torch.cat([parameter.grad.cpu().reshape(-1) for parameter in backend.parameters.values()])
    score = torch.from_numpy(backend.score(backend.probe_tokens(12)))
    return logprobs.detach(), entropy.detach(), score, gradient, *tensors.values()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
@pytest.mark.parametrize("place", [pytest.param("cuda", marks=needs_gpu)])
def test_a_gpu_computes_what_the_cpu_does(tiny_model, monkeypatch, dtype, tolerance, place):
    found = computed(tiny_model, dtype)
    monkeypatch.setattr(hf, "compute_device", lambda: torch.device("cpu"))
    for here, there in zip(found, computed(tiny_model, dtype), strict=True):
        assert here.device.type == "cpu"
        assert torch.allclose(here.float(), there.float(), atol=tolerance, rtol=tolerance)
