"""The rung ``memory``: estimates of `rlhf_stack.memory` against what torch allocates for a small model.

``tests/image/test_memory.py`` checks the same figures on a CPU.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from rlhf_stack.accelerator import devices
from rlhf_stack.certify.ladder import Found, NotClimbedError, Place
from rlhf_stack.certify.model import Measurement
from rlhf_stack.lazy import torch
from rlhf_stack.memory import (
    LOGIT_ROWS,
    Pass,
    Shape,
    forward_peak,
    saved_activations,
    training_peak,
)

SMALL = Shape(4, 256, 704, 4, 2, 64, 4096, qkv_bias=True)
LARGE = Shape(8, 2048, 5632, 16, 4, 128, 65536, qkv_bias=True)
SEQUENCES, LENGTH, LARGE_LENGTH = 2, 128, 1024
TOLERANCE = 0.06  # in both directions: small buffers and padding are not modelled
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
PASSES: dict[str, tuple[str, bool, dict[str, Any]]] = {  # attention, checkpointing, sizes that differ
    "sdpa": ("sdpa", False, {}),
    "eager": ("eager", False, {}),
    "sdpa, checkpointing": ("sdpa", True, {}),
    "sdpa, small vocabulary": ("sdpa", False, {"vocabulary": 512, "layers": 8}),
}


def climb(place: Place) -> Found:
    """Compare each estimate with its measurement; a value of 1.02 means that 2 % more was allocated."""
    rows = list(activations(SMALL, LENGTH) if place.small else activations(LARGE, LARGE_LENGTH))
    ratios = {name: measured / estimated for name, estimated, measured in rows}
    wrong = [f"{name}: {ratio:.2f} of the estimate" for name, ratio in ratios.items() if _is_wrong(ratio)]
    details = {name: {"estimated": estimated, "measured": measured} for name, estimated, measured in rows}
    return Found([Measurement(name, ratio) for name, ratio in ratios.items()], details, "; ".join(wrong))


def _is_wrong(ratio: float) -> bool:
    return abs(1 / ratio - 1) > TOLERANCE


def activations(shape: Shape, length: int) -> Iterator[tuple[str, int, int]]:
    """Yield names, estimated and measured bytes of an actor's passes, as OpenRLHF computes them."""
    if not devices.is_gpu():
        torch.set_num_threads(1)
    for name, (attention, checkpointing, changes) in PASSES.items():
        sizes = replace(shape, **changes)
        forward, half_precision_logits = _actor(sizes, attention, checkpointing, length)
        work = Pass(SEQUENCES, length, checkpointing, attention, half_precision_logits=half_precision_logits)

        def train(forward: Callable[[], Any] = forward) -> None:
            forward().mean().backward()

        def infer(forward: Callable[[], Any] = forward) -> None:
            with torch.no_grad():
                forward()

        train()  # allocates the gradients, which are then not counted
        yield f"{name}: saved", saved_activations(sizes, work), profiled(forward)[0]
        yield f"{name}: training peak", training_peak(sizes, work), profiled(train)[1]
        if not checkpointing:
            yield f"{name}: forward peak", forward_peak(sizes, work), profiled(infer)[1]


def _actor(shape: Shape, attention: str, checkpointing: bool, length: int) -> tuple[Callable[[], Any], bool]:
    """The forward pass of OpenRLHF's actor or, without it, the same operations; are logits 16 bits."""
    model = model_of(shape, attention)
    tokens = torch.randint(0, shape.vocabulary, (SEQUENCES, length), device=model.device)
    mask = torch.ones_like(tokens)
    answers = torch.ones(SEQUENCES, length - 1, device=model.device)
    try:
        from openrlhf.models import Actor
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("openrlhf", "deepspeed", "ray", "vllm"):
            raise
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})

        def alone() -> torch.Tensor:
            output = model(tokens, attention_mask=mask)
            output["logits"] = output["logits"].to(torch.float32)
            flat = output["logits"].reshape(-1, shape.vocabulary)
            chosen = flat.gather(-1, tokens.roll(-1, dims=1).reshape(-1, 1)).squeeze(-1)
            normalizers = torch.zeros_like(chosen)
            for start in range(0, len(flat), LOGIT_ROWS):
                normalizers[start : start + LOGIT_ROWS] = flat[start : start + LOGIT_ROWS].logsumexp(-1)
            return _kept(((chosen - normalizers).reshape(tokens.shape)[:, :-1], output))

        return alone, False
    actor = Actor(model)
    actor.packing_samples = False
    if checkpointing:
        actor.gradient_checkpointing_enable()
    newer = "action_mask" in inspect.signature(Actor.forward).parameters
    if newer:
        return lambda: _kept(actor(tokens, answers, attention_mask=mask, return_output=True)), False
    return lambda: _kept(actor(tokens, length - 1, mask, return_output=True)), True


def _kept(answer: tuple[Any, Any]) -> Any:
    """The log-probabilities, which keep the output of the model alive as upstream's caller does."""
    log_probs, output = answer
    log_probs.output = output
    return log_probs


def config_of(shape: Shape, attention: str = "sdpa") -> Any:
    """The configuration of a Qwen2 of these dimensions."""
    try:
        from transformers import Qwen2Config
    except ModuleNotFoundError:
        raise NotClimbedError("transformers is not installed") from None

    return Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        attn_implementation=attention,
        architectures=["Qwen2ForCausalLM"],
    )


def model_of(shape: Shape, attention: str = "sdpa") -> Any:
    """The model in 16 bits, with random weights, on this device."""
    config = config_of(shape, attention)
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(0)
    with devices.torch_device():
        model = Qwen2ForCausalLM._from_config(config, torch_dtype=torch.bfloat16)
    model.config.use_cache = False
    return model.train()


def profiled(call: Callable[[], Any]) -> tuple[int, int]:
    """The bytes allocated after ``call``, with its result alive, and their peak during it."""
    if devices.is_gpu():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()
        torch.cuda.synchronize()
        after, highest = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        del result
        return after - before, highest - before
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        result = call()
    now = peak = 0
    for change in changes(found.profiler.kineto_results.events()):
        now += change
        peak = max(peak, now)
    del result
    return now, peak


def changes(events: Sequence[Any]) -> Iterator[int]:
    """Yield the changes of the allocated bytes, of a matrix product as one, from the profiler's ``events``.

    On a CPU without instructions for 16 bits a product allocates a copy in 32 bits meanwhile, on a GPU none.
    """
    unit = "ns" if hasattr(events[0], "start_ns") else "us"  # torch 2.3
    within, end = 0, 0
    for event in sorted(events, key=lambda event: getattr(event, f"start_{unit}")()):
        start = getattr(event, f"start_{unit}")()
        if start > end:
            yield within
            within = 0
        if event.name() == "[memory]":
            within += event.nbytes()
        elif event.name() in PRODUCTS:
            end = max(end, start + getattr(event, f"duration_{unit}")())
    yield within
