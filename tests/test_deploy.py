"""The files under deploy/ and the compose file name what there is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from shared.config import load_config
from stretto.cli import SERVICES

ROOT = Path(__file__).parents[1]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
LOOKING_ON = {name for name, service in COMPOSE["services"].items() if service.get("profiles") == ["metrics"]}
RUN = {name: service for name, service in COMPOSE["services"].items() if name not in LOOKING_ON}
DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboards/stretto.json").read_text())
GPU = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text())
STAGES = re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "deploy/docker/Dockerfile").read_text(), re.MULTILINE)


def test_every_service_can_be_started_and_each_that_there_is_has_one():
    commands = {name: service["command"].split() for name, service in RUN.items() if name != "keys"}
    for name, (serve, service, *arguments) in commands.items():
        assert (serve, service) == ("serve", name) and name in (*SERVICES, "broker")
        assert "--broker" not in arguments  # from the environment, so that they all have one
    assert set(commands) == {*SERVICES, "broker"}


def test_services_of_some_algorithms_come_with_a_profile_of_their_name():
    profiles = {name: service.get("profiles") for name, service in RUN.items()}
    some = ("cost", "reference", "critic", "cost_critic")
    assert {name: found for name, found in profiles.items() if found} == {name: [name] for name in some}


@pytest.mark.parametrize("name", RUN)
def test_a_service_stops_in_time_and_holds_no_secret(name):
    service = RUN[name]
    assert service["restart"] in ("no", "on-failure:10") and service["stop_grace_period"] == "60s"
    assert not [key for key in service["environment"] if "SECRET" in key]
    assert "keys:/keys" in service["volumes"]


def test_only_one_of_each_that_has_a_state_is_told_apart_by_its_name():
    fixed = {name for name, service in RUN.items() if "--instance" in service["command"]}
    assert fixed == {"broadcaster", "learner", "critic", "cost_critic"}


def test_every_service_that_may_compute_on_a_gpu_has_one_reserved():
    assert set(GPU["services"]) == {*SERVICES} - {"broadcaster"}
    for service in GPU["services"].values():
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]


def test_the_images_have_their_targets_and_run_as_nobody_special():
    assert {"core", "cpu", "cuda"} <= set(STAGES)
    text = (ROOT / "deploy/docker/Dockerfile").read_text()
    assert text.count("USER stretto") == 3
    assert "HEALTHCHECK" in text


def test_the_config_that_comes_with_the_compose_file_is_one():
    config = load_config(ROOT / "deploy/compose/run.yaml")
    assert config.broker.bind == "tcp://0.0.0.0:5555"


def test_prometheus_and_grafana_look_on_when_they_are_asked_to_and_only_this_host_sees_them():
    assert sorted(LOOKING_ON) == ["grafana", "prometheus"]
    for name in LOOKING_ON:
        service = COMPOSE["services"][name]
        assert [port.split(":")[0] for port in service["ports"]] == ["127.0.0.1"]
        folders = [volume.split(":")[0] for volume in service["volumes"]]
        assert all((ROOT / folder).is_dir() for folder in folders if folder.startswith("."))
        assert {folder for folder in folders if not folder.startswith(".")} <= set(COMPOSE["volumes"])


def test_prometheus_finds_every_service_where_the_images_have_it_listen():
    (job,) = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    assert set(found["names"]) == {*SERVICES, "broker"} and job["honor_labels"] is True
    assert f"STRETTO_METRICS=0.0.0.0:{found['port']} " in (ROOT / "deploy/docker/Dockerfile").read_text()


def test_grafana_is_given_its_datasource_and_dashboard():
    provisioning = ROOT / "deploy/grafana/provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"]
    (variable,) = DASHBOARD["templating"]["list"]
    assert (source["url"], source["uid"]) == ("http://prometheus:9090", variable["current"]["value"])
    (provider,) = yaml.safe_load((provisioning / "dashboards/stretto.yml").read_text())["providers"]
    volumes = COMPOSE["services"]["grafana"]["volumes"]
    assert f"./deploy/grafana/dashboards:{provider['options']['path']}:ro" in volumes


@pytest.mark.parametrize("panel", DASHBOARD["panels"], ids=lambda panel: panel["title"])
def test_the_dashboard_shows_metrics_that_there_are(panel, documented_metrics):
    assert panel["targets"]
    for target in panel["targets"]:
        names = re.findall(r"\bstretto_\w+", target["expr"])
        assert names and set(names) <= set(documented_metrics)
        counters = {name for name in names if name.endswith("_total")}
        assert not counters or re.search(r"(rate|increase)\(", target["expr"])  # what only grows says nothing by itself


@pytest.mark.parametrize(("code", "exit_code"), [(200, 0), (503, 1)])
def test_the_health_check_of_the_images_asks_the_service(code, exit_code):
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(code if self.path == "/health" else 404)
            self.end_headers()
            self.wfile.write(b"said\n")

        def log_message(self, *args):
            pass

    assert "stretto-health.py" in (ROOT / "deploy/docker/Dockerfile").read_text()
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        there = os.environ | {"STRETTO_METRICS": f"0.0.0.0:{server.server_port}"}
        script = [sys.executable, "deploy/docker/health.py"]
        done = subprocess.run(script, cwd=ROOT, env=there, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (exit_code, "said\n")


def test_what_an_image_installs_before_the_project_is_what_the_project_needs():
    script = [sys.executable, "deploy/docker/requirements.py", "cpu", "lora"]
    printed = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert {"pyzmq>=27", "torch==2.13.0"} <= set(printed)
    pinned = dict(line.split("==") for line in (ROOT / "deploy/docker/constraints.txt").read_text().splitlines())
    names = {re.split(r"[<>=]", line)[0].lower() for line in printed} - {"torch"}
    assert names <= {name.lower() for name in pinned}


def test_a_broker_that_is_served_alone_is_asked_at_its_address_and_leaves_a_folder_that_other_commands_read(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    tree = {
        "model": str(tmp_path),
        "prompts_per_step": 1,
        "samples_per_prompt": 2,
        "steps": 1,
        "data": {"train": str(tmp_path / "train.jsonl")},
        "reward": {"signals": [{"name": "exact", "function": "exact_match"}]},
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tree))
    run = tmp_path / "run"
    run.mkdir()
    (run / "status.json").write_text("{}")
    stretto = [sys.executable, "-m", "stretto"]
    arguments = ["serve", "broker", "--config", str(tmp_path / "mine.yaml"), "--run-folder", str(run)]
    with subprocess.Popen([*stretto, *arguments], cwd=ROOT, stderr=subprocess.DEVNULL) as broker:
        try:
            end = time.monotonic() + 60
            while not (run / "broker.json").exists() and time.monotonic() < end and broker.poll() is None:
                time.sleep(0.05)
            assert not (run / "status.json").exists()  # it was that of the run before
            there = os.environ | {"STRETTO_BROKER": json.loads((run / "broker.json").read_text())["address"]}
            for command in (["status", "--json"], ["drain", "--reason", "enough"]):
                subprocess.run([*stretto, *command], cwd=ROOT, env=there, check=True, capture_output=True)
            assert broker.wait(30) == 0
        finally:
            broker.kill()
    assert load_config(run / "config.yaml") == load_config(tmp_path / "mine.yaml")
    assert json.loads((run / "status.json").read_text())["stop_reason"] == "enough"


@pytest.mark.parametrize(
    ("ranks", "arguments", "program"),
    [
        ("1", "serve learner", "stretto serve learner"),
        ("2", "serve learner", "torchrun --standalone --nproc-per-node=2 -m stretto serve learner"),
        ("2", "status", "stretto status"),
    ],
)
def test_the_entrypoint_starts_as_many_ranks_as_it_is_told(tmp_path, ranks, arguments, program):
    for name in ("stretto", "torchrun"):
        (tmp_path / name).write_text('#!/bin/sh\necho "${0##*/}" "$@"\n')
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "STRETTO_RANKS": ranks}
    done = subprocess.run(
        ["sh", ROOT / "deploy/docker/entrypoint.sh", *arguments.split()],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == program
