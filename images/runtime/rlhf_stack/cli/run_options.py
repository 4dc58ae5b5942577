"""What commands ask about a run and a cluster, and how they read the answers."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rlhf_stack.cli import option_types
from rlhf_stack.cluster.connect import connected
from rlhf_stack.errors import UserError
from rlhf_stack.memory import Shape, ShapeError, read_shape, typed_shape
from rlhf_stack.openrlhf import command_line, run_spec
from rlhf_stack.openrlhf.run_spec import Run
from rlhf_stack.planning import cluster_spec as of_cluster
from rlhf_stack.planning.cluster_spec import Machine

CONFIG = "config.json"


def cluster_options(parser: argparse.ArgumentParser) -> None:
    """The machines: typed, in a file, or those of a running cluster."""
    parser.add_argument("--nodes", type=option_types.count, metavar="N", help="how many machines, all alike")
    parser.add_argument("--gpus", type=option_types.whole, default=8, metavar="N", help="GPUs of each (8)")
    parser.add_argument(
        "--gpu-memory", type=option_types.amount, default=0.0, metavar="GIB", help="memory of each GPU"
    )
    parser.add_argument(
        "--cpus", type=option_types.amount, default=0.0, metavar="N", help="CPUs of each (enough)"
    )
    parser.add_argument(
        "--memory", type=option_types.amount, default=0.0, metavar="GIB", help="memory of each host"
    )
    parser.add_argument(
        "--cluster", type=Path, metavar="FILE", help="machines in YAML, in place of the above"
    )
    parser.add_argument("--ray", metavar="ADDRESS", help="machines of a running Ray cluster: auto, or where")


def run_options(parser: argparse.ArgumentParser) -> None:
    """The run and its models."""
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME=SIZES",
        help="the config.json or the sizes of a model that is not on this machine; can be repeated",
    )
    command_option(parser)


def command_option(parser: argparse.ArgumentParser) -> None:
    """The command line of the run, which comes last."""
    parser.add_argument(
        "command_line", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the run, as you would start it"
    )


def command_of(options: argparse.Namespace) -> list[str]:
    """The command line of the run, without the ``--`` before it; a `UserError` if there is none."""
    command = list(options.command_line)
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        raise UserError("no run to plan: put its command line last, after --")
    return command


def asked_run(options: argparse.Namespace) -> tuple[Run, Sequence[str]]:
    """The run, and what OpenRLHF's parser said about it."""
    parsed = command_line.parse(command_line.arguments_in(command_of(options)))
    return run_spec.run_of(parsed.release, parsed.values), parsed.notes


def machines(options: argparse.Namespace) -> list[Machine]:
    """The machines that were asked for."""
    ways = [options.nodes is not None, options.cluster is not None, options.ray is not None]
    if sum(ways) != 1:
        raise UserError("say what the machines are by one of --nodes N, --cluster FILE and --ray ADDRESS")
    if options.cluster:
        return of_cluster.read(options.cluster)
    if options.ray:
        return of_ray(options.ray, options.gpu_memory)
    return of_cluster.alike(options.nodes, options.gpus, options.gpu_memory, options.cpus, options.memory)


def of_ray(address: str, gpu_memory: float) -> list[Machine]:
    """The machines of the Ray cluster at ``address``; `UserError` if none answers."""
    with connected(address):
        return of_cluster.running(gpu_memory)


def shapes(run: Run, options: argparse.Namespace) -> dict[str, Shape]:
    """The shape of each model of ``run`` by its name."""
    typed = dict(_typed(text) for text in options.model)
    names = dict.fromkeys([run.engine_model, *(role.model for role in run.roles)])
    if unknown := typed.keys() - names.keys():
        raise UserError(f"--model {', '.join(unknown)}: the run has {', '.join(names)}")
    return {name: typed.get(name) or _read(name) for name in names}


def write(path: Path, text: str) -> None:
    """Write a file that the user asked for."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None


def _typed(text: str) -> tuple[str, Shape]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"--model {text}: expected NAME=config.json or NAME=layers:28,hidden:...")
    return name, read_shape(Path(value)) if Path(value).exists() else typed_shape(value)


def _read(name: str) -> Shape:
    """The shape of the model ``name``: a folder, or what the hub's cache has of it."""
    if name in ("None", ""):
        raise UserError(
            "the run names no model: give its model_name_or_path (before OpenRLHF 0.9: --pretrain)"
        )
    if Path(name).exists():
        return read_shape(Path(name))
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, CONFIG)
    except HFValidationError:
        cached = None
    if isinstance(cached, str):
        return read_shape(Path(cached))
    raise ShapeError(
        f"{name} is no folder here, and the hub's cache has nothing of it: --model {name}=CONFIG.JSON says "
        "where its config.json is, or --model "
        f"{name}=layers:28,hidden:3584,intermediate:18944,heads:28,kv_heads:4,vocabulary:152064 its sizes"
    )
