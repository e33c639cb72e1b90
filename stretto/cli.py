"""The command line. Errors that are meant for the user end as one sentence and a non-zero exit code."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from shared.config import RunConfig, dump_config, load_config
from shared.cores import available_cores, process_environment
from shared.errors import ConfigError, StrettoError
from shared.log import warnings_only
from shared.version import __version__
from stretto.models import MODELS, cache_folder, pull, resolve

SERVICES = ("broadcaster", "rollout", "reward", "cost", "reference", "critic", "cost_critic", "learner")

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
models_app = typer.Typer(no_args_is_help=True, help="Small models by a short name.")
app.add_typer(models_app, name="models")
keys_app = typer.Typer(no_args_is_help=True, help="Keys of the sockets, for networks that you do not trust.")
app.add_typer(keys_app, name="keys")
render_app = typer.Typer(no_args_is_help=True, help="The services of a run for compose and Kubernetes.")
app.add_typer(render_app, name="render")
console = Console()

Config = Annotated[Path, typer.Argument(help="the run's YAML file")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key.path=value, e.g. learner.lr=1e-5")]
RunFolder = Annotated[Path, typer.Argument(help="a run folder")]
Broker = Annotated[str | None, typer.Option(help="address of the broker, e.g. tcp://10.0.0.1:7000")]
Insecure = Annotated[bool, typer.Option(help="listen to other hosts without keys, on a network that you trust")]
LogFile = Annotated[Path | None, typer.Option(help="write the JSON log there instead of to stderr")]


def main() -> None:
    """Entry point of `stretto`."""
    sys.path.insert(0, "")  # reward functions and algorithms may be modules of the working directory
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    warnings_only()
    try:
        app()
    except StrettoError as error:
        if debug:
            raise
        print(f"stretto: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


@app.callback()
def _app() -> None:
    """Asynchronous RL post-training of language models. Add --debug to any command to see tracebacks."""


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    run_folder: Annotated[Path | None, typer.Option(help="default: FOLDER/NAME, or NAME-2 … if taken")] = None,
    resume: Annotated[bool, typer.Option(help="go on with the run where it was")] = False,
    plain: Annotated[bool, typer.Option(help="one line a step, also on a terminal")] = False,
    insecure: Insecure = False,
) -> None:
    """Run all services of a run on this host until it is done."""
    from stretto.check import check_run
    from stretto.train import new_run_folder, resumed_run_folder, train_locally

    _allow(insecure)
    effective = _load(config, overrides)
    check_run(effective)
    folder = (resumed_run_folder if resume else new_run_folder)(effective, run_folder)
    console.print(f"run folder: {folder}", highlight=False, soft_wrap=True)
    plain = plain or not console.is_terminal
    asyncio.run(train_locally(effective, folder, plain=plain, console=console))


@app.command()
def check(config: Config, overrides: Overrides = None) -> None:
    """Check a config without starting anything, and print every value that follows from it."""
    from stretto.check import check_run, derived

    effective = _load(config, overrides)
    facts = check_run(effective)
    for name, value in derived(effective, facts):
        console.print(f"{name:28} {value}", markup=False, highlight=False, soft_wrap=True)
    console.print("the config is fine", style="green")


@app.command()
def status(
    run_folder: Annotated[Path | None, typer.Argument(help="a run folder")] = None,
    broker: Broker = None,
    as_json: Annotated[bool, typer.Option("--json", help="the whole status as JSON")] = False,
) -> None:
    """Show how a run stands: from its broker while it goes, from its folder afterwards."""
    from stretto.live import draw

    found = asyncio.run(_status(run_folder, broker))
    console.print_json(json.dumps(found)) if as_json else console.print(draw(found, []))


@app.command()
def samples(
    run_folder: RunFolder,
    step: Annotated[int | None, typer.Option(help="only of this version")] = None,
    group: Annotated[str | None, typer.Option(help="only this group")] = None,
    lane: Annotated[str, typer.Option(help="train or eval")] = "train",
    last: Annotated[int, typer.Option(help="how many groups, the latest")] = 5,
    best: Annotated[bool, typer.Option("--best", help="those of the highest mean reward instead")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="those of the lowest mean reward instead")] = False,
) -> None:
    """Read prompts, answers, rewards and versions of a run."""
    from stretto.samples import Order, find_groups, show_group

    order: Order = "best" if best else "worst" if worst else "latest"
    for record in find_groups(run_folder, lane=lane, version=step, group=group, count=last, order=order):
        show_group(console, record)


@app.command()
def report(run_folder: RunFolder) -> None:
    """Make the report of a run again: figures and pictures in its folder."""
    from stretto.report import make_report, show_report

    show_report(console, make_report(run_folder))


@app.command()
def replay(
    run_folder: RunFolder,
    from_checkpoint: Annotated[int, typer.Option(help="version of the checkpoint to begin with; 0: the run's model")],
    output: Annotated[Path | None, typer.Option(help="write the figures of each step there, as JSON lines")] = None,
) -> None:
    """Train the learner alone on what a run had trained on, in the same order, on one thread."""
    from stretto.replay import replay

    table = "{:>8} {:>7} {:>12} {:>12} {:>10}  {}"
    console.print(table.format("version", "groups", "loss", "loss then", "grad norm", "weights"), style="bold")
    with output.open("w") if output is not None else contextlib.nullcontext() as file:
        for step in replay(run_folder, from_checkpoint):
            values = (step.metrics["loss"], step.then.get("loss"), step.metrics.get("grad_norm"))
            figures = ["-" if value is None else f"{value:.6g}" for value in values]
            console.print(table.format(step.version, step.groups, *figures, step.weights), highlight=False)
            if file is not None:
                file.write(json.dumps(dataclasses.asdict(step)) + "\n")


@app.command()
def merge(
    checkpoint: Annotated[Path, typer.Argument(help="checkpoint of a run with learner.lora, or any peft folder")],
    folder: Annotated[Path, typer.Argument(help="where the Hugging Face folder is written")],
) -> None:
    """Merge an adapter into the model that it was trained beside."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is there already, and not empty")
    from services.compute.lora import merge as merge_adapter

    merge_adapter(checkpoint, folder)
    console.print(f"merged into {folder}", highlight=False, soft_wrap=True)


@app.command()
def drain(
    run_folder: Annotated[Path | None, typer.Argument(help="folder of a run whose broker runs on this host")] = None,
    broker: Broker = None,
    reason: Annotated[str, typer.Option(help="why, for the run's status")] = "asked to",
) -> None:
    """End a run in order: nothing more is begun, the learner saves, and everything stops."""
    from protocol.messages import Drain, Ok
    from stretto.contact import ask, running_broker

    address = broker or (running_broker(run_folder) if run_folder is not None else os.environ.get("STRETTO_BROKER"))
    if address is None:
        raise ConfigError(
            "drain needs --broker (or STRETTO_BROKER), or the folder of a run whose broker runs on this host"
        )
    asyncio.run(ask(address, Drain(reason=reason), Ok))
    console.print("the run ends once the learner has saved", highlight=False)


@app.command("dead-letters")
def dead_letters(
    run_folder: RunFolder,
    broker: Broker = None,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """Show the groups that failed too often, with every error."""
    from stretto.letters import list_letters, show_letters

    letters = asyncio.run(list_letters(run_folder, broker))
    console.print_json(json.dumps(letters)) if as_json else show_letters(console, letters)


@app.command()
def requeue(
    run_folder: RunFolder,
    groups: Annotated[list[str] | None, typer.Argument(help="ids of dead letters")] = None,
    every: Annotated[bool, typer.Option("--all", help="all dead letters")] = False,
    broker: Broker = None,
) -> None:
    """Have the prompts of dead letters generated again, by a run that goes on or by one that will."""
    from stretto.letters import requeue_letters

    if bool(groups) == every:
        raise ConfigError("requeue needs ids of dead letters (stretto dead-letters shows them), or --all")
    count = asyncio.run(requeue_letters(run_folder, broker, None if every else groups))
    console.print(f"{count} prompts will be drawn again")


@app.command()
def serve(
    service: Annotated[str, typer.Argument(help="broker, or one of " + ", ".join(SERVICES))],
    broker: Broker = None,
    instance: Annotated[str | None, typer.Option(help="name in the run; default: service, host and process id")] = None,
    config: Annotated[Path | None, typer.Option(help="for the broker: the run's YAML file")] = None,
    run_folder: Annotated[Path | None, typer.Option(help="for the broker: default is the config's")] = None,
    log_file: LogFile = None,
    insecure: Insecure = False,
) -> None:
    """Run one service of a run. All but the broker need only the broker's address."""
    from services.process import die_with, run_service

    _allow(insecure)
    name = instance or (service if service == "broker" else f"{service}-{socket.gethostname()}-{os.getpid()}")
    if service == "broker":
        if config is None:
            raise ConfigError("serve broker needs --config: the broker is what knows the run's config")
        work = _broker(_load(config, None), run_folder)
    else:
        address = broker or os.environ.get("STRETTO_BROKER")
        if address is None:
            raise ConfigError(f"serve {service} needs --broker (or STRETTO_BROKER): the broker's address")
        work = _service(service)(address, name)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    for variable, value in process_environment(service, tuple(available_cores()), processes=ranks).items():
        os.environ.setdefault(variable, value)  # torch reads them when it is imported; a launcher has set its own
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        die_with(os.getppid())  # torchrun, which gives each of its processes a session of its own
    if rank > 0:
        name = f"{name}-{rank}"
        log_file = log_file and log_file.with_stem(f"{log_file.stem}-{rank}")
    sys.exit(run_service(service, name, work, log_file))


@app.command()
def settings() -> None:
    """Print every setting with its default and meaning, as Markdown."""
    from stretto.settings import settings_page

    print(settings_page(), end="")


@app.command()
def version() -> None:
    """Print the version."""
    console.print(__version__, highlight=False)


@render_app.command("compose")
def render_compose(config: Config, overrides: Overrides = None) -> None:
    """Print an override of docker-compose.yml: the run's stages, replicas and GPUs."""
    from stretto.render import compose

    print(compose(load_config(config, overrides)), end="")


@render_app.command("k8s")
def render_k8s(
    config: Config,
    folder: Annotated[Path, typer.Argument(help="where the overlay is written")],
    overrides: Overrides = None,
    manifests: Annotated[Path, typer.Option(help="Stretto's own manifests")] = Path("deploy/k8s"),
) -> None:
    """Write a kustomize overlay with the run's config, stages, replicas and GPUs."""
    from stretto.render import kustomize

    for file in kustomize(load_config(config, overrides), folder, manifests):
        console.print(file, highlight=False, soft_wrap=True)
    console.print(f"now: kubectl apply -k {folder}", highlight=False, soft_wrap=True)


@models_app.command("pull")
def models_pull(name: Annotated[str, typer.Argument(help=", ".join(MODELS))]) -> None:
    """Make a model available under its short name."""
    with console.status(f"pulling {name} …"):
        folder = pull(name)
    console.print(f"{name} is in {folder}", highlight=False, soft_wrap=True)


@models_app.command("list")
def models_list() -> None:
    """The models that can be pulled, and which are here."""
    for name in MODELS:
        here = (cache_folder() / name / "config.json").is_file()
        console.print(f"{name:16} {cache_folder() / name if here else 'not pulled'}", highlight=False, soft_wrap=True)


@keys_app.command("new")
def keys_new(
    server_public: Annotated[
        str | None, typer.Option(help="on a host that runs neither broker nor broadcaster: their public key")
    ] = None,
) -> None:
    """Make the keys that this host lacks, and show the public ones."""
    from protocol.keys import keys_folder, new_keys

    keys = new_keys(keys_folder(), server_public=server_public)
    console.print(f"the keys are in {keys_folder()}, readable by you alone", highlight=False, soft_wrap=True)
    console.print(f"server  {keys.server_public}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"client  {keys.client_public}", markup=False, highlight=False, soft_wrap=True)
    if keys.server_secret is None:
        remedy = f"stretto keys trust {socket.gethostname()} '{keys.client_public}'"
        console.print(f"now have the broker's host let this one in:\n  {remedy}", markup=False, soft_wrap=True)


@keys_app.command("trust")
def keys_trust(
    name: Annotated[str, typer.Argument(help="what to call the client, e.g. its host")],
    key: Annotated[str, typer.Argument(help="its public key")],
) -> None:
    """On the broker's host: let in a client with this public key. Takes effect at once."""
    from protocol.keys import keys_folder, trust

    trust(keys_folder(), name, key)
    console.print(f"{name} may connect from now on", highlight=False)


@keys_app.command("list")
def keys_list() -> None:
    """Show the public keys that this process would use, and whom it lets in. Secret keys are never shown."""
    from protocol.keys import find_keys, keys_folder

    keys = find_keys()
    if keys is None:
        console.print(f"no keys in {keys_folder()} or the environment: sockets are open to this host alone")
        return
    table = [("server", keys.server_public), ("client", keys.client_public)]
    table += [(f"trusted: {name}", key) for key, name in keys.trusted.items() if keys.server_secret is not None]
    for what, key in table:
        console.print(f"{what:24} {key or '-'}", markup=False, highlight=False, soft_wrap=True)


def _allow(insecure: bool) -> None:
    """Have this process, and those that it starts, listen to other hosts without keys if they are told to."""
    if insecure:
        os.environ["STRETTO_INSECURE"] = "1"


def _load(path: Path, overrides: list[str] | None) -> RunConfig:
    """The config with the model's short name resolved to its folder."""
    config = load_config(path, overrides)
    return config.model_copy(update={"model": resolve(config.model)})


async def _broker(config: RunConfig, run_folder: Path | None) -> None:
    from services.broker.server import serve as serve_broker

    folder = run_folder or config.run_folder

    def announce(address: str, run_id: str) -> None:
        aside = folder / ".broker.json.partial"
        aside.write_text(json.dumps({"address": address, "pid": os.getpid(), "run_id": run_id}))
        aside.rename(folder / "broker.json")

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump_config(config))
    (folder / "status.json").unlink(missing_ok=True)  # of the run that this one goes on with
    await serve_broker(config, folder, on_bound=announce)


def _service(name: str) -> Any:
    try:
        return _find_service(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"the {name} service needs {error.name}: pip install 'stretto[cpu]'") from None


def _find_service(name: str) -> Any:
    match name:
        case "rollout":
            from services.rollout import service as found
        case "reference":
            from services.reference import service as found  # type: ignore[no-redef]
        case "critic" | "cost_critic":
            from services.critic.service import serve as serve_critic

            return partial(serve_critic, service=name)
        case "learner":
            from services.learner import service as found  # type: ignore[no-redef]
        case "broadcaster":
            from services.broadcaster import service as found  # type: ignore[no-redef]
        case stage:  # the reward, the cost, or one of the run's own, which only its config tells
            from services.reward.service import serve as serve_scores

            return partial(serve_scores, stage=stage)
    return found.serve


async def _status(run_folder: Path | None, broker: str | None) -> dict[str, Any]:
    from protocol.messages import Status, StatusRequest
    from stretto.contact import ask, running_broker

    if broker is None and run_folder is None:
        broker = os.environ.get("STRETTO_BROKER")
    if broker is None:
        if run_folder is None:
            raise ConfigError("status needs a run folder, or --broker (or STRETTO_BROKER) with its address")
        final = run_folder / "status.json"
        if final.is_file():
            found: dict[str, Any] = json.loads(final.read_text())
            return found
        broker = running_broker(run_folder)
        if broker is None:
            raise ConfigError(f"{run_folder} has neither a status nor a broker that runs on this host")
    return (await ask(broker, StatusRequest(), Status)).status
