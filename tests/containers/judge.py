"""A user's reward server in a container of its own: digits of the completion, for those who know the token."""

import os
from typing import Any

from aiohttp import web


async def score(request: web.Request) -> web.Response:
    """The scores of a batch of samples."""
    if request.headers.get("Authorization") != f"Bearer {os.environ['JUDGE_TOKEN']}":
        raise web.HTTPUnauthorized
    samples: list[dict[str, Any]] = (await request.json())["samples"]
    return web.json_response({"scores": [sum(c.isdigit() for c in sample["completion"]) for sample in samples]})


if __name__ == "__main__":
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/score", score)
    web.run_app(app, port=8000)
