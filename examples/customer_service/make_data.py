"""Writes train.jsonl and heldout.jsonl: 240 questions of customers about their orders, 40 of them held out."""

from __future__ import annotations

import json
import random
from pathlib import Path

HELDOUT = 40
PRODUCTS = [
    "blender", "kettle", "desk lamp", "backpack", "office chair", "headphones", "rain jacket", "coffee grinder",
    "tent", "keyboard", "toaster", "yoga mat", "suitcase", "bicycle helmet", "vacuum cleaner", "wall clock",
    "garden hose", "drill", "camera", "bookshelf",
]  # fmt: skip
QUESTIONS = [
    ("The {} I ordered has not arrived. Where is it?", ["order", "track", "deliver", "ship", "arrive"]),
    ("My {} arrived broken. What can I do?", ["replace", "refund", "return", "broken", "damage"]),
    ("I want to send the {} back. How does that work?", ["return", "label", "refund", "send", "back"]),
    ("I was charged twice for the {}. Can you help?", ["charge", "refund", "payment", "twice", "invoice"]),
    ("Does the {} come with a warranty?", ["warranty", "year", "cover", "repair", "manufacturer"]),
    ("You sent me the wrong {}. I need the right one by Friday.", ["wrong", "replace", "exchange", "right", "friday"]),
    ("Can I still change the colour of my {}?", ["colour", "color", "change", "order", "ship"]),
    ("How do I clean the {}?", ["clean", "cloth", "water", "wipe", "dry"]),
    ("The {} stopped working after a week. This is really annoying.", ["repair", "replace", "refund", "warranty"]),
    ("Is the {} in stock again soon?", ["stock", "available", "soon", "week", "notify"]),
    ("I lost the manual of my {}. Where can I find it?", ["manual", "website", "download", "page", "link"]),
    ("Can the {} be delivered to my office?", ["deliver", "address", "office", "ship", "change"]),
]


def main() -> None:
    """Write both files beside this one; they are always the same."""
    rows = [
        {"prompt": question.format(product), "product": product, "words": words}
        for question, words in QUESTIONS
        for product in PRODUCTS
    ]
    random.Random(1).shuffle(rows)
    for name, part in (("heldout", rows[:HELDOUT]), ("train", rows[HELDOUT:])):
        with (Path(__file__).parent / f"{name}.jsonl").open("w") as file:
            for row in part:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
