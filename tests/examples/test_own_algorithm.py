"""The worked algorithm of docs/algorithms.md: one file, and nothing else knows of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from shared.algorithms import PRESETS, load_algorithm
from shared.config import Algorithm

from ..shared.algorithms.test_reference import scored

ROOT = Path(__file__).parents[2]
REFERENCE = "examples/own_algorithm/opo.py:OPO"

VARIANT = """
from shared.algorithms.ppo import PPO


class Slower(PPO):
    slowdown: float = 0.5

    def advantages(self, group):
        found = super().advantages(group)
        return found | {"advantages": self.slowdown * found["advantages"]}
"""


def test_its_baseline_is_weighted_by_length():
    opo = load_algorithm(Algorithm(name=f"{ROOT}/{REFERENCE}"))
    mask = np.ones(4, dtype=bool)
    one = {"lengths": np.array([3, 1]), "mask": mask, "kl": np.zeros(4)}
    found = opo.advantages(scored(np.array([0, 1]), rewards=np.array([1.0, 0.0]), **one))
    np.testing.assert_allclose(found, [0.25, -0.75])
    assert not opo.advantages(scored(np.array([0, 1]), rewards=np.array([0.3, 0.3]), **one)).any()


def test_a_variant_of_a_preset_is_one_file(tmp_path, tiny_model):
    (tmp_path / "slower.py").write_text(VARIANT)
    before = dict(PRESETS)
    command = [sys.executable, "-m", "stretto", "check", "examples/arithmetic/config.yaml", f"model={tiny_model}"]
    settings = [f"algorithm={{name: {tmp_path}/slower.py:Slower, slowdown: 0.1}}", "replace_equal=null"]
    done = subprocess.run([*command, *settings], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "stage critic" in done.stdout and before == PRESETS
