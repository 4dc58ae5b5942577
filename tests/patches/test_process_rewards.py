"""The evaluation of a process reward model, OpenRLHF 0.5.1."""

import pytest

EVALUATED = """
import torch

on_cpu()
from openrlhf.trainer.prm_trainer import ProcessRewardModelTrainer

replace(torch.cuda, current_device=lambda: "cpu")
given = []
trainer = ProcessRewardModelTrainer.__new__(ProcessRewardModelTrainer)
trainer.packing_samples, trainer._wandb, trainer._tensorboard = False, None, None
trainer.strategy = stub(
    "a strategy", is_rank_0=lambda: False, ring_attn_group=None, all_reduce=lambda logs: logs
)


class Model(torch.nn.Module):
    def forward(self, inputs, **options):
        given.append(options)
        return types.SimpleNamespace(logits=None)


trainer.model = Model()
trainer.loss_fn = lambda inputs, logits, labels, return_acc: (torch.tensor(1.0), torch.tensor(0.5))
ones = torch.ones(2, 3, dtype=torch.long)
trainer.evaluate([(ones, ones, ones)])
assert given[0]["packed_seq_lens"] is None
print("a process reward model is evaluated without packing")
"""


@pytest.mark.patch("openrlhf/0.5.1/0043-evaluate-process-rewards-without-packing")
def test_a_process_reward_model_is_evaluated_without_packing(proves):
    proves(EVALUATED, "packed_seq_lens")
