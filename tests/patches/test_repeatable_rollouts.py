PROBE = """
import asyncio

os.environ["RLHF_STACK_REPEATABLE"] = "1"
pretend_flash_attn()
from vllm import SamplingParams
from openrlhf.trainer.ray.vllm_engine import RolloutRayActor

Actor = RolloutRayActor.__ray_metadata__.modified_class


class Engine:
    def __init__(self):
        self.seeds = []

    async def generate(self, prompt, parameters, request_id):
        self.seeds.append(parameters.seed)
        yield None


def seeds():
    actor = Actor.__new__(Actor)
    actor.kwargs, actor.llm, actor._mm_pad_token_ids = {"seed": 7}, Engine(), None
    for prompt in ([1, 2], [1, 2], [3]):
        asyncio.run(actor.generate(prompt, SamplingParams()))
    return actor.llm.seeds


first = seeds()
assert None not in first, f"requests without a seed of their own: {first}"
assert len(set(first)) == 3, first
assert seeds() == first, "another run of the same seed asks otherwise"
print("each request has a seed of its own, the same in the next run")
"""


def test_each_request_has_a_seed_of_its_own(proves):
    proves(PROBE, r"requests without a seed of their own")
