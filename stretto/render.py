"""`stretto render`: a run's stages, replicas and GPUs as an override of the compose file, or as a kustomize overlay."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from shared.config import RunConfig, dump_config
from shared.cores import plan_gpus
from shared.errors import ConfigError
from stretto.launcher import instances

COMPOSE_FILE = "docker-compose.yml"
MANIFESTS = Path("deploy/k8s")
PROFILES = ("cost", "reference", "critic", "cost_critic")
COMPONENTS = {"reference": "reference", "critic": "critic", "cost": "costs"}
"""Stages that the base manifests do not have, and where they are."""
BIND = "tcp://0.0.0.0:5555"


def compose(config: RunConfig) -> str:
    """YAML for `docker compose -f docker-compose.yml -f …`. Raises ConfigError where none reaches the broker."""
    if config.broker.bind != BIND:
        raise ConfigError(f"broker.bind is {config.broker.bind}, where no other container reaches it: set it to {BIND}")
    gpus = plan_gpus(config.gpus, instances(config))
    processes, own, services = _services(config), _own(config), dict[str, Any]()
    for service, names in processes.items():
        sections: list[dict[str, Any]] = [{"deploy": {"replicas": len(names)}}]
        if any(gpus.get(name) != gpus.get(names[0]) for name in names):  # replicas of one service would share theirs
            sections = [{} for _ in names]
        for name, section in zip(names, sections, strict=False):
            if name in gpus:
                device = {"driver": "nvidia", "device_ids": [*map(str, gpus[name])], "capabilities": ["gpu"]}
                section.setdefault("deploy", {})["resources"] = {"reservations": {"devices": [device]}}
            if service == "learner" and config.learner.ranks > 1:
                section["environment"] = {"STRETTO_RANKS": str(config.learner.ranks)}
            if is_own := service in own:
                section["command"] = f"serve {service}"
            is_more = service in services
            if is_own or is_more:
                section["extends"] = {"file": COMPOSE_FILE, "service": "reward" if is_own else service}
            services[name if is_more else service] = section
    profiles = "".join(f"--profile {name} " for name in PROFILES if name in processes)
    title = f"# docker compose {profiles}-f {COMPOSE_FILE} -f THIS_FILE up\n"
    return title + yaml.safe_dump({"services": services}, sort_keys=False)


def kustomize(config: RunConfig, folder: Path, manifests: Path = MANIFESTS) -> list[Path]:
    """Write an overlay for `kubectl apply -k` into a folder; returns its files.

    Raises ConfigError where the manifests are not there.
    """
    if not (manifests / "base").is_dir():
        raise ConfigError(f"there is no folder {manifests / 'base'}: give that with Stretto's manifests by --manifests")
    services, own = _services(config), _own(config)
    gpus = plan_gpus(config.gpus, instances(config))
    folder.mkdir(parents=True, exist_ok=True)
    at = Path(os.path.relpath(manifests, folder))
    in_pods = {"folder": "/runs", "broker": config.broker.model_copy(update={"bind": BIND})}
    files = {"run.yaml": dump_config(config.model_copy(update=in_pods))}
    patches = [_gpu_patch(service, len(gpus[names[0]])) for service, names in services.items() if names[0] in gpus]
    for name in own:
        files[f"{_dashed(name)}.yaml"] = _stage((manifests / "base/reward.yaml").read_text(), name)
        values = "/spec/podSelector/matchExpressions/0/values/-"
        patches.append(_patch("NetworkPolicy", "reward-servers", values, _dashed(name)))
    if config.learner.ranks > 1:
        command = ["torchrun", "--standalone", f"--nproc-per-node={config.learner.ranks}", "-m", "stretto"]
        patches.append(_patch("Job", "trainer", "/spec/template/spec/containers/0/command", command))
    overlay = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "stretto",
        "resources": [str(at / "base"), *(f"{_dashed(name)}.yaml" for name in own)],
        "components": [str(at / "components" / part) for stage, part in COMPONENTS.items() if stage in services],
        "generatorOptions": {"disableNameSuffixHash": True},
        "configMapGenerator": [{"name": "config", "behavior": "replace", "files": ["run.yaml"]}],
        "images": [{"name": "stretto", "newName": "stretto", "newTag": "cuda" if gpus else "cpu"}],
        "replicas": [
            {"name": _dashed(service), "count": len(names)}
            for service, names in services.items()
            if service in ("rollout", "reward", "cost", *own)
        ],
        "patches": patches,
    }
    files["kustomization.yaml"] = yaml.safe_dump(overlay, sort_keys=False)
    for name, text in files.items():
        (folder / name).write_text(text)
    return [folder / name for name in files]


def _services(config: RunConfig) -> dict[str, list[str]]:
    """The instances of each service, but for broker and broadcaster, of which there is one."""
    found: dict[str, list[str]] = {}
    for name in instances(config):
        if name not in ("broker", "broadcaster"):
            found.setdefault(name.rpartition("-")[0] or name, []).append(name)
    return found


def _own(config: RunConfig) -> list[str]:
    return [stage.name for stage in config.stages]


def _dashed(name: str) -> str:
    """A name as Kubernetes wants them."""
    return name.replace("_", "-")


def _stage(reward: str, name: str) -> str:
    """The manifest of a stage of the run's own, which is the reward's under another name."""
    deployment = yaml.safe_load(reward)
    spec, label = deployment["spec"], {"app.kubernetes.io/component": _dashed(name)}
    for labels in (
        deployment["metadata"]["labels"],
        spec["selector"]["matchLabels"],
        spec["template"]["metadata"]["labels"],
    ):
        labels |= label
    deployment["metadata"]["name"] = _dashed(name)
    container = spec["template"]["spec"]["containers"][0]
    container |= {"name": _dashed(name), "args": ["serve", name]}
    return yaml.safe_dump(deployment, sort_keys=False)


def _gpu_patch(service: str, count: int) -> dict[str, Any]:
    kind = "Deployment" if service in ("rollout", "reward", "cost", "reference") else "Job"
    name = "trainer" if service == "learner" else _dashed(service)
    return _patch(kind, name, "/spec/template/spec/containers/0/resources/limits/nvidia.com~1gpu", count)


def _patch(kind: str, name: str, path: str, value: Any) -> dict[str, Any]:
    operation = yaml.safe_dump([{"op": "add", "path": path, "value": value}], sort_keys=False)
    return {"target": {"kind": kind, "name": name}, "patch": operation}
