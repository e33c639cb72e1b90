"""Fixtures that many tests share."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest

from stretto.models import pull


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-layer Llama with a tokenizer of single bytes."""
    return pull("tiny", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def documented_metrics() -> dict[str, bool]:
    """The names of docs/metrics.md, and whether every run shows them."""
    text = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
    cells = re.findall(r"^\| (`stretto_[^|]*)\|", text, re.MULTILINE)
    return {name: "†" not in cell for cell in cells for name in re.findall(r"`(\w+)`", cell)}


@pytest.fixture(scope="session")
def vllm_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in a shape that vLLM's CPU kernels take: heads of 32 dimensions. Skips where there is no vLLM."""
    pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'stretto[vllm]'")
    import torch
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tiny-vllm"
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(tiny_model, head_dim=32, num_key_value_heads=2)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


@pytest.fixture
def free_again() -> Callable[[str], Awaitable[None]]:
    """Waits until an address that a socket of this process was bound to can be bound anew: ZeroMQ closes it later."""

    async def wait(address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        async with asyncio.timeout(20):
            while True:
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    try:
                        probe.bind((host, int(port)))
                        return
                    except OSError:
                        await asyncio.sleep(0.01)

    return wait
