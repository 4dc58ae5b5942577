"""The runs in which faults are injected: arguments, processes and output by generation of OpenRLHF."""

from collections.abc import Sequence
from dataclasses import dataclass

from scripts.matrix.load import Cell

CHECKPOINTS = "/checkpoints"


@dataclass(frozen=True)
class Run:
    """A run of engines and two trainer ranks, each on its own node with one GPU.

    ``layout`` is a layout of the image; ``arguments`` save a checkpoint after every step, from which the same
    command resumes, and make phases long enough to be hit. ``gpus`` is the number of nodes with a GPU;
    ``engine`` and ``trainer`` are prefixes of process command lines, and ``trains`` appears in the output
    when training begins. ``generations`` is the number of generations of a step: OpenRLHF 0.5 has one for
    each rank, which share its prompts.
    """

    layout: str
    arguments: Sequence[str]
    gpus: int
    engine: str
    trainer: str
    trains: str
    generations: int
    keeps_nothing: Sequence[str]  # arguments with which it saves no checkpoint


RUNS = {
    "0.11": Run(
        layout="separate",
        arguments=(
            *("--actor.num_nodes", "2", "--actor.num_gpus_per_node", "1"),
            *("--vllm.num_engines", "2", "--vllm.tensor_parallel_size", "1"),
            *("--ckpt.path", CHECKPOINTS, "--ckpt.save_steps", "1", "--ckpt.load_enable"),
            *("--data.max_len", "240", "--rollout.max_new_tokens", "200", "--train.micro_batch_size", "1"),
        ),
        gpus=4,
        engine="VLLM::EngineCore",
        trainer="ray::PolicyModelActor",
        trains="Sample: [",
        generations=1,
        keeps_nothing=("--ckpt.path", "/tmp/none", "--ckpt.save_steps", "-1"),
    ),
    "0.5": Run(
        layout="spread",
        arguments=(
            *("--ckpt_path", CHECKPOINTS, "--save_steps", "1", "--load_checkpoint"),
            *("--generate_max_len", "200", "--micro_train_batch_size", "1"),
        ),
        gpus=4,  # one for the critic and reward model
        engine="ray::LLMRayActor",
        trainer="ray::ActorModelRayActor",
        trains="Train epoch [1/1]:   0%",
        generations=2,
        keeps_nothing=("--ckpt_path", "/tmp/none", "--save_steps", "-1"),
    ),
}


def run_of(cell: Cell) -> Run:
    """Return the run of the cell's OpenRLHF."""
    return RUNS[cell.versions["openrlhf"].rpartition(".")[0]]
