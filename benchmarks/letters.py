"""A task that a tiny model learns in half a minute: answer a prompt of three letters with those letters in upper case.

For benchmarks/algorithms.py. The rewards are dense and depend on the prompt; the sets of letters that held-out prompts
hold are in no training prompt.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from pathlib import Path
from typing import Any

LETTERS = "abcdefghi"
WANTED = 8
"""Letters of a whole answer."""
HELDOUT_SETS = 20
"""Sets of three letters that no training prompt holds, of 84."""
WARM_LR = 3e-3


# Rewards


def upper(completion: str, prompt: str) -> float:
    """Share of the first eight characters that are letters of the prompt in upper case."""
    return sum(letter in prompt.upper() for letter in completion[:WANTED]) / WANTED


def first(completion: str, prompt: str) -> float:
    """Share of the first eight characters that are the first letter of the prompt in upper case."""
    return sum(letter == prompt[0].upper() for letter in completion[:WANTED]) / WANTED


async def slow_upper(completion: str, prompt: str, delay_s: float) -> float:
    """As `upper`, from a judge that takes its time: rollouts run ahead of it as far as they may."""
    await asyncio.sleep(delay_s)
    return upper(completion, prompt)


# Data and model


def write_prompts(folder: Path) -> None:
    """`train.jsonl`: all orders of the training sets of letters; `heldout.jsonl`: two orders of each other set."""
    sets = list(itertools.combinations(LETTERS, 3))
    chooser = random.Random(0)
    chooser.shuffle(sets)
    orders = {chosen: ["".join(order) for order in itertools.permutations(chosen)] for chosen in sets}
    train = [prompt for chosen in sets[HELDOUT_SETS:] for prompt in orders[chosen]]
    heldout = [prompt for chosen in sets[:HELDOUT_SETS] for prompt in chooser.sample(orders[chosen], 2)]
    for name, prompts in (("train", train), ("heldout", heldout)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


def write_model(folder: Path, steps: int = 300) -> float:
    """The model that runs start from; returns its loss a token.

    It is the random `tiny` one, trained for some seconds on answers of eight letters of which a half are letters of
    the prompt in lower case and a half are any letters. So it looks at the prompt, and upper case is what it must
    learn: without that most of its bytes are no letters, and hundreds of updates tell nothing apart.
    """
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    from stretto.models import pull

    torch.manual_seed(0)
    source = pull("tiny", folder.with_name("tiny"))
    tokenizer = AutoTokenizer.from_pretrained(source)
    model: Any = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_LR)
    chooser = random.Random(1)
    loss = torch.zeros(())
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = WARM_LR * (1 - step / steps)
        tokens = torch.tensor([_example(tokenizer, chooser) for _ in range(64)])
        labels = tokens.clone()
        labels[:, : -WANTED - 1] = -100
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return float(loss.detach())


def _example(tokenizer: Any, chooser: random.Random) -> list[int]:
    """Tokens of a prompt and an answer; the last nine are the answer's."""
    prompt = "".join(chooser.sample(LETTERS, 3))
    answer = "".join(chooser.choice(chooser.choice([prompt, LETTERS + LETTERS.upper()])) for _ in range(WANTED))
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(asked + answer + "<|end|>", add_special_tokens=False)["input_ids"])
