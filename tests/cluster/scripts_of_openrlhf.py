"""The commands of OpenRLHF's published scripts, and the same for a model that trains on two cores."""

import json
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from rlhf_stack.demo import digit_reward_model, tiny_model, tiny_run

PUBLISHED = Path(__file__).with_name("published")
HERE = Path(__file__).parent
PPO = "openrlhf.cli.train_ppo_ray"
REWARD_MODEL = "openrlhf.cli.train_rm"
FOLDER = "{folder}"
PROMPTS, SAMPLES, LENGTH, RESPONSE, STEPS = 4, 4, 96, 16, 2
PAIRS = 52  # of a step of a reward model: it evaluates on 1 % of all pairs, of which it needs one
FILTERED = 6  # times the prompts that dynamic filtering keeps
ROLE_GPUS = re.compile(r"--(actor|ref|critic|reward)[._]num_gpus_per_node")
# Removed: a key of a service that this machine cannot reach, a number of episodes, and what `plan` refuses.
RING = ("--ds.ring_attn_size", "--ds.ring_attn_head_stride")
REMOVED = ("--logger.wandb.key", "--use_wandb", "--train.num_episodes", *RING)
# Sizes, and the files that the script reads and writes: replaced where it has the flag.
SMALL: Mapping[str, str] = {
    "--actor.model_name_or_path": f"{FOLDER}/model",
    "--reward.model_name_or_path": f"{FOLDER}/model",
    "--model.model_name_or_path": f"{FOLDER}/model",
    "--data.prompt_dataset": f"{FOLDER}/prompts.jsonl",
    "--data.dataset": f"{FOLDER}/pairs.jsonl",
    "--eval.dataset": f"{FOLDER}/prompts.jsonl",
    "--reward.remote_url": str(HERE / "reward_of_parity.py"),
    "--train.agent_func_path": str(HERE / "agent_of_two_turns.py"),
    "--logger.tensorboard_dir": f"{FOLDER}/runs",
    "--ckpt.output_dir": f"{FOLDER}/trained",
    "--ckpt.path": f"{FOLDER}/checkpoints",
    "--data.max_len": str(LENGTH),
    "--rollout.batch_size": str(PROMPTS),
    "--rollout.micro_batch_size": "2",
    "--rollout.max_new_tokens": str(RESPONSE),
    "--rollout.max_tokens_per_gpu": "512",
    "--train.micro_batch_size": "2",
    "--train.max_tokens_per_gpu": "512",
    "--vllm.gpu_memory_utilization": "0.1",
}
# The same for OpenRLHF 0.5, whose flags have no sections; its engine on a CPU has one rank.
SMALL_FLAT: Mapping[str, str] = {
    "--pretrain": f"{FOLDER}/model",
    "--reward_pretrain": f"{FOLDER}/reward",
    "--prompt_data": f"{FOLDER}/prompts.jsonl",
    "--save_path": f"{FOLDER}/trained",
    "--ckpt_path": f"{FOLDER}/checkpoints",
    "--prompt_max_len": str(LENGTH - RESPONSE),
    "--generate_max_len": str(RESPONSE),
    "--rollout_batch_size": str(PROMPTS),
    "--micro_rollout_batch_size": "2",
    "--train_batch_size": str(PROMPTS),
    "--micro_train_batch_size": "2",
    "--max_samples": str(PROMPTS * STEPS),
    "--vllm_num_engines": "1",
    "--vllm_tensor_parallel_size": "1",
}
CHAT = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True)
class Command:
    """A command of a script.

    ``flags`` are as published. ``renamed`` are those that the installed release has under other names: what
    to write instead, by the flags to remove. With the new names, ``unsupported`` is the reason why `plan`
    refuses the command, ``too_large`` why it does not fit on two nodes of eight GPUs of 80 GiB, and
    ``untested`` why no tiny run was made.
    """

    name: str
    launcher: str
    module: str
    flags: str
    renamed: Mapping[str, str]
    unsupported: str = ""
    too_large: str = ""
    untested: str = ""

    @property
    def words(self) -> list[str]:
        """The arguments as published."""
        return shlex.split(self.flags)

    def corrected(self) -> "Command":
        """The command with the names of the installed release."""
        flags = self.flags.replace("\n", " ")
        for old, new in self.renamed.items():
            assert f"{old} " in f"{flags} ", f"{self.name} has no {old}"
            flags = flags.replace(old, new)
        return replace(self, flags=flags, renamed={})


def published() -> list[Command]:
    """The commands for the installed release of OpenRLHF."""
    file = PUBLISHED / f"openrlhf-{version('openrlhf').partition('+')[0]}.toml"
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    return [Command(**({"renamed": {}} | entry)) for entry in data["command"]]


def small(command: Command) -> list[str]:
    """The arguments with the sizes and files of a tiny run; `FOLDER` stands for the folder of the files."""
    flags = dict(_flags(command.words))
    changes = {name: [value] for name, value in {**SMALL, **SMALL_FLAT}.items() if name in flags}
    changes |= {name: [_gpus(values[0])] for name, values in flags.items() if ROLE_GPUS.fullmatch(name)}
    if "--pretrain" not in flags:  # OpenRLHF 0.11: these sizes depend on other flags
        changes |= _sizes(command.module, flags, changes)
    merged = {name: values for name, values in (flags | changes).items() if name not in REMOVED}
    return [word for name, values in merged.items() for word in (name, *values)]


def _sizes(
    module: str, flags: Mapping[str, list[str]], changes: Mapping[str, list[str]]
) -> dict[str, list[str]]:
    """Batches, engines and the sync backend of a command with the published ``flags`` and ``changes``."""
    if module != PPO:
        batch = PAIRS if module == REWARD_MODEL else PROMPTS
        return {"--train.batch_size": [str(batch)], "--data.max_samples": [str(batch * STEPS)]}
    samples = min(SAMPLES, int((flags.get("--rollout.n_samples_per_prompt") or ["1"])[0]))
    size = int(flags["--vllm.tensor_parallel_size"][0])
    colocated = "--train.colocate_all" in flags and "--train.async_enable" not in flags
    engines = int(changes["--actor.num_gpus_per_node"][0]) // size if colocated else 1
    filtered = "--algo.dynamic_filtering_enable" in flags  # takes more prompts for a step
    sizes = {
        "--vllm.num_engines": [str(engines)],
        "--rollout.n_samples_per_prompt": [str(samples)],
        "--train.batch_size": [str(PROMPTS * samples)],
        "--data.max_samples": [str(PROMPTS * STEPS * (FILTERED if filtered else 1))],
    }
    return sizes if colocated else sizes | {"--vllm.sync_backend": ["gloo"]}


def _flags(words: list[str]) -> list[tuple[str, list[str]]]:
    """Group arguments into flags with their values."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            found.append((word, []))
        else:
            found[-1][1].append(word)
    return found


def _gpus(published_number: str) -> str:
    return "2" if int(published_number) >= 4 else "1"


def gpus_of_roles(arguments: list[str]) -> dict[str, int]:
    """The GPUs per node of each role in the arguments of a small command."""
    flags = dict(_flags(arguments))
    return {found[1]: int(flags[name][0]) for name in flags if (found := ROLE_GPUS.fullmatch(name))}


def make_files(folder: Path, experts: bool = False) -> None:
    """Write models, that to train of ``experts`` if the script has one, prompts as messages, and pairs."""
    generation = tiny_run.installed()
    tokenizer = tiny_model.make_model(folder / "model", seed=0, layers=2, heads=generation.heads)
    if generation.reward_model:
        digit_reward_model.make(folder / "reward", tokenizer, tiny_model.VOCABULARY)
    if experts:
        _make_experts(folder / "model")
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder / "model")
    rows = []
    for index, text in enumerate(tiny_model.prompts(seed=0, count=STEPS * max(PAIRS, FILTERED * PROMPTS))):
        asked = [{"role": "user", "content": text}]
        good, bad = ([*asked, {"role": "assistant", "content": answer}] for answer in ("42", "no number"))
        keys = {"context_messages": asked, "prompt": asked, "label": str(index)}
        rows.append(keys | {"chosen": good, "rejected": bad, "question": text, "response": "It is 42."})
    lines = "\n".join(json.dumps(row) for row in rows) + "\n"
    for name in ("prompts.jsonl", "pairs.jsonl"):
        (folder / name).write_text(lines, encoding="utf-8")


def _make_experts(out: Path) -> None:
    """Replace the model by a Mixtral of four experts."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=tiny_model.VOCABULARY,
        hidden_size=tiny_model.HIDDEN,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(out)
