"""Finding an algorithm by its name, and its settings."""

from __future__ import annotations

import pytest

from shared.algorithms import load_algorithm
from shared.algorithms.grpo import GRPO
from shared.config import Algorithm as AlgorithmConfig
from shared.config import parse_config
from shared.errors import ConfigError

OWN = """
from shared.algorithms import Algorithm

class Mine(Algorithm):
    scale: float = 2.0

    def advantages(self, group):
        return self.scale * (group.rewards - group.rewards.max())

    def loss(self, batch):
        return -batch.advantages * batch.logprobs, {}
"""


def test_a_preset_takes_settings():
    assert load_algorithm(AlgorithmConfig(name="grpo", clip_high=0.28)) == GRPO(clip_high=0.28)


def test_an_own_algorithm_is_loaded_from_its_file(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    algorithm = load_algorithm(AlgorithmConfig(name=f"{tmp_path}/mine.py:Mine", scale=3.0))
    assert algorithm.scale == 3.0


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"name": "grop"}, "'grop' is neither a preset .grpo"),
        ({"name": "os.path:join"}, "neither a preset"),
        ({"name": "grpo", "clip": 0.2}, "algorithm.clip: .* has the settings aggregation, .*, clip_low, clip_high"),
        ({"name": "grpo", "clip_low": -1}, "algorithm.clip_low: .*greater than 0"),
    ],
)
def test_a_wrong_name_or_setting_says_what_is_allowed(settings, text):
    with pytest.raises(ConfigError, match=text):
        load_algorithm(AlgorithmConfig(**settings))


def test_one_sample_a_prompt_is_refused_where_samples_are_compared():
    config = parse_config(
        {
            "model": "m",
            "steps": 1,
            "prompts_per_step": 1,
            "samples_per_prompt": 1,
            "data": {"train": "t"},
            "reward": {"signals": [{"name": "s", "function": "exact_match"}]},
        }
    )
    with pytest.raises(ConfigError, match="samples_per_prompt must be at least 2, not 1"):
        GRPO().check(config)
