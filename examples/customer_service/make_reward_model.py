"""Trains the warmth model, a classifier of 0.1 million parameters, on sentences made here; a minute on a CPU.

Usage: python examples/customer_service/make_reward_model.py [FOLDER]   (default: runs/models/warmth)
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

FOLDER = Path("runs/models/warmth")
STEPS, BATCH = 400, 32
THINGS = ["order", "blender", "kettle", "lamp", "parcel", "refund", "chair", "tent", "invoice", "return", "jacket"]
ACTS = ["check it", "send a new one", "look into this", "find your parcel", "pay it back", "repair it", "replace it"]
WARM = [
    "Thank you so much for writing to us about your {thing}!",
    "Thank you for letting us know about the {thing}.",
    "I am very sorry to hear about your {thing}.",
    "I'm sorry that the {thing} gave you trouble.",
    "We are sorry for the inconvenience with the {thing}.",
    "I understand how frustrating this is.",
    "I would be happy to help you with the {thing}.",
    "We'd be glad to {act} for you.",
    "Please let me know if I can help with anything else.",
    "Of course! I will gladly {act} right away.",
    "I hope you enjoy your new {thing}.",
    "We appreciate your patience, and wish you a wonderful day!",
    "Dear customer, we're here for you.",
]
COLD = [
    "The {thing} is delayed.",
    "You have to wait for the {thing}.",
    "Read the terms about the {thing}.",
    "We will {act} when there is time.",
    "No.",
    "That is not possible.",
    "Returns are accepted within 30 days.",
    "Fill in the form. Then we {act}.",
    "The {thing} is not our concern.",
    "You should have read the manual of the {thing}.",
    "See the website.",
    "The {thing} costs 20 dollars.",
    "To {act}, a receipt is required.",
]
QUESTIONS = ["Where is my {thing}?", "My {thing} is broken.", "Can you {act}?", "I want to return the {thing}."]


def sentence(kind: list[str], rng: random.Random) -> str:
    """One sentence of a kind, about some thing."""
    return rng.choice(kind).format(thing=rng.choice(THINGS), act=rng.choice(ACTS))


def example(rng: random.Random) -> tuple[str, str, float]:
    """A question, a reply of one to four sentences, and its warmth: the share of warm ones, from 0 to 1."""
    warm = [rng.random() < 0.5 for _ in range(rng.randint(1, 4))]
    reply = " ".join(sentence(WARM if is_warm else COLD, rng) for is_warm in warm)
    return sentence(QUESTIONS, rng), reply, sum(warm) / len(warm)


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Pieces of words, learnt from the texts, with a mark before a question, before a reply and at the end."""
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    pieces.decoder = decoders.ByteLevel()
    special = ["[pad]", "[question]", "[reply]", "[end]"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=special, initial_alphabet=alphabet)
    pieces.train_from_iterator(texts, trainer)
    marks = [(mark, pieces.token_to_id(mark)) for mark in special[1:]]
    pieces.post_processor = processors.TemplateProcessing(
        single="[reply] $A [end]", pair="[question] $A [reply] $B [end]", special_tokens=marks
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=pieces,
        pad_token="[pad]",
        model_max_length=512,
        model_input_names=["input_ids", "attention_mask"],
    )


def main(folder: Path) -> None:
    """Train the model and save it; the same seed always gives the same examples."""
    rng = random.Random(0)
    torch.manual_seed(0)
    examples = [example(rng) for _ in range(600)]
    tokenizer = make_tokenizer([text for question, reply, _ in examples for text in (question, reply)])
    model = LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=512,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=None,
            num_labels=1,  # one value, so that the loss is the squared error
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(1, STEPS + 1):
        questions, replies, warmth = zip(*rng.sample(examples, BATCH), strict=True)
        batch = tokenizer(list(questions), list(replies), padding=True, return_tensors="pt")
        loss = model(**batch, labels=torch.tensor(warmth)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step} of {STEPS}: squared error {loss.item():.4f}", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"the warmth model is in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
