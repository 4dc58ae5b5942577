"""An agent for `--train.agent_func_path` with two turns; the reward is 1 for an even number of characters."""

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class Instance(AgentInstanceBase):
    """One conversation."""

    def __init__(self, *_, **__):
        self.turns = 0

    async def reset(self, states, **_):
        """Start with the prompt."""
        return {"observation": states["observation"]}

    async def step(self, states, **_):
        """Continue once, then end with the reward."""
        self.turns += 1
        done = self.turns == 2
        reward = torch.tensor([float(done and len(states["action_text"]) % 2 == 0)])
        return {
            "rewards": reward,
            "scores": reward,
            "environment_feedback": "" if done else "\nAgain:",
            "done": done,
            "sampling_params": states.get("sampling_params"),
            "extra_logs": {"turns": torch.tensor([float(self.turns)])},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    """The class that OpenRLHF loads."""

    def __init__(self):
        super().__init__(Instance)
