"""The manifests under deploy/k8s: what kustomize makes of them is valid, and agrees with images and compose file."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from protocol.keys import find_keys, public_key
from shared.config import load_config
from stretto.cli import SERVICES

ROOT = Path(__file__).parents[1]
K8S = ROOT / "deploy/k8s"
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DOCKERFILE = (ROOT / "deploy/docker/Dockerfile").read_text()
KUBECTL = Path(sys.executable).with_name("kubectl")
COMPONENTS = ("reference", "critic", "costs", "autoscale", "collective")
VERSIONS = ("1.34", "1.37")
CHOSEN = range(32768, 61000)
"""Ports that the kernel gives to who asks for any."""


def kustomize(folder: Path) -> list[dict]:
    built = subprocess.run([KUBECTL, "kustomize", folder], stdout=subprocess.PIPE, text=True, check=True).stdout
    return list(yaml.safe_load_all(built))


@cache
def built(name: str) -> list[dict]:
    return kustomize(K8S / name)


@pytest.fixture(scope="module")
def with_components(tmp_path_factory):
    """Overlays with every component, by name."""
    made = {}
    for overlay in ("cpu", "gpu"):
        folder = tmp_path_factory.mktemp(overlay)
        there = {name: os.path.relpath(K8S / name, folder) for name in (f"overlays/{overlay}", "components")}
        names = [name for name in COMPONENTS if overlay == "cpu" or name != "autoscale"]
        kustomization = yaml.safe_load((K8S / "overlays" / overlay / "kustomization.yaml").read_text())
        for field in ("resources", "components"):
            kustomization[field] = [
                os.path.relpath(K8S / "overlays" / overlay / path, folder) for path in kustomization.get(field, [])
            ]
        kustomization["components"] += [f"{there['components']}/{name}" for name in names]
        for file in (K8S / "overlays" / overlay).glob("*.yaml"):
            if file.name != "kustomization.yaml":
                (folder / file.name).write_text(file.read_text())
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        made[overlay] = kustomize(folder)
    return made


@pytest.fixture(params=["cpu", "gpu"])
def resources(request, with_components):
    return with_components[request.param]


def pods(resources: list[dict]) -> list[dict]:
    """The pod templates."""
    return [r["spec"]["template"] for r in resources if r["kind"] in ("Job", "Deployment")]


def containers(resources: list[dict], *, initial: bool = False) -> dict[str, dict]:
    """Containers by name; initial: also those that come before."""
    kinds = ("containers", "initContainers") if initial else ("containers",)
    return {c["name"]: c for pod in pods(resources) for kind in kinds for c in pod["spec"].get(kind, [])}


def named(resources: list[dict], kind: str) -> dict[str, dict]:
    return {r["metadata"]["name"]: r for r in resources if r["kind"] == kind}


def selects(selector: dict, labels: dict) -> bool:
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


@pytest.mark.parametrize("version", VERSIONS)
def test_every_resource_is_valid(resources, version):
    for resource in [*resources, *built("storage")]:
        kubernetes_validate.validate(resource, version, strict=True)
        assert resource["metadata"].get("namespace", "stretto") == "stretto"


@pytest.mark.parametrize("overlay", ["overlays/cpu", "overlays/gpu"])
def test_an_overlay_is_complete_as_it_is(overlay):
    assert set(containers(built(overlay))) == {"broker", "learner", "broadcaster", "rollout", "reward"}


def test_every_service_is_there_with_the_arguments_that_it_has_in_compose(resources):
    found = {container["args"][1]: container["args"] for container in containers(resources).values()}
    assert set(found) == {*SERVICES, "broker"}
    for service, arguments in found.items():
        command = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", COMPOSE["services"][service]["command"])
        assert arguments == command.split()


def test_the_address_of_the_broker_is_the_same_everywhere(resources):
    environment = named(resources, "ConfigMap")["environment"]["data"]
    shared = COMPOSE["x-service"]["environment"]
    assert {key: environment[key] for key in ("STRETTO_BROKER", "STRETTO_JOIN_S")} == {
        key: shared[key] for key in ("STRETTO_BROKER", "STRETTO_JOIN_S")
    }
    name, port = re.fullmatch(r"tcp://(\w+):(\d+)", environment["STRETTO_BROKER"]).groups()
    (service_port,) = named(resources, "Service")[name]["spec"]["ports"]
    ports = {p["name"]: p["containerPort"] for p in containers(resources)["broker"]["ports"]}
    assert service_port["port"] == ports[service_port["targetPort"]] == int(port)


def test_the_configs_can_be_read_and_the_one_for_cpus_is_that_of_the_containers(tmp_path, with_components):
    configs = {}
    for overlay, resources in with_components.items():
        file = tmp_path / f"{overlay}.yaml"
        file.write_text(named(resources, "ConfigMap")["config"]["data"]["run.yaml"])
        configs[overlay] = load_config(file)
        assert configs[overlay].broker.bind == "tcp://0.0.0.0:5555"
    assert configs["cpu"] == load_config(ROOT / "deploy/compose/run.yaml")
    made = {overlay: containers(r, initial=True) for overlay, r in with_components.items()}
    assert made["cpu"]["model"]["args"] == ["models", "pull", configs["cpu"].model]
    assert made["gpu"]["model"]["command"] == ["hf", "download", configs["gpu"].model]
    learner = made["gpu"]["learner"]
    assert learner["command"][:1] == ["torchrun"] and learner["command"][-2:] == ["-m", "stretto"]
    ranks = configs["gpu"].learner.ranks
    assert f"--nproc-per-node={ranks}" in learner["command"]
    assert int(learner["resources"]["limits"]["nvidia.com/gpu"]) == ranks


def test_who_may_compute_on_a_gpu_has_one(with_components):
    have = {
        name for name, c in containers(with_components["gpu"]).items() if "nvidia.com/gpu" in c["resources"]["limits"]
    }
    assert have == {"learner", "rollout", "reference", "critic", "cost-critic"}
    tags = {o: {c["image"] for c in containers(r, initial=True).values()} for o, r in with_components.items()}
    assert tags == {"cpu": {"stretto:cpu"}, "gpu": {"stretto:cuda"}}
    assert all(re.search(rf"^FROM \S+ AS {t}$", DOCKERFILE, re.MULTILINE) for t in ("cpu", "cuda"))


def test_every_pod_is_restricted_and_stops_in_time(resources):
    uid = int(re.search(r"useradd --uid (\d+)", DOCKERFILE)[1])
    for pod in pods(resources):
        spec = pod["spec"]
        context = spec["securityContext"]
        assert context["runAsNonRoot"] and (context["runAsUser"], context["fsGroup"]) == (uid, uid)
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False
        assert f"{spec['terminationGracePeriodSeconds']}s" == COMPOSE["x-service"]["stop_grace_period"]
    for container in containers(resources, initial=True).values():
        context = container["securityContext"]
        assert context == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert "memory" in container["resources"]["limits"] and "cpu" not in container["resources"]["limits"]


def test_what_ends_with_the_run_is_a_job_that_is_tried_as_often_as_in_compose(resources):
    jobs = named(resources, "Job")
    assert set(jobs) == {"broker", "trainer", "critic", "cost-critic"}
    for job in jobs.values():
        assert COMPOSE["x-service"]["restart"] == f"on-failure:{job['spec']['backoffLimit']}"
        assert job["spec"]["template"]["spec"]["restartPolicy"] == "OnFailure"
        assert job["spec"]["podReplacementPolicy"] == "Failed"


def test_probes_ask_ports_that_are_there_and_metrics_are_where_a_container_shows_them(resources):
    default = named(resources, "ConfigMap")["environment"]["data"]["STRETTO_METRICS"]
    for pod in pods(resources):
        taken = [p["containerPort"] for c in pod["spec"]["containers"] for p in c["ports"]]
        assert len(set(taken)) == len(taken)
        assert int(pod["metadata"]["annotations"]["prometheus.io/port"]) in taken
    for name, container in containers(resources).items():
        ports = {p["name"]: p["containerPort"] for p in container["ports"]}
        environment = {e["name"]: e.get("value") for e in container.get("env", [])}
        shown = environment.get("STRETTO_METRICS") or default
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            how = container[probe].get("httpGet") or container[probe]["tcpSocket"]
            assert how["port"] in ports
            if "path" in how:
                assert f"0.0.0.0:{ports[how['port']]}" == shown
        # /health fails while the broker is away, and everything would be started again.
        assert container["livenessProbe"]["httpGet"]["path"] == "/metrics", name


def test_volumes_are_there_and_mounted_where_the_image_has_a_place_for_them(resources):
    claims, maps = named(built("storage"), "PersistentVolumeClaim"), named(resources, "ConfigMap")
    places = {*re.search(r"mkdir ((?:/\w+ ?)+)", DOCKERFILE)[1].split(), "/dev/shm"} - {"/keys"}
    used = set()
    for pod in pods(resources):
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        inside = [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]
        mounts = [mount for container in inside for mount in container["volumeMounts"]]
        assert {mount["name"] for mount in mounts} == set(volumes)
        assert {mount["mountPath"] for mount in mounts} <= places
        for mount in mounts:
            volume = volumes[mount["name"]]
            if mount["mountPath"] in ("/shm", "/dev/shm"):
                assert volume["emptyDir"]["medium"] == "Memory" and "sizeLimit" in volume["emptyDir"]
            elif mount["mountPath"] == "/config":
                assert volume["configMap"]["name"] in maps
            else:
                used.add(volume["persistentVolumeClaim"]["claimName"])
    assert used == set(claims)
    shared = [c for c, spec in claims.items() if "ReadWriteMany" in spec["spec"]["accessModes"]]
    assert shared == ["models"]
    trainer = {c["name"]: c for c in named(resources, "Job")["trainer"]["spec"]["template"]["spec"]["containers"]}
    assert all({"name": "shm", "mountPath": "/shm"} in c["volumeMounts"] for c in trainer.values())


def test_keys_come_from_secrets_that_a_script_makes_and_only_servers_have_theirs(resources, monkeypatch):
    script = [sys.executable, str(K8S / "keys.py")]
    printed = subprocess.run(script, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    secrets = {secret["metadata"]["name"]: secret["stringData"] for secret in json.loads(printed)["items"]}
    for secret in json.loads(printed)["items"]:
        kubernetes_validate.validate(secret, VERSIONS[-1], strict=True)
    servers = {"broker", "broadcaster", "critic", "cost-critic"}
    for name, container in containers(resources).items():
        wanted = {e["secretRef"]["name"] for e in container["envFrom"] if "secretRef" in e}
        assert wanted == ({"stretto-client", "stretto-server"} if name in servers else {"stretto-client"})
    for variable in list(os.environ):
        if variable.startswith("STRETTO_"):
            monkeypatch.delenv(variable)
    for variable, value in secrets["stretto-client"].items():
        monkeypatch.setenv(variable, value)
    client = find_keys()
    assert client is not None and client.server_secret is None
    for variable, value in secrets["stretto-server"].items():
        monkeypatch.setenv(variable, value)
    server = find_keys()
    assert public_key(server.server_secret) == client.server_public and client.client_public in server.trusted
    assert not named(resources, "Secret")


def test_selectors_select(resources):
    labels = [pod["metadata"]["labels"] for pod in pods(resources)]
    for name, service in named(resources, "Service").items():
        chosen = [x for x in labels if selects({"matchLabels": service["spec"]["selector"]}, x)]
        assert [x["app.kubernetes.io/component"] for x in chosen] == [name]
    for resource in resources:
        if resource["kind"] in ("Deployment", "PodDisruptionBudget"):
            chosen = [x for x in labels if selects(resource["spec"]["selector"], x)]
            assert [x["app.kubernetes.io/component"] for x in chosen] == [resource["metadata"]["name"]]
        if resource["kind"] == "NetworkPolicy":
            rules = [*resource["spec"].get("ingress", []), *resource["spec"].get("egress", [])]
            peers = [peer for rule in rules for peer in (*rule.get("from", []), *rule.get("to", []))]
            for selector in [resource["spec"]["podSelector"], *(p["podSelector"] for p in peers if "podSelector" in p)]:
                assert any(selects(selector, x) for x in labels), resource["metadata"]["name"]
    (scaler,) = named(resources, "HorizontalPodAutoscaler").values()
    scaled = named(resources, "Deployment")[scaler["spec"]["scaleTargetRef"]["name"]]
    assert "replicas" not in scaled["spec"]


def lets(policies: list[dict], source: str, target: str, port: int) -> bool:
    """Whether the policies let a connection through. A component's name, or an IPv4 address of elsewhere."""
    run = {"app.kubernetes.io/part-of": "stretto"}
    ends = {x: None if x[0].isdigit() else run | {"app.kubernetes.io/component": x} for x in (source, target)}

    def matches(rule: dict, way: str, other: str) -> bool:
        for peer in rule.get(way, [{"podSelector": {}}, {"ipBlock": {"cidr": "0.0.0.0/0"}}]):
            labels = ends[other]
            if "podSelector" in peer and labels is not None and selects(peer["podSelector"], labels):
                break
            if "ipBlock" in peer and labels is None:
                address = ipaddress.ip_address(other)
                out = [ipaddress.ip_network(block) for block in peer["ipBlock"].get("except", [])]
                if address in ipaddress.ip_network(peer["ipBlock"]["cidr"]) and not any(address in o for o in out):
                    break
        else:
            return False
        tcp = [p for p in rule.get("ports", [{"port": 0, "endPort": 65535}]) if p.get("protocol", "TCP") == "TCP"]
        return any(p["port"] <= port <= p.get("endPort", p["port"]) for p in tcp)

    for kind, way, own, other in (("Ingress", "from", target, source), ("Egress", "to", source, target)):
        if ends[own] is not None:
            mine = [p["spec"] for p in policies if kind in p["spec"]["policyTypes"]]
            mine = [spec for spec in mine if selects(spec["podSelector"], ends[own])]
            if mine and not any(matches(rule, way, other) for spec in mine for rule in spec.get(kind.lower(), [])):
                return False
    return True


def test_policies_let_through_what_a_run_needs_and_nothing_else(resources):
    policies = list(named(resources, "NetworkPolicy").values())
    members = ("trainer", "rollout", "reward", "cost", "reference", "critic", "cost-critic")
    elsewhere, metadata = "203.0.113.9", "169.254.169.254"
    for port in (CHOSEN[0], CHOSEN[-1]):
        assert all(lets(policies, member, "broker", p) for member in members for p in (5555, port))
        assert lets(policies, "rollout", "trainer", port) and lets(policies, "rollout", "rollout", port)
        assert lets(policies, "trainer", "critic", port) and lets(policies, "trainer", "cost-critic", port)
        for source, target in (("reward", "trainer"), ("reward", "rollout"), ("rollout", "critic"), ("cost", "reward")):
            assert not lets(policies, source, target, port)
    assert not lets(policies, elsewhere, "broker", 5555) and not lets(policies, "rollout", "broker", 22)
    out = {name for name in ("broker", *members) if lets(policies, name, elsewhere, 443)}
    assert out == {"broker", "reward", "cost"}
    assert not any(lets(policies, name, metadata, 443) for name in ("broker", *members))


def test_without_the_component_for_broadcasts_rollouts_are_not_connected_to():
    policies = list(named(built("overlays/cpu"), "NetworkPolicy").values())
    assert not lets(policies, "trainer", "rollout", CHOSEN[0]) and not lets(policies, "rollout", "rollout", CHOSEN[0])
