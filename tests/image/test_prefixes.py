"""Cached prompts of vLLM 0.4.2 after a weight sync."""

from types import SimpleNamespace

import pytest


@pytest.mark.carries("vllm==0.4.2")
def test_vllm_computes_a_cached_prompt_again_after_a_sync() -> None:
    """By its own allocator: the block of a prompt that has ended is found, and not taken as computed."""
    from rlhf_stack.engine.actor import BlockingEngineMixin
    from vllm.core.block_manager_v1 import CachedBlockAllocator
    from vllm.utils import Device

    allocator = CachedBlockAllocator(Device.GPU, block_size=16, num_blocks=4)
    prompt = allocator.allocate(block_hash=7, num_hashed_tokens=16)
    prompt.computed = True
    allocator.free(prompt)
    engine = BlockingEngineMixin()
    engine.llm = SimpleNamespace(
        llm_engine=SimpleNamespace(
            scheduler=SimpleNamespace(block_manager=SimpleNamespace(gpu_allocator=allocator)),
            model_executor=SimpleNamespace(driver_worker=SimpleNamespace(receive_weights=lambda *_: {})),
        )
    )
    engine.receive_weights([], 1, "raw", version=1)
    again = allocator.allocate(block_hash=7, num_hashed_tokens=16)
    assert again is prompt
    assert not again.computed
