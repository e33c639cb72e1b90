"""`stretto render`: what a config says of stages, replicas and GPUs, for compose and for Kubernetes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from shared.config import RunConfig, load_config, parse_config
from shared.errors import ConfigError
from stretto.render import compose, kustomize

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
KUBECTL = Path(sys.executable).with_name("kubectl")


def run_of(**changes: Any) -> RunConfig:
    tree = {
        "model": "m",
        "algorithm": "ppo",
        "prompts_per_step": 2,
        "samples_per_prompt": 4,
        "steps": 1,
        "data": {"train": "train.jsonl"},
        "rollout": {"replicas": 2},
        "reward": {"signals": [{"name": "exact", "function": "exact_match"}], "replicas": 3},
        "stages": [{"name": "my_filter", "signals": [{"name": "safe", "function": "length"}], "replicas": 2}],
        "learner": {"ranks": 2},
        "broker": {"bind": "tcp://0.0.0.0:5555"},
        "gpus": {"learner": [0, 1], "rollout": [2, 3]},
    }
    return parse_config(tree | changes)


def devices(service: dict[str, Any]) -> list[str]:
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    return device["device_ids"]


def test_compose_gets_replicas_ranks_stages_and_a_service_for_each_set_of_gpus():
    text = compose(run_of())
    assert text.startswith(
        "# docker compose --profile reference --profile critic -f docker-compose.yml -f THIS_FILE up\n"
    )
    services = yaml.safe_load(text)["services"]
    assert set(services) == {"rollout", "rollout-1", "reward", "my_filter", "reference", "critic", "learner"}
    assert devices(services["rollout"]) == ["2"] and devices(services["rollout-1"]) == ["3"]
    assert services["rollout-1"]["extends"] == {"file": "docker-compose.yml", "service": "rollout"}
    assert services["reward"] == {"deploy": {"replicas": 3}}
    assert services["my_filter"]["command"] == "serve my_filter" and services["my_filter"]["deploy"] == {"replicas": 2}
    assert devices(services["learner"]) == ["0", "1"] and services["learner"]["environment"] == {"STRETTO_RANKS": "2"}
    for service in services.values():
        assert service.get("extends", {"service": "rollout"})["service"] in COMPOSE


def test_a_broker_that_no_container_reaches_is_refused():
    with pytest.raises(ConfigError, match=r"broker.bind is tcp://127.0.0.1:0, where no other container reaches it"):
        compose(run_of(broker={}))


@pytest.mark.parametrize("changes", [{}, {"gpus": {}, "learner": {}, "algorithm": "grpo", "stages": []}])
def test_an_overlay_is_valid_and_says_the_same(tmp_path, changes):
    config = run_of(**changes)
    files = kustomize(config, tmp_path / "overlay", ROOT / "deploy/k8s")
    assert load_config(tmp_path / "overlay/run.yaml").folder == "/runs"
    built = subprocess.run([KUBECTL, "kustomize", tmp_path / "overlay"], stdout=subprocess.PIPE, check=True).stdout
    found = {(r["kind"], r["metadata"]["name"]): r for r in yaml.safe_load_all(built)}
    for resource in found.values():
        kubernetes_validate.validate(resource, "1.34", strict=True)
    assert found["Deployment", "rollout"]["spec"]["replicas"] == 2 and len(files) == len(set(files))
    assert found["Deployment", "reward"]["spec"]["replicas"] == 3
    learner = found["Job", "trainer"]["spec"]["template"]["spec"]["containers"][0]
    if changes:
        assert "command" not in learner and learner["image"] == "stretto:cpu"
        assert not any(name in ("reference", "critic", "my-filter") for _, name in found)
        return
    assert learner["command"][:3] == ["torchrun", "--standalone", "--nproc-per-node=2"]
    assert learner["resources"]["limits"]["nvidia.com/gpu"] == 2 and learner["image"] == "stretto:cuda"
    rollout = found["Deployment", "rollout"]["spec"]["template"]["spec"]["containers"][0]
    assert rollout["resources"]["limits"]["nvidia.com/gpu"] == 1
    own = found["Deployment", "my-filter"]["spec"]
    assert own["replicas"] == 2 and own["template"]["spec"]["containers"][0]["args"] == ["serve", "my_filter"]
    assert own["selector"]["matchLabels"].items() <= own["template"]["metadata"]["labels"].items()
    (rule,) = found["NetworkPolicy", "reward-servers"]["spec"]["podSelector"]["matchExpressions"]
    assert "my-filter" in rule["values"]
    assert {("Deployment", "reference"), ("Job", "critic")} <= set(found)


def test_an_overlay_without_the_manifests_says_what_it_needs(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no folder .*base: give that with Stretto's manifests"):
        kustomize(run_of(), tmp_path / "overlay", tmp_path)
