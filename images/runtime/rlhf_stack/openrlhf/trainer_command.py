"""The program in a command line, and OpenRLHF's trainers without Ray: SFT, DPO and RM.

deepspeed or torchrun starts these.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from rlhf_stack.accelerator import visible_devices
from rlhf_stack.accelerator.visible_devices import CUDA, HIP, ROCR
from rlhf_stack.config import env_vars
from rlhf_stack.errors import UserError
from rlhf_stack.inputs.numbers import GPUS_PER_NODE, NODES, whole
from rlhf_stack.inputs.text import shortened

TRAINERS = ("train_sft", "train_dpo", "train_rm")
PROGRAMS = ("train_ppo_ray", *TRAINERS)
TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
DEEPSPEED = ("deepspeed", "deepspeed.launcher.runner")
LAUNCHERS = (*TORCHRUN, *DEEPSPEED)
UNREAD_LAUNCHERS = ("accelerate", "accelerate.commands.launch", "mpirun", "mpiexec")
READS_MODULES = re.compile(
    rf"(?:python|pypy)[\w.]*|{'|'.join(map(re.escape, (*LAUNCHERS, 'accelerate', 'uv')))}"
)
MODULE_FLAG = re.compile(
    r"(?:-[bBdEiIOPqRsSuvx]*m|--module$)(.*)"
)  # of Python also in one word: -um, -mMODULE
VARIABLE = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)  # of env, whose value may look like a program
MODULE = re.compile(r"[A-Za-z_][\w.]*")
NODE_FLAGS = ("--num_nodes", "--nnodes")
GPU_FLAGS = ("--num_gpus", "--nproc_per_node")
UNREAD_FLAGS = ("--include", "-i", "--exclude", "-e", "--hostfile", "-H")  # of deepspeed: which machines
ALL = ("auto", "gpu")  # of torchrun: every GPU


@dataclass(frozen=True)
class TrainerCommand:
    """A trainer, its arguments, and the nodes and GPUs that it is started on, None for all of them."""

    program: str
    arguments: tuple[str, ...]
    nodes: int | None = None
    gpus: int | None = None


@dataclass(frozen=True)
class Program:
    """A module or a file of Python, with the words of a command line before it and after it."""

    word: str
    launcher: tuple[str, ...]
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        """The last part of the name of the module or of the file."""
        return _name(self.word)


def program_of(words: Sequence[str]) -> Program | None:
    """Return the program that ``words`` start, None without one.

    It is the first module after ``-m`` of Python or of a launcher, or the first file of Python. Other
    commands have another ``-m``, such as numactl, and variables of env may end as a file of Python does, as
    may values of flags of a script. `UserError` if a module of OpenRLHF has the name of its file.
    """
    launcher: list[str] = []
    rest, reads_modules = list(words), False
    while rest:
        word = rest.pop(0)
        if reads_modules and (found := MODULE_FLAG.fullmatch(word)):
            module = found[1] or (rest.pop(0) if rest else "")
            launcher.append(word)
            if module.endswith(".py") and _name(module) in PROGRAMS:
                raise UserError(f"{shortened(module, 60)!r} is a file's name, not a module's: leave .py out")
            if MODULE.fullmatch(module) and module not in (*LAUNCHERS, *UNREAD_LAUNCHERS):
                return Program(module, tuple(launcher), tuple(rest))
            word = module
        elif _is_file(word) and (reads_modules or not _awaits_value(launcher)):
            return Program(word, tuple(launcher), tuple(rest))
        reads_modules = reads_modules or any(map(READS_MODULES.fullmatch, commands_in([word])))
        launcher.append(word)
    return None


def _is_file(word: str) -> bool:
    return word.endswith(".py") and not word.startswith("-") and not VARIABLE.fullmatch(word)


def _awaits_value(words: Sequence[str]) -> bool:
    """Whether ``words`` end with a flag of a shell script, whose value follows."""
    if not words or not words[-1].startswith("--") or "=" in words[-1]:
        return False
    return any(word.endswith(".sh") for word in commands_in(words))


def commands_in(words: Iterable[str]) -> list[str]:
    """Return the names of the files that ``words`` of a launcher name, without variables of env."""
    return [PurePath(word).name for word in words if not VARIABLE.fullmatch(word)]


def trainer_command(words: Sequence[str]) -> TrainerCommand | None:
    """Parse the command line of a trainer; None for another program.

    `UserError` for a wrong number, and for a launcher or a flag of it that is not read.
    """
    found = _trainer(words)
    if found is None:
        return None
    return TrainerCommand(found.name, found.arguments, *_nodes_and_gpus(found.launcher))


def installed_trainer(
    words: Sequence[str], working_dir: str | None, installed: Callable[[str], Path | None]
) -> tuple[str, tuple[str, ...]] | None:
    """Return a trainer of the installed OpenRLHF and its arguments, of any launcher; None for others.

    ``installed`` returns the file of a trainer. A module can be that of a fork if ``working_dir`` is a URI or
    contains ``openrlhf``.
    """
    found, folder = _trainer(words), Path(working_dir or ".")
    if found is None:
        return None
    if found.word.endswith(".py"):
        is_installed = (folder / found.word).resolve() == installed(found.name)
    else:
        has_fork = working_dir and ("://" in working_dir or (folder / "openrlhf").is_dir())
        is_installed = found.word == f"openrlhf.cli.{found.name}" and not has_fork
    return (found.name, found.arguments) if is_installed else None


def run_variables(words: Sequence[str]) -> list[str]:
    """Return the NAME=VALUE of ``env`` before train_ppo_ray; Ray starts its actors without them."""
    found = program_of(words)
    if found is None or found.name != PROGRAMS[0]:
        return []
    return [word for word in found.launcher if VARIABLE.fullmatch(word)]


def unread_program(words: Sequence[str]) -> str | None:
    """Return the program of OpenRLHF that ``words`` name where no program is read, None without one."""
    found = program_of(words)
    if found and found.name in PROGRAMS:
        return None
    parts = [part for word in words for part in word.split()]
    if found:  # another program, whose arguments may be words such as train_sft
        parts = [part for part in parts if "." in part]
    named = map(_name, parts)
    return next((name for name in named if name in PROGRAMS), None)


def _trainer(words: Sequence[str]) -> Program | None:
    """The trainer that ``words`` start, None if they start another program."""
    found = program_of(words)
    return found if found and found.name in TRAINERS else None


def _name(program: str) -> str:
    """The last part of the name of a module or of a file of Python."""
    return program.removesuffix(".py").replace("/", ".").split(".")[-1]


def _nodes_and_gpus(launcher: Sequence[str]) -> tuple[int | None, int | None]:
    """The nodes and GPUs that the words before a program take, None for all of them.

    DeepSpeed uses ``CUDA_VISIBLE_DEVICES`` on one node, and ignores it if a number of nodes or GPUs is given.
    """
    names = commands_in(launcher)
    if unread := [name for name in names if name in UNREAD_LAUNCHERS]:
        raise UserError(
            f"{unread[0]} is a launcher that is not read: put deepspeed or torchrun in its place, with the "
            "numbers of nodes and GPUs"
        )
    is_deepspeed = any(name in DEEPSPEED for name in names)
    flags = [_flag(word) for word in launcher] if is_deepspeed else []
    if unread := [flag for flag in flags if flag in UNREAD_FLAGS]:
        raise UserError(
            f"{unread[0]} of deepspeed is not read: give --num_nodes and --num_gpus instead, and describe "
            "the machines by --nodes and --gpus of this command"
        )
    # Of torchrun, and of Python alone, the default is one process; of deepspeed, all GPUs.
    default = None if is_deepspeed else 1
    nodes = _number(launcher, NODE_FLAGS, NODES, default)
    gpus = _number(launcher, GPU_FLAGS, GPUS_PER_NODE, default)
    ignored = (CUDA,) if is_deepspeed and (gpus or (nodes or 1) > 1) else ()
    given = dict(word.split("=", 1) for word in launcher if VARIABLE.fullmatch(word))
    variables = {name: given[name] for name in (CUDA, HIP, ROCR) if name in given and name not in ignored}
    visible = _visible(variables)
    if visible == GPUS_PER_NODE or (gpus and gpus <= visible):
        return nodes, gpus
    if gpus or not visible:
        shown = " ".join(f"{name}={value}" for name, value in variables.items())
        raise UserError(f"{shortened(shown, 80)} shows {visible} GPUs, and {gpus or 'all'} are used")
    return nodes or 1, visible


def _visible(variables: Mapping[str, str]) -> int:
    """How many GPUs of the largest node processes with ``variables`` see."""
    is_rocm = env_vars.accelerator() != "cuda" and not variables.keys().isdisjoint((HIP, ROCR))
    return len(visible_devices.visible_gpus(variables, "rocm" if is_rocm else "cuda", GPUS_PER_NODE))


def _number(launcher: Sequence[str], flags: Sequence[str], most: int, default: int | None) -> int | None:
    """The value of the last of ``flags`` in the words of a launcher, None for all."""
    found = default
    for index, word in enumerate(launcher):
        _, equals, value = word.partition("=")
        if (name := _flag(word)) in flags:
            value = value if equals else (list(launcher[index + 1 : index + 2]) or [""])[0]
            if value in ALL:
                found = None
                continue
            try:
                found = whole(value.rpartition(":")[2], 1, most)  # MIN:MAX of an elastic launch
            except UserError as error:
                raise UserError(f"{name} {error}") from None
    return found


def _flag(word: str) -> str:
    """The name of a flag, which torchrun accepts with either of - and _."""
    name = word.partition("=")[0]
    return f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name
