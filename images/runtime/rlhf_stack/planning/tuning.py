"""Chooses the fastest settings of a run that fit its cluster, each with a reason."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rlhf_stack.compat import attention_provider
from rlhf_stack.config import env_vars
from rlhf_stack.memory import Shape
from rlhf_stack.memory.activations import EAGER
from rlhf_stack.openrlhf.run_spec import Run
from rlhf_stack.planning import attention
from rlhf_stack.planning.advice import LOWEST_UTILIZATION, STEP, flag
from rlhf_stack.planning.assessment import assess
from rlhf_stack.planning.cluster_spec import Machine

HIGHEST_UTILIZATION = 0.9
LARGEST_BATCH = 64
FLASH, PLAIN = "flash_attention_2", "sdpa"
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


@dataclass(frozen=True)
class Setting:
    """A flag with its value, or an environment variable; ``dropped``: it must be removed."""

    text: str
    reason: str
    dropped: bool = False

    @property
    def is_variable(self) -> bool:
        """Whether this is an environment variable."""
        return not self.text.startswith("-")


@dataclass(frozen=True)
class Tuned:
    """The run with the chosen ``settings``, and the ``problems`` that remain."""

    run: Run
    settings: tuple[Setting, ...]
    problems: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the run fits."""
        return not self.problems


def tune(run: Run, machines: Sequence[Machine], shapes: Mapping[str, Shape]) -> Tuned:
    """Choose the settings of ``run`` for its models, lengths and ``machines``."""

    def problems(candidate: Run) -> tuple[str, ...]:
        return assess(candidate, machines, shapes).problems

    start = replace(run, attention=_attention(run, shapes))
    found = next((candidate for candidate in _candidates(start) if not problems(candidate)), None)
    if found is None:
        last = list(_candidates(start))[-1]
        return Tuned(last, (), problems(last))
    for name in ("train_batch", "rollout_batch") if run.tokens is None else ():
        while (size := 2 * getattr(found, name)) <= min(LARGEST_BATCH, found.rank_batch):
            larger = replace(found, **{name: size})
            if problems(larger):
                break
            found = larger
    return Tuned(found, tuple(setting for setting in _settings(run, found) if setting.text), ())


def apply_settings(command: Sequence[str], tuned: Tuned) -> list[str]:
    """The words of ``command`` with the settings of ``tuned`` in place of its own."""
    words = list(command)
    variables = []
    for setting in tuned.settings:
        if setting.is_variable:
            variables.append(setting.text)
            continue
        name, *values = setting.text.split()
        words = _without(words, name)
        words += [] if setting.dropped else [name, *values]
    return [*(["env", *variables] if variables else []), *words]


def _without(words: Sequence[str], name: str) -> list[str]:
    """``words`` without a flag and its value."""
    remaining: list[str] = []
    skipping = False
    for word in words:
        if word == name:
            skipping = True
        elif word.startswith(f"{name}="):
            continue
        elif skipping and not word.startswith("--"):
            skipping = False
        else:
            skipping = False
            remaining.append(word)
    return remaining


def _candidates(run: Run) -> Iterator[Run]:
    """Variants of the run, from the fastest to the one that needs least memory: with micro batches of 1.

    Dynamic batches are of tokens, and their micro batches stay as requested.
    """
    shared = run.request.engines is not None and run.request.engines.shares is not None
    small = replace(run, train_batch=1, rollout_batch=1) if run.tokens is None else run
    stage, highest = max(2, run.zero.stage), 2 if run.obstacle_to_stage_3 else 3
    levels = [(stage, False, False), (stage, True, False), (highest, True, False)]
    levels += [(highest, True, True)] if run.can_offload else []
    for level, checkpointing, offload in dict.fromkeys(levels):
        zero = replace(small.zero, stage=level, offload=offload)
        changed = replace(small, zero=zero, checkpointing=checkpointing)
        if not shared:
            yield changed if run.flat else replace(changed, utilization=HIGHEST_UTILIZATION)
            continue
        utilization = HIGHEST_UTILIZATION
        while utilization >= LOWEST_UTILIZATION:
            yield replace(
                changed,
                engine_sleeps=True,
                trainer_sleeps=not offload and changed.can_sleep,
                utilization=round(utilization, 2),
            )
            utilization -= STEP


def _settings(before: Run, after: Run) -> Iterator[Setting]:
    """The chosen settings, including those that the command line already has."""
    if after.tokens is None:
        yield Setting(
            flag(after, "train_batch", after.train_batch),
            f"the largest number of sequences of {after.length} tokens that fits in a training step",
        )
        yield Setting(
            flag(after, "rollout_batch", after.rollout_batch),
            "the largest number that fits in the computation of log-probabilities",
        )
    yield Setting(flag(after, "stage", after.zero.stage), _why_stage(after))
    recompute = "activations do not fit otherwise; costs about a third more time"
    enough = "activations fit: no recomputation needed"
    yield Setting(
        flag(after, "checkpointing"), recompute if after.checkpointing else enough, not after.checkpointing
    )
    offload = "the optimiser does not fit on the GPUs: it runs on the host"
    on_gpu = "the optimiser fits on the GPUs, which are faster"
    yield Setting(flag(after, "offload"), offload if after.zero.offload else on_gpu, not after.zero.offload)
    yield from _engine_settings(after)
    yield from _attention_settings(before, after)


def _why_stage(run: Run) -> str:
    if run.zero.stage < 3:
        return "weights fit on each GPU: no gathering layer by layer"
    return "weights, gradients and optimiser are sharded over the ranks"


def _engine_settings(run: Run) -> Iterator[Setting]:
    engines = run.request.engines
    if engines is None:
        return
    if not run.flat:
        room = (
            "the memory that the trainer leaves on a GPU"
            if engines.shares
            else "the rest is for allocations that vLLM does not count"
        )
        yield Setting(flag(run, "utilization", f"{run.utilization:g}"), room)
    if engines.shares:
        yield Setting(flag(run, "engine_sleeps"), "engines release their memory while the trainer computes")
        if not run.zero.offload:
            asleep = "the trainer releases the memory of its optimiser while engines generate"
            stuck = "at ZeRO stage 3 DeepSpeed moves only its fused_adam, which this image cannot have"
            yield Setting(
                flag(run, "trainer_sleeps"), asleep if run.trainer_sleeps else stuck, not run.trainer_sleeps
            )
    elif env_vars.accelerator() == "cuda":
        yield Setting(flag(run, "sync", "nccl"), "weights are sent from GPU to GPU")
    elif env_vars.accelerator() is not None:
        yield Setting(flag(run, "sync", "gloo"), "works on every network with this accelerator")
    # vLLM's custom all-reduce exports buffers of CUDA graphs with cudaIpcGetMemHandle, which refuses segments
    if not run.engine_sleeps and engines.size == 1 and env_vars.accelerator() == "cuda":
        yield Setting(
            ALLOCATOR, "less memory fragmentation; incompatible with sleep mode and engines of several GPUs"
        )


def _attention_settings(before: Run, run: Run) -> Iterator[Setting]:
    if not run.flat and before.attention != FLASH:
        return
    is_served = run.attention == FLASH
    reason = (
        f"attention scores are not stored: {attention_provider.provider()} computes it"
        if is_served
        else f"nothing here computes {FLASH} for these models, and packed samples need it"
    )
    values = () if run.flat else (run.attention,)
    yield Setting(flag(run, "attention", *values), reason, dropped=run.flat and not is_served)


def _attention(run: Run, shapes: Mapping[str, Shape]) -> str:
    """FlashAttention if it is computed here for all models, unless a release with sections got another.

    Without sections the only other one is eager attention, which stores its scores.
    """
    if not run.flat and run.attention != FLASH:
        return run.attention
    if any(attention.unserved(shapes[role.model]) for role in run.roles):
        return EAGER
    if attention_provider.provider():
        return FLASH
    return EAGER if run.flat else PLAIN
