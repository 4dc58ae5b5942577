"""Log-probabilities and losses of 16-bit logits, against the same in 64 bits."""

import pytest

PROBE = """
import torch

on_cpu()
alone()
from openrlhf.models.loss import GPTLMLoss
from openrlhf.models.utils import log_probs_from_logits
from openrlhf.trainer.dpo_trainer import DPOTrainer
from openrlhf.trainer.kto_trainer import KTOTrainer

torch.manual_seed(0)
SEQUENCES, LENGTH, VOCABULARY, IGNORED, SAMPLES = 2, 1100, 300, 7, [600, 500]
logits = (12 * torch.randn(SEQUENCES, LENGTH, VOCABULARY)).to(torch.bfloat16)
tokens = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH))
mask, prompts = torch.ones_like(tokens), [IGNORED] * SEQUENCES
labels = tokens.clone()
labels[:, :IGNORED] = -100


def exact(logits):
    return logits.double().log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)


def close(what, found, expected, tolerance):
    lack = ((found.double() - expected).abs() / (1 + expected.abs())).max().item()
    assert lack <= tolerance, f"{what} of 16-bit logits: wrong by up to {lack:.1e}"


def compare(what, function, expected):
    mine, reference = logits.clone().requires_grad_(), logits.double().requires_grad_()
    found, wanted = function(mine), expected(reference)
    close(what, found, wanted, 1e-5)
    found.sum().backward()
    wanted.sum().backward()
    close(f"gradient of {what}", mine.grad, reference.grad, 2**-8)  # the rounding of bf16


def trainer(kind):
    made = kind.__new__(kind)
    made.strategy = stub("DeepspeedStrategy", ring_attn_group=None)
    return made


def in_one_row(samples):
    return samples.flatten(0, 1)[: sum(SAMPLES)]


def packed(logits):
    given = in_one_row(logits)[None], in_one_row(tokens)[None], packed_mask, prompts, SAMPLES
    return trainer(DPOTrainer)._packed_get_batch_logps(*given)[0]


def one_packed(logits):
    log_probs = in_one_row(logits).double().log_softmax(-1)[:-1]
    chosen = log_probs.gather(-1, in_one_row(tokens)[1:, None]).squeeze(-1)
    return torch.stack([chosen[IGNORED - 1 : SAMPLES[0] - 1].sum(), chosen[SAMPLES[0] + IGNORED - 1 :].sum()])


packed_mask = torch.cat([torch.full((size,), number) for number, size in enumerate(SAMPLES, 1)])[None]
answers = lambda log_probs: log_probs[:, IGNORED - 1 :].sum(-1)
compare("log_probs_from_logits", lambda x: log_probs_from_logits(x[:, :-1], tokens[:, 1:]), exact)
compare("GPTLMLoss", lambda x: GPTLMLoss()(x, labels), lambda x: -exact(x)[:, IGNORED - 1 :].mean())
compare("DPO", lambda x: trainer(DPOTrainer)._get_batch_logps(x, tokens, mask, prompts)[0],
        lambda x: answers(exact(x)))
compare("packed DPO", packed, one_packed)
compare("KTO", lambda x: trainer(KTOTrainer)._get_batch_logps(x, tokens, mask, prompt_id_lens=prompts),
        lambda x: answers(exact(x)))
print("log-probabilities, losses and gradients are exact")
"""


@pytest.mark.patch("openrlhf/0.5.1/0045-compute-log-probabilities-in-32-bits")
def test_log_probabilities_of_16_bit_logits_are_exact(proves):
    proves(PROBE, "AssertionError: log_probs_from_logits of 16-bit logits: wrong by up to ")
