"""The run config: one YAML file, checked before anything starts. Services get it from the broker.

Sizes have one vocabulary: a step trains `prompts_per_step` groups of `samples_per_prompt` samples, in micro-batches of
at most `learner.tokens_per_micro_batch` tokens.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from shared.errors import ConfigError

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0)]
Dtype = Literal["float32", "bfloat16", "float16"]


NAME = r"^[a-z][a-z0-9_]*$"
RESERVED = ("broker", "broadcaster", "rollout", "reward", "cost", "reference", "critic", "cost_critic", "learner")
"""Names of services, which no stage of a run's own may have."""


class Section(BaseModel):
    """A part of the config; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Data(Section):
    """Where prompts come from."""

    train: str = Field(
        description="JSONL or Parquet file, or path of a Hugging Face dataset, with the training prompts"
    )
    heldout: str | None = Field(None, description="the same for the prompts of evaluations")
    split: str = Field("train", description="split to read, where the path is a Hugging Face dataset")
    heldout_split: str = Field("test", description="the same for `heldout`")
    prompt_field: str = Field("prompt", description="field with the prompt: text, or a list of chat messages")
    system: str | None = Field(None, description="system message put before each prompt")
    chat: bool = Field(True, description="apply the model's chat template; false: the prompt is plain text")
    shuffle: bool = Field(True, description="shuffle each epoch, by `seed` and the epoch's number")


class Sampling(Section):
    """How samples are drawn."""

    temperature: float = Field(1.0, ge=0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="keep the most likely tokens up to this share of probability")
    top_k: int = Field(0, ge=0, description="keep this many most likely tokens; 0 keeps all")
    max_tokens: Positive = Field(512, description="most new tokens a sample")
    stop: tuple[str, ...] = Field((), description="strings that end a sample; they are left out of its text")
    ignore_eos: bool = Field(False, description="go on to max_tokens whatever is sampled (for benchmarks)")


class Algorithm(Section):
    """Name of a preset and its settings."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = Field("grpo", description="preset, or package.module:Class, or path/to/file.py:Class")


class Vllm(Section):
    """The vLLM engine; it also follows dtype, max_samples and max_context."""

    tensor_parallel: Positive = Field(1, description="GPUs (on a CPU: processes) that each layer is split over")
    pipeline_parallel: Positive = Field(1, description="GPUs (on a CPU: processes) that the layers are shared out over")
    data_parallel: Positive = Field(1, description="copies of the model that one rollout process feeds")
    gpu_memory_utilization: float | None = Field(
        None, gt=0, le=1, description="share of each GPU's memory to use; default: vLLM's own"
    )
    cache_gib: float | None = Field(
        None, gt=0, description="memory of keys and values; default: what the GPU has left, on a CPU 1 GiB"
    )
    enforce_eager: bool | None = Field(None, description="neither compile nor capture graphs; default: on a CPU only")
    stage: bool = Field(
        True, description="on a CPU, load new weights beside the old ones before the pause: a second copy in memory"
    )
    args: dict[str, Any] = Field(default_factory=dict, description="more arguments for vLLM's AsyncEngineArgs")


class Rollout(Section):
    """The service that generates."""

    replicas: int = Field(1, ge=0, description="processes on this host; 0: all of them join from others")
    engine: Literal["embedded", "vllm"] = Field(
        "embedded", description="inference engine: our own on a CPU, or vLLM (pip install 'stretto[vllm]')"
    )
    dtype: Dtype = Field("bfloat16", description="dtype of the weights that generate, and of the snapshots")
    max_samples: Positive = Field(64, description="samples decoded at once")
    max_context: int | None = Field(
        None, gt=0, description="most tokens of prompt and sample; default: the model's own"
    )
    vllm: Vllm = Field(default_factory=Vllm)


class Signal(Section):
    """One signal: what a function or a reward model says of each sample."""

    name: str = Field(pattern=NAME, description="name of its columns and metrics")
    function: str | None = Field(None, description="built-in name, package.module:function or path/to/file.py:function")
    model: str | None = Field(
        None, description="in place of a function: Hugging Face folder or name of a sequence classifier"
    )
    server: str | None = Field(
        None, description="in place of a function: tcp://host:port of a `stretto.reward` server, or an http(s):// URL"
    )
    weight: float = Field(1.0, description="its weight in the reward")
    clip: tuple[float, float] | None = Field(None, description="lowest and highest value, before its weight")
    normalize: bool = Field(
        False, description="(value − mean) / std over the valid samples of a step, before its weight"
    )
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments for the function")
    backend: Literal["hf", "vllm"] = Field("hf", description="what runs the model: transformers, or vLLM")
    dtype: Literal["float32", "bfloat16", "float16", "int8"] = Field(
        "float32", description="dtype of the model; int8: of its weights alone, by torchao, only with hf"
    )
    label: int = Field(0, ge=0, description="index of the logit that is the value, as it is: without a sigmoid")
    batch_size: Positive = Field(32, description="most samples that the model or server is given at once")
    format: Literal["stretto", "openrlhf"] = Field("stretto", description="JSON that an HTTP server speaks")
    auth_env: str | None = Field(None, description="environment variable with the bearer token of an HTTP server")
    concurrency: Positive = Field(8, description="requests to the server at once")

    @field_validator("server")
    @classmethod
    def _server_is_an_address(cls, server: str | None) -> str | None:
        if server is not None and not re.fullmatch(r"tcp://[^/@\s]+:\d{1,5}|https?://[^/@\s]+(/\S*)?", server):
            raise ValueError("server is tcp://host:port or http(s)://host/path, without a user or password")
        if server is not None:
            urlsplit(server).port  # noqa: B018  raises ValueError where it is none
        return server

    @field_validator("clip")
    @classmethod
    def _clip_rises(cls, clip: tuple[float, float] | None) -> tuple[float, float] | None:
        if clip is not None and not clip[0] < clip[1]:
            raise ValueError(f"clip is [low, high], but {clip[0]:g} is not below {clip[1]:g}")
        return clip

    @model_validator(mode="after")
    def _function_or_model(self) -> Self:
        kinds = [kind for kind in ("function", "model", "server") if getattr(self, kind) is not None]
        if len(kinds) != 1:
            has = " and ".join(kinds) or "none"
            raise ValueError(f"the signal {self.name} needs a function, a model or a server, and has {has}")
        meant = {
            "function": ("args",),
            "model": ("backend", "dtype", "label", "batch_size"),
            "server": ("batch_size", "format", "auth_env", "concurrency"),
        }
        for key in dict.fromkeys(key for keys in meant.values() for key in keys):
            is_set = getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True)
            if is_set and key not in meant[kinds[0]]:
                raise ValueError(f"the signal {self.name} has a {kinds[0]}, for which {key} means nothing")
        if self.server is not None and self.server.startswith("tcp:") and (self.auth_env or self.format != "stretto"):
            raise ValueError(f"the signal {self.name} has a ZeroMQ server: format and auth_env are for HTTP")
        if self.backend == "vllm" and self.dtype == "int8":
            raise ValueError(f"the signal {self.name} is int8 with the backend vllm: only hf makes weights int8")
        return self


class Reward(Section):
    """The service that scores."""

    replicas: Positive = Field(1, description="processes")
    signals: tuple[Signal, ...] = Field(min_length=1, description="the signals whose weighted sum is the score")
    workers: Positive = Field(1, description="processes of each replica that run synchronous functions")
    timeout_s: Seconds = Field(30.0, description="time one function or model may take for one sample")
    attempts: Positive = Field(2, description="how often a sample is scored before its score is invalid")

    @field_validator("signals")
    @classmethod
    def _names_differ(cls, signals: tuple[Signal, ...]) -> tuple[Signal, ...]:
        names = [signal.name for signal in signals]
        if len(set(names)) < len(names):
            raise ValueError(f"two signals have one name: {', '.join(names)}")
        return signals


class OwnStage(Reward):
    """A stage of the run's own: it scores samples as the reward does, and may leave some out. See docs/rewards.md."""

    name: str = Field(pattern=NAME, description="of the stage, and of the argument with its score for later ones")
    after: tuple[str, ...] = Field((), description="stages before it: `reward`, `cost`, or own ones that stand before")
    at_least: float | None = Field(
        None, description="samples of a lower score are left out: no later stage scores them, and they train nothing"
    )


class Training(Section):
    """How a model is trained."""

    backend: Literal["hf"] = Field("hf", description="what computes: transformers in one process")
    dtype: Dtype = Field("bfloat16", description="dtype of forward and backward; the master weights are float32")
    tokens_per_micro_batch: Positive = Field(8192, description="most tokens of a forward and backward pass")
    halve_on_oom: bool = Field(True, description="try a micro-batch that does not fit into memory in halves, once")
    lr: float = Field(1e-6, gt=0, description="learning rate at its highest")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="after the warm-up, down to 0")
    warmup_steps: int = Field(0, ge=0, description="steps over which the learning rate rises from 0")
    betas: tuple[Share, Share] = Field((0.9, 0.95), description="AdamW")
    eps: float = Field(1e-8, gt=0, description="AdamW")
    weight_decay: float = Field(0.0, ge=0, description="AdamW")
    clip_norm: float | None = Field(1.0, gt=0, description="gradient norm to clip to; null: none")
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass")
    updates: Positive = Field(1, description="optimizer steps that a version is made of, each of a part of its groups")


class LoRA(Section):
    """An adapter that is trained in place of the policy's own weights."""

    rank: Positive = Field(16, description="rank of the adapter's matrices")
    alpha: Positive = Field(32, description="the adapter's share is multiplied by alpha / rank")
    target_modules: Literal["all-linear"] | tuple[str, ...] = Field(
        "all-linear", description="names of the linear layers that have one, as of peft; all-linear: all but the head"
    )


class Learner(Training):
    """The service that trains the policy."""

    lora: LoRA | None = Field(
        None, description="train an adapter alone (pip install 'stretto[lora]'); its weights are float32"
    )

    ranks: Positive = Field(1, description="processes that share the policy (FSDP2), started by torchrun on this host")
    copies: Positive = Field(
        1, description="copies of the policy that the ranks hold; each is shared by ranks / copies of them (HSDP)"
    )
    sync_once: bool = Field(
        False,
        description="with ranks: sum the gradients over them once an optimizer step and not in each micro-batch; every "
        "rank needs memory for the gradient of the whole policy then",
    )
    drift_warn: float | None = Field(
        None,
        gt=0,
        description="nats by which the log-probs of engine and learner may differ, on average over samples of the "
        "learner's own version, before the run warns; default by dtype",
    )
    drift_stop: float | None = Field(
        None,
        gt=0,
        description="the same, before the run ends; default: it never does",
    )

    @model_validator(mode="after")
    def _copies_fit(self) -> Self:
        if self.ranks % self.copies:
            raise ValueError(f"{self.ranks} ranks cannot hold {self.copies} copies of equal size")
        return self


class Reference(Section):
    """The service with the frozen policy that the KL is measured to; started where an algorithm measures it."""

    replicas: Positive = Field(1, description="processes")
    model: str | None = Field(None, description="Hugging Face folder or name; default: the run's model")
    backend: Literal["hf"] = Field("hf", description="what computes: transformers in one process")
    dtype: Dtype = Field("bfloat16", description="dtype of its weights")
    tokens_per_micro_batch: Positive = Field(8192, description="most tokens of a forward pass")
    halve_on_oom: bool = Field(True, description="try a micro-batch that does not fit into memory in halves, once")


class Critic(Training):
    """The service that values states and learns to; started where an algorithm has a critic."""

    model: str | None = Field(
        None, description="Hugging Face folder or name of its backbone, or of a reward model; default: the run's model"
    )
    lr: float = Field(1e-5, gt=0, description="learning rate at its highest")
    clip_value: float | None = Field(0.2, gt=0, description="how far from the old value a new one counts; null: any")


class Evaluation(Section):
    """Greedy answers to held-out prompts, scored by the same signals."""

    every: Positive = Field(20, description="versions between evaluations; version 0 and the last are always evaluated")
    prompts: Positive = Field(64, description="how many held-out prompts, the first ones of the file")
    metric: str | None = Field(None, description="signal whose mean is called the accuracy; default: the first")
    sampling: Sampling | None = Field(None, description="default: that of the training, greedy")


class Checkpoint(Section):
    """Model, optimizer, schedule, RNG and version."""

    every: Positive = Field(50, description="versions between checkpoints; the last version is always saved")
    keep_last: Positive = Field(2, description="how many to keep, any of which the run can go on from")
    keep_every: int | None = Field(None, gt=0, description="keep those of each so many versions for good")


class Weights(Section):
    """How new weights reach the rollouts."""

    transport: Literal["auto", "shm", "gloo", "nccl", "stream"] = Field(
        "auto",
        description="shm: the learner's shared memory; gloo, nccl: broadcast to all rollouts at once, unencrypted; "
        "stream: to each over ZeroMQ; auto: shm on the learner's host, elsewhere stream with keys and gloo without",
    )
    slots: int = Field(3, ge=3, le=64, description="snapshots in shared memory")
    deltas: bool = Field(True, description="send only what changed, where that is smaller; not with shm")
    progress_s: Seconds = Field(10.0, description="time without a byte or a sign of a rollout that ends a broadcast")
    bucket_mib: Positive = Field(16, description="unit of the checksums")
    probe_tokens: int = Field(16, ge=8, description="length of the sequence that proves the weights after each swap")
    tolerance: float | None = Field(
        None,
        gt=0,
        description="largest mean log-prob difference over that sequence, and six times it for one token; default: by "
        "dtype, 1e-4 in float32, 0.12 in bfloat16, 0.015 in float16",
    )
    deadline_s: Seconds = Field(60.0, description="time for a rollout to let go of a snapshot two versions old")


class Broker(Section):
    """The queue."""

    bind: str = Field("tcp://127.0.0.1:0", description="address to listen on; port 0 takes a free one")
    advertise: str | None = Field(None, description="address that other hosts use; default: the bound one")
    heartbeat_s: Seconds = Field(2.0, description="time between heartbeats; three missed ones lose the leases")
    lease_s: Seconds = Field(60.0, description="time without a heartbeat after which a group is given to another")
    max_attempts: Positive = Field(3, description="leases of a group that may fail at one stage")
    dead_letter_limit: Positive = Field(8, description="groups that die in a row before the run stops")
    max_in_flight_groups: Positive = Field(4096, description="groups in the broker's memory")
    journal: Literal["normal", "full", "off"] = Field(
        "normal", description="normal: survives a killed broker; full: a power cut too; off: nothing does"
    )
    patience_s: Seconds = Field(120.0, description="how long services go on without the broker")
    progress_s: Seconds = Field(600.0, description="time without a finished group or step after which the run stops")


class Metrics(Section):
    """Where figures are shown beside the run folder's own files."""

    port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="`stretto train` has the broker answer `/metrics` (Prometheus) and `/health` at this port of "
        "127.0.0.1, and the other services at the ports after it; default: nobody does",
    )
    tensorboard: bool = Field(True, description="write TensorBoard's event files to the run folder")
    wandb: str | None = Field(None, description="project of Weights & Biases to log to (pip install 'stretto[wandb]')")


class RunConfig(Section):
    """A whole run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9._-]+$", description="names the run folder")
    folder: str = Field("runs", description="where run folders are made")
    seed: int = Field(0, description="of data order, sampling and initial state")
    model: str = Field(description="Hugging Face folder or name of the policy")
    tokenizer: str | None = Field(None, description="default: the model's")
    algorithm: Algorithm = Field(default_factory=Algorithm)
    prompts_per_step: Positive = Field(description="groups that one update is made of")
    samples_per_prompt: Positive = Field(description="samples of a group")
    steps: int | None = Field(None, gt=0, description="updates; the run ends at steps or epochs, whichever is first")
    epochs: int | None = Field(None, gt=0, description="passes over the training prompts")
    max_staleness: int = Field(1, ge=0, description="versions that training data may lag; 0 is synchronous")
    on_stale: Literal["train", "drop", "wait"] = Field("train", description="what to do with a group that is staler")
    replace_equal: float | None = Field(
        None,
        ge=0,
        description="groups of equal rewards replaced by others: at most so many prompts_per_step an update; default: "
        "4 for dapo, 0 for others",
    )
    data: Data
    sampling: Sampling = Field(default_factory=Sampling)
    rollout: Rollout = Field(default_factory=Rollout)
    reward: Reward
    cost: Reward | None = Field(None, description="the service that scores costs, for safe_rlhf")
    stages: tuple[OwnStage, ...] = Field(
        (), description="stages of the run's own, before the reward unless they are after it"
    )
    learner: Learner = Field(default_factory=Learner)
    reference: Reference = Field(default_factory=Reference)
    critic: Critic = Field(default_factory=Critic)
    cost_critic: Critic | None = Field(None, description="default: as critic")
    evaluation: Evaluation = Field(default_factory=Evaluation)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    weights: Weights = Field(default_factory=Weights)
    broker: Broker = Field(default_factory=Broker)
    metrics: Metrics = Field(default_factory=Metrics)
    cores: Literal["auto", "shared"] | dict[str, tuple[int, ...]] = Field(
        "auto",
        description="auto: rollouts on half of the cores, yielding to the learner; shared: any; or cores by service",
    )
    gpus: dict[str, tuple[int, ...]] = Field(
        default_factory=dict, description="GPUs by service, shared out among its processes; default: all that are there"
    )

    @field_validator("algorithm", mode="before")
    @classmethod
    def _algorithm_by_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.steps is None and self.epochs is None:
            raise ValueError("steps or epochs must be given, or the run would never end")
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature is 0: greedy samples of one prompt are all equal and teach nothing")
        if self.sampling.top_p < 1 or self.sampling.top_k > 0:
            raise ValueError(
                "sampling.top_p and sampling.top_k cut the distribution that the learner computes whole, which biases "
                "every update: leave them at 1.0 and 0 for training (evaluation.sampling may set them)"
            )
        names = [signal.name for signal in self.reward.signals]
        everything = [signal.name for scoring, _ in self.scoring.values() for signal in scoring.signals]
        if twice := sorted(name for name, count in Counter(everything).items() if count > 1):
            raise ValueError(f"reward, cost or stages share a signal {twice[0]}: give one another name")
        known = ["reward", *(["cost"] if self.cost is not None else [])]
        for stage in self.stages:
            if stage.name in (*known, *RESERVED):
                raise ValueError(f"stages: there is a stage {stage.name} already: give yours another name")
            if unknown := sorted(set(stage.after) - set(known)):
                raise ValueError(
                    f"stages: {stage.name} is after {unknown[0]}, which is no stage before it; there are "
                    f"{', '.join(known)}"
                )
            known.append(stage.name)
        if self.evaluation.metric is not None and self.evaluation.metric not in names:
            raise ValueError(f"evaluation.metric is {self.evaluation.metric!r}; the signals are {', '.join(names)}")
        if self.in_flight_groups > self.broker.max_in_flight_groups:
            raise ValueError(
                f"max_staleness {self.max_staleness} and prompts_per_step {self.prompts_per_step} admit "
                f"{self.in_flight_groups} groups, but broker.max_in_flight_groups is {self.broker.max_in_flight_groups}"
            )
        return self

    @property
    def samples_per_step(self) -> int:
        """Samples that one update is made of."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def in_flight_groups(self) -> int:
        """Most training groups that are admitted and not yet consumed."""
        return (self.max_staleness + 1) * self.prompts_per_step

    @property
    def run_folder(self) -> Path:
        """Where this run keeps its files."""
        return Path(self.folder) / self.name

    @property
    def eval_sampling(self) -> Sampling:
        """Sampling of evaluations."""
        return self.evaluation.sampling or self.sampling.model_copy(update={"temperature": 0.0})

    @property
    def scoring(self) -> dict[str, tuple[Reward, list[str]]]:
        """The stages that score samples by name, each with those whose scores it needs."""
        late = {"reward", "cost"}
        for stage in self.stages:
            if late & set(stage.after):
                late.add(stage.name)
        before = [stage.name for stage in self.stages if stage.name not in late]
        scoring: dict[str, tuple[Reward, list[str]]] = {"reward": (self.reward, before)}
        if self.cost is not None:
            scoring["cost"] = self.cost, before
        return scoring | {stage.name: (stage, list(stage.after)) for stage in self.stages}

    def critic_settings(self, name: str) -> Critic:
        """The settings of the critic of that name."""
        return self.cost_critic or self.critic if name == "cost_critic" else self.critic

    @property
    def eval_metric(self) -> str:
        """The signal whose mean is the accuracy."""
        return self.evaluation.metric or self.reward.signals[0].name


def parse_config(tree: dict[str, Any]) -> RunConfig:
    """The config that a plain tree describes.

    Raises ConfigError with one line a fault: the key, what is wrong, and the keys that are allowed there.
    """
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        faults = error.errors()
        # Where an item of a list is wrong, pydantic also says that the list is too short.
        inner = [f for f in faults if not any(_is_within(other["loc"], f["loc"]) for other in faults)]
        raise ConfigError("the config has errors:\n" + "\n".join(f"  {_fault(f)}" for f in inner)) from None


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """The config in a YAML file, with `key.path=value` overrides (values are YAML).

    Relative paths in it are relative to the working directory. Raises ConfigError.
    """
    tree = read_tree(path)
    for override in overrides or []:
        _override(tree, override)
    return parse_config(tree)


def read_tree(path: str | Path) -> dict[str, Any]:
    """The keys of a YAML file as they are. Raises ConfigError where there is none, or it is not a map."""
    try:
        tree = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config {path} is not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"the config {path} should be a map of keys, but is {type(tree).__name__}")
    return tree


def dump_config(config: RunConfig) -> str:
    """The effective config as YAML, every default written out."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _override(tree: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r} should be key.path=value")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"the value of the override {override!r} is not YAML") from None
    *path, last = key.split(".")
    node: Any = tree
    try:
        for name in path:
            if isinstance(node, dict) and node.get(name) is None:
                node[name] = {}
            node = node[_key_in(node, name)]
        node[_key_in(node, last)] = parsed
    except (TypeError, ValueError, IndexError):
        raise ConfigError(f"override {override!r}: the config has no such place") from None


def _key_in(node: Any, name: str) -> str | int:
    return int(name) if isinstance(node, list) else name


def _is_within(path: tuple[int | str, ...], outer: tuple[int | str, ...]) -> bool:
    return len(path) > len(outer) > 0 and path[: len(outer)] == outer


def _fault(error: Any) -> str:
    """One line for one fault that pydantic found."""
    # Where one of several types may stand, pydantic puts the type it tried into the path.
    path = ".".join(str(part) for part in error["loc"] if not str(part).startswith(("literal[", "dict[")))
    if error["type"] != "extra_forbidden":
        text = error["msg"].removeprefix("Value error, ")
        return f"{path}: {text}" if path else text
    allowed = _keys_at(error["loc"][:-1])
    near = difflib.get_close_matches(str(error["loc"][-1]), allowed, n=1)
    hint = f"did you mean {near[0]}?" if near else f"allowed here: {', '.join(allowed)}"
    return f"{path}: unknown key; {hint}"


def _keys_at(path: tuple[Any, ...]) -> list[str]:
    section: Any = RunConfig
    for name in path:
        if isinstance(name, str) and name in getattr(section, "model_fields", {}):
            annotation = section.model_fields[name].annotation
            candidates = [annotation, *getattr(annotation, "__args__", ())]
            section = next((c for c in candidates if isinstance(c, type) and issubclass(c, Section)), section)
    return list(section.model_fields)
