"""A reward server: 1 where the completion holds the row's answer. python server.py [ADDRESS]."""

import sys
from typing import Any

from stretto.reward import serve


def score(completion: str, answer: str, **_: Any) -> float:
    """The value of one sample."""
    return float(answer in completion)


if __name__ == "__main__":
    serve(score, bind=sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:5555")
