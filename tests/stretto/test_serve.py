"""`stretto serve`: a service that nothing launches but a container, or a person."""

from __future__ import annotations

import os

import pytest
from typer.testing import CliRunner

from services import process
from shared.cores import available_cores
from stretto.cli import app


@pytest.mark.parametrize(("service", "threads"), [("learner", str(len(available_cores()))), ("broadcaster", "1")])
def test_its_threads_sleep_while_they_wait_and_are_no_more_than_its_cores(monkeypatch, service, threads):
    """Threads that spin take the cores from the services beside theirs."""
    seen = {}
    monkeypatch.setattr(process, "run_service", lambda *_: seen.update(os.environ) or 0)
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], "MKL_NUM_THREADS": "7"})
    CliRunner().invoke(app, ["serve", service, "--broker", "tcp://127.0.0.1:1"], catch_exceptions=False)
    assert seen["OMP_WAIT_POLICY"] == "passive" and seen["GOMP_SPINCOUNT"] == "0"
    assert seen["OMP_NUM_THREADS"] == threads
    assert seen["MKL_NUM_THREADS"] == "7"
