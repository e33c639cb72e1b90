"""Reward models by vLLM: the same logits as those of transformers, and a process that leaves nothing behind."""

from __future__ import annotations

import os
import signal as signals
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'stretto[vllm]'")

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, LlamaForSequenceClassification

from services.reward.batches import Batches
from services.reward.model import encode
from shared.config import Signal
from shared.group import RewardStatus

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
CHAT = [{"role": "user", "content": "Where is my order?"}]
COMPLETIONS = ["Soon.", "It is on its way, and will be there on Monday.", "No idea", "", "a" * 600]


@pytest.fixture(scope="module")
def classifier(vllm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A random classifier of three labels in a shape that vLLM's CPU kernels take."""
    folder = tmp_path_factory.mktemp("models") / "classifier"
    torch.manual_seed(1)
    LlamaForSequenceClassification(AutoConfig.from_pretrained(vllm_model, num_labels=3)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(vllm_model).save_pretrained(folder)
    yield folder


async def test_vllm_gives_the_logits_of_transformers_and_ends_with_its_process(classifier: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(classifier, dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(classifier)
    expected = []
    for completion in COMPLETIONS[:-1]:
        ids = torch.tensor([encode(tokenizer, CHAT, completion)["input_ids"]])
        with torch.inference_mode():
            expected.append(model(ids).logits[0, 2].item())
    batches = Batches(Signal(name="s", model=str(classifier), backend="vllm", label=2), timeout_s=60)
    await batches.start()
    try:
        worker = batches._worker
        given = [{"messages": CHAT, "completion": completion} for completion in COMPLETIONS]
        *scores, too_long = await worker.score("s", given)
        np.testing.assert_allclose([score.value for score in scores], expected, atol=1e-5)
        assert too_long.status is RewardStatus.INVALID and "its model takes 512" in too_long.reason
        assert worker._process is not None and worker._process.pid is not None
        family = [psutil.Process(worker._process.pid)]
        family += family[0].children(recursive=True)
        os.kill(worker._process.pid, signals.SIGKILL)
        _, alive = psutil.wait_procs(family, timeout=20)
        assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    finally:
        await batches.close()
