"""The trainers without Ray: their command lines, and the runs that they request."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rlhf_stack.errors import UserError
from rlhf_stack.memory import parse_shape
from rlhf_stack.openrlhf.run_spec import trainer_run
from rlhf_stack.openrlhf.trainer_command import TrainerCommand, installed_trainer, trainer_command
from rlhf_stack.planning import advise, assess, uniform_machines

SHAPES = {"m": parse_shape("layers:28,hidden:3584,intermediate:18944,heads:28,kv_heads:4,vocabulary:152064")}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("deepspeed --module openrlhf.cli.train_sft --x 1", TrainerCommand("train_sft", ("--x", "1"))),
        ("deepspeed --num_gpus 4 --num_nodes=2 train_dpo.py", TrainerCommand("train_dpo", (), 2, 4)),
        (
            "torchrun --nproc-per-node 8 --nnodes 1:3 -m openrlhf.cli.train_rm",
            TrainerCommand("train_rm", (), 3, 8),
        ),
        ("torchrun --nproc_per_node gpu -m openrlhf.cli.train_rm", TrainerCommand("train_rm", (), 1, None)),
        ("torchrun -m openrlhf.cli.train_sft", TrainerCommand("train_sft", (), 1, 1)),
        ("/usr/bin/torchrun --nproc_per_node=8 train_sft.py", TrainerCommand("train_sft", (), 1, 8)),
        ("python -m torch.distributed.run -m openrlhf.cli.train_sft", TrainerCommand("train_sft", (), 1, 1)),
        ("python -m openrlhf.cli.train_sft --x 1", TrainerCommand("train_sft", ("--x", "1"), 1, 1)),
        ("python train_dpo.py", TrainerCommand("train_dpo", (), 1, 1)),
        ("python -mopenrlhf.cli.train_sft --x 1", TrainerCommand("train_sft", ("--x", "1"), 1, 1)),
        ("python -mdeepspeed.launcher.runner --module train_sft", TrainerCommand("train_sft", ())),
        ("env CFG=/a/b.py deepspeed train_rm.py", TrainerCommand("train_rm", ())),
        ("numactl -m 0 torchrun -m openrlhf.cli.train_rm", TrainerCommand("train_rm", (), 1, 1)),
        (
            "env UV_CACHE_DIR=/a/uv PYTHONPATH=/a/accelerate numactl -m 0 python -m openrlhf.cli.train_rm",
            TrainerCommand("train_rm", (), 1, 1),
        ),
        ("uv run numactl -m 0 python -m openrlhf.cli.train_rm", TrainerCommand("train_rm", (), 1, 1)),
        ("env CUDA_VISIBLE_DEVICES=0,1 deepspeed train_sft.py", TrainerCommand("train_sft", (), 1, 2)),
        ("CUDA_VISIBLE_DEVICES=2 deepspeed --module train_sft", TrainerCommand("train_sft", (), 1, 1)),
        ("env HIP_VISIBLE_DEVICES=0,1 deepspeed train_sft.py", TrainerCommand("train_sft", (), 1, 2)),
        ("env ROCR_VISIBLE_DEVICES=0,1,3 deepspeed train_sft.py", TrainerCommand("train_sft", (), 1, 3)),
        (
            "env ROCR_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node gpu train_sft.py",
            TrainerCommand("train_sft", (), 1, 2),
        ),
        (
            "env CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 2 train_sft.py",
            TrainerCommand("train_sft", (), 1, 2),
        ),
        # DeepSpeed ignores the variable then.
        (
            "env CUDA_VISIBLE_DEVICES=0,1 deepspeed --num_gpus 4 train_sft.py",
            TrainerCommand("train_sft", (), None, 4),
        ),
        (
            "env CUDA_VISIBLE_DEVICES=0,1 deepspeed --num_nodes 2 train_sft.py",
            TrainerCommand("train_sft", (), 2, None),
        ),
        ("deepspeed train_sft.py --include x", TrainerCommand("train_sft", ("--include", "x"))),
        ("python -m openrlhf.cli.train_ppo_ray --path train_sft.py", None),
        ("ls train_sft", None),
    ],
)
def test_command_lines_of_launchers(words: str, expected: TrainerCommand | None) -> None:
    assert trainer_command(words.split()) == expected


@pytest.mark.parametrize(
    ("launcher", "named"),
    [
        ("deepspeed --include localhost:0,1 --module", "--include of deepspeed"),
        ("deepspeed -i localhost:0,1 --module", "-i of deepspeed"),
        ("deepspeed --exclude=worker-1 --module", "--exclude of deepspeed"),
        ("deepspeed --hostfile hosts --module", "--hostfile of deepspeed"),
        ("python -m deepspeed.launcher.runner -H hosts --module", "-H of deepspeed"),
        ("accelerate launch --num_processes 4 -m", "accelerate is a launcher"),
        ("python -m accelerate.commands.launch --num_processes 4 -m", "accelerate.commands.launch is a"),
        ("/usr/bin/mpirun -n 4 python -m", "mpirun is a launcher"),
    ],
)
def test_what_would_choose_other_gpus_is_refused(launcher: str, named: str) -> None:
    """All GPUs were planned."""
    with pytest.raises(UserError, match=f"^{named}.* not read"):
        trainer_command([*launcher.split(), "openrlhf.cli.train_sft"])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 4 train_sft.py", "0,1 shows 2 GPUs, and 4 are"),
        ("CUDA_VISIBLE_DEVICES= deepspeed train_sft.py", "CUDA_VISIBLE_DEVICES= shows 0 GPUs, and all are"),
        ("HIP_VISIBLE_DEVICES=0 deepspeed --num_gpus 2 train_sft.py", "=0 shows 1 GPUs, and 2 are used"),
    ],
)
def test_more_gpus_than_the_variables_show_are_refused(words: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        trainer_command(["env", *words.split()])


@pytest.mark.parametrize("value", ["0", "x", "", "100001", "-1", "1.5"])
def test_a_wrong_number_of_a_launcher_is_an_error(value: str) -> None:
    with pytest.raises(UserError, match=r"--nnodes .*: expected a whole number"):
        trainer_command(["torchrun", f"--nnodes={value}", "-m", "openrlhf.cli.train_sft"])


@pytest.mark.parametrize(
    ("words", "program"),
    [
        ("deepspeed --module openrlhf.cli.train_sft --x 1", "train_sft"),
        ("torchrun --nproc_per_node 8 -m openrlhf.cli.train_rm --x 1", "train_rm"),
        ("accelerate launch -m openrlhf.cli.train_dpo --x 1", "train_dpo"),
        ("deepspeed --include localhost:0 openrlhf/cli/train_sft.py --x 1", "train_sft"),
        ("python /src/openrlhf/cli/train_dpo.py --x 1", "train_dpo"),
        ("python train_dpo.py --x 1", None),
        ("python -m mine.train_sft --x 1", None),
        ("python -m openrlhf.cli.train_ppo_ray --path openrlhf/cli/train_sft.py", None),
        ("python -m openrlhf.cli.serve_rm --x 1", None),
        ("ls train_sft", None),
    ],
)
def test_a_trainer_of_openrlhf_is_known_with_every_launcher(words: str, program: str | None) -> None:
    """A file of the same name elsewhere is somebody's own program."""
    found = installed_trainer(words.split(), "/src", installed)
    assert found == (program and (program, ("--x", "1")))


def installed(program: str) -> Path:
    return Path(f"/src/openrlhf/cli/{program}.py")


def test_a_file_of_openrlhf_is_known_from_its_own_folder() -> None:
    words = ["python", "train_rm.py"]
    assert installed_trainer(words, "/src/openrlhf/cli", installed) == ("train_rm", ())


@pytest.mark.parametrize("program", ["openrlhf/cli/train_sft.py", "-m openrlhf.cli.train_sft"])
@pytest.mark.parametrize("has_fork", [True, False])
def test_a_trainer_of_a_fork_is_not_that_of_the_installed_openrlhf(
    program: str, has_fork: bool, tmp_path: Path
) -> None:
    (tmp_path / ("openrlhf" if has_fork else "src")).mkdir()
    words = ["python", *program.split()]
    expected = None if has_fork or "-m" not in words else ("train_sft", ())
    assert installed_trainer(words, str(tmp_path), installed) == expected
    assert installed_trainer(words, "s3://bucket/code.zip", installed) is None


def sections(**model: Any) -> SimpleNamespace:
    """Arguments of a trainer of OpenRLHF 0.11."""
    ds = {"zero_stage": 2, "attn_implementation": "sdpa", "lora": SimpleNamespace(rank=0)}
    own = {"model_name_or_path": "m", "gradient_checkpointing_enable": True}
    return SimpleNamespace(
        model=SimpleNamespace(**own | model),
        ref=SimpleNamespace(model_name_or_path=None, offload=False),
        ds=SimpleNamespace(**ds),
        data=SimpleNamespace(max_len=4096),
        train=SimpleNamespace(micro_batch_size=2, batch_size=128),
    )


def test_each_trainer_has_its_roles_on_all_gpus() -> None:
    machines = uniform_machines(2, 8, 80, 0, 2000)
    peaks = {}
    for program, roles in {
        "train_sft": ["actor"],
        "train_dpo": ["actor", "ref"],
        "train_rm": ["reward"],
    }.items():
        run = trainer_run("0.11.2", program, sections(), 2, 8)
        found = assess(run, machines, SHAPES)
        assert [role.name for role in run.roles] == roles
        assert all(gpu.holds for node in found.nodes for gpu in node.gpus)
        assert not any("engines" in note or "wait" in note for note in found.notes)
        peaks[program] = found.nodes[0].gpus[0].peak
    # A pair has two sequences; DPO has the weights of a reference, RM no logits.
    assert peaks["train_rm"] < peaks["train_sft"] < peaks["train_dpo"]
    assert trainer_run("0.11.2", "train_dpo", sections(), 2, 8).pairs == 2


def test_muon_is_refused_at_stage_3_for_trainers_too() -> None:
    values = sections()
    values.optim = "muon"
    assert trainer_run("0.11.2", "train_sft", values, 2, 8).muon
    values.ds.zero_stage = 3
    with pytest.raises(UserError, match="DeepSpeed refuses Muon"):
        trainer_run("0.11.2", "train_sft", values, 2, 8)


@pytest.mark.parametrize(("batch", "refused"), [(128, False), (96, False), (127, True), (16, True)])
def test_a_batch_that_deepspeed_refuses_is_a_problem(batch: int, refused: bool) -> None:
    values = sections()
    values.train.batch_size = batch  # 16 ranks with a micro batch of 2
    found = assess(
        trainer_run("0.11.2", "train_rm", values, 2, 8), uniform_machines(2, 8, 80, 0, 2000), SHAPES
    )
    assert any("must be a multiple of 32" in problem for problem in found.problems) == refused


def test_advice_has_the_flags_of_the_trainer() -> None:
    machines = uniform_machines(1, 8, 40, 0, 2000)
    run = trainer_run("0.11.2", "train_sft", sections(gradient_checkpointing_enable=False), 1, 8)
    flags = {
        text.split()[0]
        for one in advise(assess(run, machines, SHAPES), machines, SHAPES)
        for text in one.flags
    }
    assert "--model.gradient_checkpointing_enable" in flags
    assert not any(text.startswith(("--actor", "--rollout", "--vllm")) for text in flags)
