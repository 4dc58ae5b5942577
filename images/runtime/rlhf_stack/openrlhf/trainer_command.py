"""The command lines of OpenRLHF's trainers without Ray: SFT, DPO and RM, started by deepspeed or torchrun."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_stack.errors import UserError
from rlhf_stack.inputs.numbers import GPUS_PER_NODE, NODES, whole

TRAINERS = ("train_sft", "train_dpo", "train_rm")
LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "deepspeed", "deepspeed.launcher.runner")
NODE_FLAGS = ("--num_nodes", "--nnodes")
GPU_FLAGS = ("--num_gpus", "--nproc_per_node")
ALL = ("auto", "gpu")  # of torchrun: every GPU


@dataclass(frozen=True)
class TrainerCommand:
    """A trainer, its arguments, and what its launcher says of nodes and GPUs, None for all of them."""

    program: str
    arguments: tuple[str, ...]
    nodes: int | None = None
    gpus: int | None = None


def trainer_command(words: Sequence[str]) -> TrainerCommand | None:
    """Parse the command line of a trainer; None for another program. `UserError` for a wrong number."""
    for index, word in enumerate(words):
        is_module = index > 0 and words[index - 1] in ("-m", "--module")
        if (is_module and word not in LAUNCHERS) or word.endswith(".py"):
            name = word.removesuffix(".py").replace("/", ".").split(".")[-1]
            if name not in TRAINERS:
                return None
            launcher = words[:index]
            return TrainerCommand(
                name,
                tuple(words[index + 1 :]),
                _number(launcher, NODE_FLAGS, NODES),
                _number(launcher, GPU_FLAGS, GPUS_PER_NODE),
            )
    return None


def _number(launcher: Sequence[str], flags: Sequence[str], most: int) -> int | None:
    """The value of the last of ``flags`` in the words of a launcher, None without one."""
    found = None
    for index, word in enumerate(launcher):
        name, equals, value = word.partition("=")
        if name.replace("-", "_").replace("__", "--", 1) in flags:
            value = value if equals else (list(launcher[index + 1 : index + 2]) or [""])[0]
            if value in ALL:
                found = None
                continue
            try:
                found = whole(value.rpartition(":")[2], 1, most)  # MIN:MAX of an elastic launch
            except UserError as error:
                raise UserError(f"{name} {error}") from None
    return found
