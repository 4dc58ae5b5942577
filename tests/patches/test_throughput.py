import pytest

SECTIONS = """
import asyncio

from openrlhf.trainer.ray.vllm_engine import RolloutRayActor


@stub("the vLLM of an engine")
class Llm:
    async def generate(self, prompt, parameters, request_id):
        for length in (1, 5, 9):
            answer = types.SimpleNamespace(token_ids=[0] * length, finish_reason=None)
            yield types.SimpleNamespace(outputs=[answer])

    async def collective_rpc(self, method, args):
        return ["loaded"]


Engine = RolloutRayActor.__ray_metadata__.modified_class
engine = Engine.__new__(Engine)
engine.llm, engine._mm_pad_token_ids = Llm(), None


async def run():
    parameters = types.SimpleNamespace(seed=None)
    outputs = await asyncio.gather(*[engine.generate([1, 2], parameters) for _ in range(3)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 9, 9]
    return await engine.receive_weights([], 1, "full")


work = asyncio.run(run())["work"]
assert work.tokens == 27, f"27 tokens were generated, {work.tokens} counted"
assert work.seconds > 0
print(work.tokens, "tokens counted")
"""

FLAT = """
from openrlhf.trainer.ray.vllm_engine import LLMRayActor

Engine = LLMRayActor.__ray_metadata__.modified_class
engine = Engine.__new__(Engine)
output = types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=[0] * 9)])
worker = stub("the worker of an engine", receive_weights=lambda parameters, limit, encoding: "loaded")
executor = types.SimpleNamespace(driver_worker=worker)
allocator = types.SimpleNamespace()  # without a prefix cache
blocks = types.SimpleNamespace(gpu_allocator=allocator)
scheduler = types.SimpleNamespace(block_manager=blocks)
inner = types.SimpleNamespace(model_executor=executor, scheduler=scheduler)
engine.llm = stub("the vLLM of an engine", generate=lambda *_, **__: [output] * 3, llm_engine=inner)
assert engine.generate(prompt_token_ids=[[1, 2]] * 3) == [output] * 3
work = engine.receive_weights([], 1, "full")["work"]
assert work.tokens == 27, f"27 tokens were generated, {work.tokens} counted"
assert work.seconds > 0
print(work.tokens, "tokens counted")
"""


@pytest.mark.patch("openrlhf/0.11.2/0052-count-generated-tokens")
def test_the_tokens_of_an_engine_are_counted(proves):
    proves(SECTIONS, "27 tokens were generated, 0 counted")


@pytest.mark.patch("openrlhf/0.5.1/0022-count-generated-tokens")
def test_the_tokens_of_a_blocking_engine_are_counted(proves):
    proves(FLAT, "27 tokens were generated, 0 counted")
