"""A run on two hosts, which are two network namespaces of this machine: rollouts on one, everything else on the other.

    python -m tests.containers.two_hosts [--transport gloo] [--transport stream] [--json PATH]

Each host has an address, a name, keys and shared memory of its own; a bridge is the cable between them. The host of
the rollouts is made away with while the run goes on, without a word to the other, and comes back. Afterwards the
weights must have come over the cable, and every admitted group be accounted for. Needs root.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from protocol.messages import Status, StatusRequest
from shared.errors import ProtocolError, Unreachable
from stretto.contact import ask
from stretto.models import pull
from tests.chaos.chaos import check_accounts

ROOT = Path(__file__).parents[2]
STEPS = 24
DEADLINE_S = 120.0
TRANSPORTS = ("gloo", "stream", "auto")
BROKER = "tcp://10.77.0.1:5555"
CLONE_NEWNET = 0x40000000
CONFIG: dict[str, Any] = {
    "name": "run",
    "prompts_per_step": 2,
    "samples_per_prompt": 4,
    "steps": STEPS,
    "max_staleness": 2,
    "sampling": {"max_tokens": 64, "ignore_eos": True},
    "rollout": {"dtype": "float32", "max_samples": 8},
    "learner": {"dtype": "float32", "lr": 1e-3},
    "broker": {"bind": "tcp://0.0.0.0:5555", "heartbeat_s": 1.0, "lease_s": 10.0},
}


class NotPermitted(Exception):
    """This machine does not let us make network namespaces."""


def ip(*arguments: str) -> str:
    """What `ip` prints. Raises NotPermitted where it fails."""
    try:
        return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise NotPermitted("there is no `ip` command: install iproute2") from None
    except subprocess.CalledProcessError as error:
        raise NotPermitted(f"ip {' '.join(arguments)}: {error.stderr.strip()}") from None


class Cable:
    """What joins the hosts: a bridge in a namespace of its own, so that a host can vanish and leave the others be."""

    def __init__(self) -> None:
        self.namespace = f"stretto-cable-{os.getpid()}"

    def lay(self) -> None:
        """Have it there."""
        ip("netns", "add", self.namespace)
        ip("-n", self.namespace, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.namespace, "link", "set", "bridge", "up")

    def plug(self, namespace: str, port: str) -> None:
        """Give a namespace an `eth0` on this cable."""
        ip("-n", self.namespace, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        ip("-n", self.namespace, "link", "set", port, "master", "bridge", "up")


class Host:
    """One host: a namespace with an address, and a folder with its keys, its shared memory and its log."""

    def __init__(self, name: str, address: str, cable: Cable, folder: Path) -> None:
        self.name = name
        self.namespace = f"stretto-{name}-{os.getpid()}"
        self.folder = folder / name
        self._address = address
        self._cable = cable
        self._services: dict[str, subprocess.Popen[bytes]] = {}
        self._received_bytes = 0
        self.environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "STRETTO_KEYS": str(self.folder / "keys"),
            "STRETTO_SHM": str(self.folder / "shm"),
            "STRETTO_BROKER": BROKER,
            "OMP_NUM_THREADS": "1",
        }
        (self.folder / "shm").mkdir(parents=True)

    def come_up(self) -> None:
        """Have it on the network."""
        ip("netns", "add", self.namespace)
        self._cable.plug(self.namespace, self.name)
        ip("-n", self.namespace, "address", "add", f"{self._address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", self.namespace, "link", "set", device, "up")

    def vanish(self) -> None:
        """Pull the cable, and only then kill everything: the other hosts are told nothing, not even by the kernel."""
        self._received_bytes = self.received_bytes()
        ip("-n", self.namespace, "link", "del", "eth0")
        for service in self._services.values():
            service.kill()
            service.wait()
        self._services.clear()
        ip("netns", "del", self.namespace)

    def received_bytes(self) -> int:
        """What has come in by `eth0` so far."""
        (link,) = json.loads(ip("-n", self.namespace, "-json", "-statistics", "link", "show", "eth0"))
        return self._received_bytes + int(link["stats64"]["rx"]["bytes"])

    def command(self, *arguments: str) -> list[str]:
        """A stretto command on this host."""
        as_host = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"']
        return [*as_host, self.name, sys.executable, "-m", "stretto", *arguments]

    def stretto(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a stretto command to its end."""
        command = self.command(*arguments)
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=DEADLINE_S)

    def serve(self, service: str, instance: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a service."""
        names = [] if service == "broker" else ["--instance", instance]
        with (self.folder / f"{instance}.log").open("ab") as log:
            command = self.command("serve", service, *names, *arguments)
            self._services[instance] = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
        return self._services[instance]

    def check(self) -> None:
        """Raises AssertionError where a service has ended."""
        for instance, service in self._services.items():
            if service.poll() is not None:
                lines = (self.folder / f"{instance}.log").read_text().splitlines()[-15:]
                raise AssertionError(f"{instance} ended with {service.returncode}:\n" + "\n".join(lines))

    def remove(self) -> None:
        """End everything that runs there."""
        for service in self._services.values():
            service.kill()
            service.wait()
        subprocess.run(["ip", "netns", "del", self.namespace], stderr=subprocess.DEVNULL)


def enter(namespace: str) -> None:
    """Have this thread, and those that it starts, be in a network namespace."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
            raise NotPermitted(f"setns: {os.strerror(ctypes.get_errno())}")


def make_keys(one: Host, other: Host) -> None:
    """Have the hosts know each other, as docs/security.md says. Until then the other one must be kept out."""
    public = re.search(r"^server +(\S{40})$", one.stretto("keys", "list").stdout, re.MULTILINE)
    assert public is not None
    told = other.stretto("keys", "new", "--server-public", public[1]).stdout
    command = re.search(r"stretto keys trust (\S+) '(\S{40})'", told)
    assert command is not None and command[1] == other.name, told
    refused = other.stretto("status", "--json")
    assert refused.returncode != 0 and "does not trust the key of this host" in refused.stderr, refused
    assert one.stretto("keys", "trust", command[1], command[2]).returncode == 0


class Watch:
    """Asks the broker how the run stands. seconds: when what was waited for came."""

    def __init__(self, hosts: list[Host]) -> None:
        self._hosts = hosts
        self.seconds: dict[str, float] = {}
        self.received_mib: dict[str, float] = {}

    async def reach(self, what: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first status for which a condition holds."""
        began, status = time.monotonic(), {}
        while time.monotonic() < began + DEADLINE_S:
            for host in self._hosts:
                host.check()
            try:
                status = (await ask(BROKER, StatusRequest(), Status)).status
            except (Unreachable, ProtocolError):
                continue
            for member in rollouts(status):
                mib = member["figures"].get("weights/received_mib", 0.0)
                self.received_mib[member["instance"]] = max(mib, self.received_mib.get(member["instance"], 0.0))
            if condition(status):
                self.seconds[what] = round(time.monotonic() - began, 1)
                return status
            await asyncio.sleep(0.1)
        raise AssertionError(f"not within {DEADLINE_S:g} s: {what}; the last status: {json.dumps(status)[:2000]}")


def rollouts(status: dict[str, Any], state: str | None = None) -> list[dict[str, Any]]:
    """The rollouts that are there, of a state if one is given."""
    found = [member for member in status["services"] if member["service"] == "rollout"]
    return [member for member in found if state in (None, member["state"])]


def start_rollouts(host: Host) -> None:
    """Two of them."""
    for i in range(2):
        host.serve("rollout", f"rollout-{i}")


async def play(transport: str, folder: Path, model: Path) -> dict[str, Any]:
    """A run by one transport; its figures."""
    (folder / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}+1", "answer": str(i + 1)}) + "\n" for i in range(100))
    )
    (folder / "rewards.py").write_text("def digits(completion):\n    return sum(c.isdigit() for c in completion)\n")
    tree = CONFIG | {
        "model": str(model),
        "reward": {"signals": [{"name": "digits", "function": f"{folder}/rewards.py:digits"}]},
        "data": {"train": str(folder / "train.jsonl")},
        "weights": {"transport": transport},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    run = folder / "run"
    cable = Cable()
    near, far = hosts = [Host(name, f"10.77.0.{i}", cable, folder) for i, name in enumerate(("near", "far"), 1)]
    try:
        cable.lay()
        near.come_up()
        far.come_up()
        enter(near.namespace)
        assert near.stretto("keys", "new").returncode == 0
        broker = near.serve("broker", "broker", "--config", str(folder / "run.yaml"), "--run-folder", str(run))
        os.environ["STRETTO_KEYS"] = near.environment["STRETTO_KEYS"]
        watch = Watch(hosts)
        await watch.reach("broker", lambda s: True)
        make_keys(near, far)
        for service in ("broadcaster", "reward", "learner"):
            near.serve(service, service)

        start_rollouts(far)

        def serving(status: dict[str, Any]) -> bool:
            return len(rollouts(status, "SERVING")) == 2

        status = await watch.reach("version 3 with two rollouts", lambda s: s["version"] >= 3 and serving(s))
        assert {member["host"] for member in rollouts(status)} == {"far"}
        far.vanish()
        await watch.reach("missed", lambda s: not rollouts(s))
        far.come_up()
        start_rollouts(far)
        status = await watch.reach("back", serving)
        at = status["version"]
        await watch.reach("ten versions more", lambda s: s["version"] >= at + 10)
        assert await asyncio.to_thread(broker.wait, DEADLINE_S) == 0
        received = far.received_bytes()
    finally:
        for host in hosts:
            host.remove()
        subprocess.run(["ip", "netns", "del", cable.namespace], stderr=subprocess.DEVNULL)
    status = check_accounts(run)
    assert status["state"] == "finished" and status["version"] == STEPS
    everybody = [*status["services"], *status["departed"]]
    (broadcaster,) = (m["figures"] for m in everybody if m["service"] == "broadcaster")
    assert all(mib > 0 for mib in watch.received_mib.values()) and len(watch.received_mib) == 2, watch.received_mib
    assert broadcaster["weights/rounds" if transport == "gloo" else "weights/streamed_mib"] > 0, broadcaster
    return {
        "transport": transport,
        "groups": status["groups"]["train"],
        "received_mib": watch.received_mib,
        "cable_mib": received / 2**20,
        "rounds": broadcaster["weights/rounds"],
        "broken_rounds": broadcaster["weights/broken_rounds"],
        "streamed_mib": broadcaster["weights/streamed_mib"],
        "seconds": watch.seconds,
    }


def run_by(transport: str) -> dict[str, Any]:
    """A run by one transport, in a folder of its own; its figures."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="two-hosts-") as folder:
        return asyncio.run(play(transport, Path(folder), pull("tiny")))


def table(results: list[dict[str, Any]]) -> list[str]:
    """The figures as Markdown."""
    lines = [
        "| transport | largest snapshot received (MiB) | rounds (broken) | streamed (MiB) | to the far host (MiB) "
        "| missed after (s) | back after (s) | groups |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        mib, groups, seconds = max(r["received_mib"].values()), r["groups"], r["seconds"]
        account = f"{groups['admitted']} admitted, {groups['consumed']} consumed, {groups['dead']} dead"
        lines.append(
            f"| {r['transport']} | {mib:.2f} | {r['rounds']:.0f} ({r['broken_rounds']:.0f}) | {r['streamed_mib']:.2f} "
            f"| {r['cable_mib']:.2f} | {seconds['missed']} | {seconds['back']} | {account} |"
        )
    return lines


def main() -> None:
    """Run it by each transport, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", action="append", choices=TRANSPORTS, help="default: gloo and stream")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    # One process a run, since the threads of ZeroMQ stay in the namespace in which they were started.
    spawned = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, spawned, max_tasks_per_child=1) as pool:
            results = list(pool.map(run_by, args.transport or ("gloo", "stream")))
    except NotPermitted as reason:
        print(f"skipped: this machine gives no network namespaces ({reason})")
        return
    print(*table(results), sep="\n")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
