"""An engine answers its control calls while more prompts wait for it than Ray executes calls by default."""

import asyncio

import pytest
import ray
from rlhf_stack.engine.recipes import MOST_CALLS
from trained import SECTIONS

pytestmark = SECTIONS  # the engines of OpenRLHF 0.5.1 are not asynchronous
SECONDS = 60
RAYS_LIMIT = 1000  # of an asynchronous actor
PROMPTS = 2 * RAYS_LIMIT


@ray.remote(num_cpus=0)
class Engine:
    """An asynchronous actor as upstream's, whose answers wait until it is asked for them."""

    def __init__(self) -> None:
        self.prompts, self.open = 0, asyncio.Event()

    async def generate_responses(self) -> int:
        self.prompts += 1
        await self.open.wait()
        return self.prompts

    async def unfinished_work(self) -> int:
        return self.prompts

    async def answer(self) -> None:
        self.open.set()


@pytest.fixture(scope="module", autouse=True)
def node():
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    yield
    ray.shutdown()


def test_a_call_passes_waiting_prompts():
    engine = Engine.options(max_concurrency=MOST_CALLS).remote()
    answers = [engine.generate_responses.remote() for _ in range(PROMPTS)]
    assert ray.get(engine.unfinished_work.remote(), timeout=SECONDS) == PROMPTS
    ray.get(engine.answer.remote(), timeout=SECONDS)
    assert ray.get(answers, timeout=SECONDS) == [PROMPTS] * PROMPTS


def test_with_rays_limit_the_call_waits():
    """The reason for raising it: an engine that works looked like one that hangs."""
    engine = Engine.remote()
    assert ray.get(engine.unfinished_work.remote(), timeout=SECONDS) == 0, "it has started"
    answers = [engine.generate_responses.remote() for _ in range(PROMPTS)]
    asked = engine.unfinished_work.remote()
    assert ray.wait([asked], timeout=5)[0] == []
    ray.kill(engine)
    del answers
