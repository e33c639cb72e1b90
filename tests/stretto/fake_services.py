"""Stands in for `python -m stretto` in the launcher's tests: `fake_services.py serve SERVICE …` behaves as it is told.

$FAKE maps an instance to what it does; by default it waits. `crash N`: fails N times, then has the broker end the run.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


async def serve_broker(folder: Path) -> None:
    """Answer what the launcher asks; end the run when it drains or when a service leaves."""
    from protocol.channel import Server
    from protocol.messages import Drain, Leave, Ok, Status, StatusRequest

    done: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def handle(message):
        match message.body:
            case Drain(reason=reason) | Leave(instance=reason):
                if not done.done():
                    done.set_result(reason)
                return Ok()
            case StatusRequest():
                stop_reason = done.result() if done.done() else None
                return Status(status={"state": "running", "stop_reason": stop_reason, "version": 0})

    remembered = folder / "address"
    server = Server(remembered.read_text() if remembered.exists() else "tcp://127.0.0.1:0", handle)
    remembered.write_text(server.address)
    serving = asyncio.create_task(server.run())
    aside = folder / "broker.partial"
    aside.write_text(json.dumps({"address": server.address, "pid": os.getpid(), "run_id": "fake"}))
    aside.rename(folder / "broker.json")
    (folder / "drained_because").write_text(await done)
    serving.cancel()


async def end_the_run() -> None:
    from protocol.channel import Client
    from protocol.messages import Leave, Ok

    await Client(option("--broker")).request(Leave(instance=option("--instance")), Ok)


def count(instance: str) -> int:
    """How often the instance has been started, this time included."""
    file = Path(os.environ["FAKE_FOLDER"]) / f"{instance}.starts"
    file.write_text(file.read_text() + "x" if file.exists() else "x")
    return len(file.read_text())


def main() -> None:
    service = sys.argv[2]
    if service == "broker":
        if (says := json.loads(os.environ["FAKE"]).get("broker")) is not None:
            print(f"broker: {says}", file=sys.stderr)
            sys.exit(2)
        asyncio.run(serve_broker(Path(option("--run-folder"))))
        return
    instance = option("--instance")
    starts = count(instance)
    what, _, number = json.loads(os.environ["FAKE"]).get(instance, "wait").partition(" ")
    if what == "config_error":
        print(f"some library: warning\n{instance}: the key is wrong\n  in two lines", file=sys.stderr)
        sys.exit(2)
    if what == "crash" and starts <= int(number):
        print("x" * 200_000, file=sys.stderr)
        print(f"{instance}: it fell over", file=sys.stderr)
        sys.exit(1)
    if what == "leave_early" and starts == 1:
        sys.exit(0)
    if what == "orphan" and starts == 1:
        # A process of its own that outlives it and holds its output open.
        orphan = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        (Path(os.environ["FAKE_FOLDER"]) / "orphan").write_text(str(orphan.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    if what in ("crash", "leave_early", "orphan"):
        asyncio.run(end_the_run())
    signal.pause()


if __name__ == "__main__":
    main()
