"""Models of Llama's architecture with tied embeddings, such as SmolLM2, in vLLM 0.4.2."""

import pytest
from rlhf_stack.accelerator import devices

MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128, hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, eos_token_id=None,
    tie_word_embeddings=True,
)
trained = LlamaForCausalLM(config).eval()
"""

SYNC = f"""
on_cpu()
{MODEL}
import vllm.model_executor.model_loader  # first: it and the models import each other
from vllm.distributed import parallel_state
from vllm.model_executor.models.llama import LlamaForCausalLM as EngineModel

alone()
parallel_state.init_distributed_environment(1, 0, "env://", backend="gloo")
parallel_state.initialize_model_parallel(1, 1, "gloo")
engine = EngineModel(config)
checkpoint = trained.state_dict()
assert "lm_head.weight" in checkpoint
engine.load_weights(checkpoint.items())
with torch.no_grad():
    trained.lm_head.weight.mul_(2)
engine.load_weights(trained.named_parameters())
hidden = torch.randn(3, config.hidden_size)
sampling = stub(
    "the sampling metadata of 3 requests", selected_token_indices=torch.arange(3), seq_groups=[]
)
apart = (engine.compute_logits(hidden, sampling) - trained.lm_head(hidden)).abs().max().item()
assert apart < 1e-3, f"after a sync the logits of a tied model are off by {{apart}}"
print("after a sync an engine has the logits of the trainer")
"""

GENERATION = f"""
{MODEL}
from vllm import LLM, SamplingParams

trained.save_pretrained("model")
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
prompt, length = list(range(20, 36)), 24
engine = LLM("model", skip_tokenizer_init=True, dtype="float32", enforce_eager=True)
sampling = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
answer = engine.generate(prompt_token_ids=[prompt], sampling_params=sampling)[0].outputs[0].token_ids
options = {{"do_sample": False, "max_new_tokens": length}}
expected = trained.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
assert list(answer) == expected, f"greedy answers differ: {{answer}} and {{expected}}"
print("an engine answers as transformers does")
"""


@pytest.mark.patch("vllm/0.4.2/0005-tie-the-head-of-llama")
def test_a_sync_updates_the_output_layer(proves):
    proves(SYNC, "the logits of a tied model are off by")


@pytest.mark.patch("vllm/0.4.2/0005-tie-the-head-of-llama")
def test_an_engine_reads_the_output_layer_from_safetensors(proves):
    if devices.is_gpu():
        pytest.skip("vLLM's engine for CPUs is not in this image")
    proves(GENERATION, "greedy answers differ")
