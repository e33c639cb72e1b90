"""The tiny model in a shape that vLLM's CPU kernels take: their heads have at least 32 dimensions."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM


def make_tiny(tiny: Path, folder: Path, *, dtype: str = "float32") -> Path:
    """A random Llama like the one in `tiny`, with its tokenizer. Returns its folder."""
    config = AutoConfig.from_pretrained(tiny, head_dim=32, num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return folder
