"""Options that describe a run and a cluster, shared by several commands, and the values that they give."""

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_stack.accelerator.visible_devices import CUDA, HIP, ROCR
from rlhf_stack.cli.option_types import (
    gibibytes,
    host_gibibytes,
    machine_cpus,
    machine_gpus,
    node_count,
    path,
    refuse_without_effect,
)
from rlhf_stack.cluster.connect import connected
from rlhf_stack.compat.deepspeed_ops import CPU_ADAM, FUSED_ADAM, missing_for
from rlhf_stack.config import env_vars
from rlhf_stack.errors import UserError
from rlhf_stack.inputs.text import shortened
from rlhf_stack.memory import Shape, ShapeError, parse_shape, read_shape
from rlhf_stack.openrlhf import command_line, requirements, run_spec
from rlhf_stack.openrlhf.run_spec import Run
from rlhf_stack.openrlhf.trainer_command import installed_trainer, run_variables, trainer_command
from rlhf_stack.planning import cluster_spec
from rlhf_stack.planning.cluster_spec import Machine

CONFIG = "config.json"
UNNAMED = {"None", ""}  # what a parser returns for a model that is not given
GPUS_PER_NODE = 8


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe the machines: numbers, a file, or a running Ray cluster."""
    parser.add_argument("--nodes", type=node_count, metavar="N", help="number of identical machines")
    parser.add_argument("--gpus", type=machine_gpus, metavar="N", help="GPUs per machine (8)")
    parser.add_argument(
        "--gpu-memory", type=gibibytes, metavar="GIB", help="memory per GPU, in GiB or as 80GB"
    )
    parser.add_argument("--cpus", type=machine_cpus, metavar="N", help="CPUs per machine (enough)")
    parser.add_argument(
        "--memory", type=host_gibibytes, metavar="GIB", help="host memory per machine, in GiB or as 2TB"
    )
    parser.add_argument(
        "--cluster", type=path, metavar="FILE", help="a YAML file of machines, instead of the above"
    )
    parser.add_argument(
        "--ray", metavar="ADDRESS", help="use the machines of a running Ray cluster: auto, or its address"
    )


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe the run and its models."""
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME=SIZES",
        help="config.json or sizes of a model that is not on this machine; repeatable",
    )
    add_command_option(parser)


def add_command_option(parser: argparse.ArgumentParser) -> None:
    """Add the command line of the run, which must come last."""
    parser.add_argument(
        "command_line", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the command that starts the run"
    )


def command_words(options: argparse.Namespace) -> list[str]:
    """Return the command line of the run, without the leading ``--``; `UserError` if it is none."""
    command = list(options.command_line)
    if command[:1] == ["--"]:
        command = command[1:]
    if not command or not command[0].strip():
        raise UserError("no command line of a run: put it last, after --")
    if len(command) == 1 and len(command[0].split()) > 1:
        raise UserError(f"the command line {shortened(command[0], 60)!r} is one word: leave out its quotes")
    return command


def variables_of_run(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """NAME=VALUE of ``env`` in the command of a run, for all its processes; and names that Ray would set."""
    found = run_variables(words)
    unused = [name for name in (CUDA, HIP, ROCR) if any(text.startswith(f"{name}=") for text in found)]
    return [text for text in found if text.partition("=")[0] not in unused], unused


@contextmanager
def environment_of_run(words: Sequence[str]) -> Iterator[dict[str, str]]:
    """Set the variables of the run that ``words`` start, as `submit` does for its job, inside the context.

    The context's value are these variables. `UserError` if one of this distribution is invalid.
    """
    before = dict(os.environ)
    variables = dict(text.split("=", 1) for text in variables_of_run(words)[0])
    os.environ |= variables
    try:
        env_vars.check()
        yield variables
    finally:
        os.environ.clear()
        os.environ.update(before)


def parse_run(
    options: argparse.Namespace, machines: Sequence[Machine] | None = None
) -> tuple[Run, Sequence[str]]:
    """Parse the run with OpenRLHF's parser; return it with the parser's messages.

    SFT, DPO and RM use the GPUs that their launcher names, otherwise all of ``machines``; without machines
    they are a `UserError`, because they run neither on Ray nor with engines.
    """
    words = command_words(options)
    trainer = trainer_command(words)
    if trainer is None:
        parsed = command_line.parse(command_line.extract_arguments(words))
        run = run_spec.run_of(parsed.release, parsed.values)
    elif machines is None:
        raise UserError(f"{trainer.program} has no engines: there is no weight sync to check")
    else:
        parsed = command_line.parse(trainer.arguments, trainer.program)
        gpus = trainer.gpus or min((machine.gpus for machine in machines), default=0)
        nodes = trainer.nodes or len(machines)
        run = run_spec.trainer_run(parsed.release, trainer.program, parsed.values, nodes, gpus)
    _refuse_missing(parsed.values)
    can_offload, has_fused_adam = not missing_for(CPU_ADAM), not missing_for(FUSED_ADAM)
    return replace(run, can_offload=can_offload, has_fused_adam=has_fused_adam), parsed.notes


def check_trainer(words: Sequence[str], working_dir: str | None) -> Sequence[str]:
    """Check the arguments of the installed OpenRLHF's SFT, DPO or RM; return its parser's messages.

    `UserError` if OpenRLHF rejects them, or if they need what is not installed. Another program has none,
    such as that of a fork in the ``working_dir`` of the job.
    """
    found = installed_trainer(words, working_dir, command_line.installed_file)
    if found is None:
        return ()
    program, arguments = found
    parsed = command_line.parse(arguments, program)
    _refuse_missing(parsed.values)
    return parsed.notes


def _refuse_missing(values: Any) -> None:
    """`UserError` if the parsed arguments need what is not in this image."""
    requirements.refuse_missing_packages(values)
    requirements.refuse_missing_operators(values)
    requirements.refuse_missing_attention(values)


def read_machines(options: argparse.Namespace) -> list[Machine]:
    """Return the machines that the options describe; `UserError` unless exactly one option describes them."""
    ways = [options.nodes is not None, options.cluster is not None, options.ray is not None]
    if sum(ways) != 1:
        raise UserError("describe the machines by exactly one of --nodes N, --cluster FILE and --ray ADDRESS")
    if options.cluster is not None:
        refuse_without_effect(options, ("gpus", "gpu_memory", "cpus", "memory"), "with --cluster")
    if options.ray is not None:
        refuse_without_effect(options, ("gpus", "cpus", "memory"), "with --ray")
    if options.cluster:
        return cluster_spec.read_machines(options.cluster)
    if options.ray is not None:
        return ray_machines(options.ray, options.gpu_memory or 0.0)
    gpus = GPUS_PER_NODE if options.gpus is None else options.gpus
    sizes = (options.gpu_memory or 0.0, options.cpus or 0.0, options.memory or 0.0)
    return cluster_spec.uniform_machines(options.nodes, gpus, *sizes)


def ray_machines(address: str, gpu_memory: float, variables: Mapping[str, str] = os.environ) -> list[Machine]:
    """Return the machines of the Ray cluster at ``address``; `UserError` if it does not respond.

    See `cluster_spec.ray_machines`.
    """
    with connected(address):
        return cluster_spec.ray_machines(gpu_memory, variables)


def read_shapes(run: Run, options: argparse.Namespace) -> dict[str, Shape]:
    """Return the shape of each model of ``run`` by its name."""
    typed: dict[str, Shape] = {}
    for name, shape in map(_typed, options.model):
        if typed.setdefault(name, shape) is not shape:
            raise UserError(f"--model {shortened(name)} is given twice")
    names = dict.fromkeys([run.engine_model, *(role.model for role in run.roles)])
    if names.keys() & UNNAMED:
        raise UserError(
            "the run names no model: give its model_name_or_path (before OpenRLHF 0.9: --pretrain)"
        )
    if unknown := typed.keys() - names.keys():
        known = ", ".join(map(repr, names))
        raise UserError(f"--model {', '.join(map(repr, unknown))}: the run has the models {known}")
    return {name: typed.get(name) or _read(name) for name in names}


def write_file(path: Path, text: str) -> None:
    """Write ``text`` to a file that the user named; `UserError` if that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None


def _typed(text: str) -> tuple[str, Shape]:
    name, equals, value = text.partition("=")
    if not name or not equals or not value.strip():
        raise UserError(f"--model {shortened(text)}: expected NAME=config.json or NAME=layers:28,hidden:...")
    if "/" in value or value.endswith(".json") or _exists(value):
        return name, read_shape(Path(value))
    return name, parse_shape(value)


def _exists(name: str) -> bool:
    """Whether there is a file or folder of that name, which may be too long or invalid for one."""
    try:
        return Path(name).exists()
    except (OSError, ValueError):
        return False


def _read(name: str) -> Shape:
    """Read the shape of the model ``name``, which is a folder or a model in the Hugging Face cache."""
    if _exists(name):
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
        f"{shortened(name)} is neither a local folder nor in the Hugging Face cache: give its config.json "
        f"with --model {shortened(name)}=CONFIG.JSON, or its sizes with --model "
        f"{shortened(name)}=layers:28,hidden:3584,intermediate:18944,heads:28,kv_heads:4,vocabulary:152064"
    )
