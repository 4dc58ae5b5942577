"""Scaled rotary embeddings in vLLM 0.4.2: as transformers computes them, or refused."""

import pytest
from rlhf_stack.accelerator import devices

QWEN2 = """
from transformers import Qwen2Config as Config, Qwen2ForCausalLM as Trained
scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
options = {"max_position_embeddings": 64}
"""
LLAMA = """
from transformers import LlamaConfig as Config, LlamaForCausalLM as Trained
scaling = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
options = {"max_position_embeddings": 512}
"""
CONFIG = """
config = Config(
    vocab_size=128, hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, initializer_range=0.2, eos_token_id=None, tie_word_embeddings=False,
    rope_scaling=scaling, **options,
)
"""

LAYER = """
on_cpu()
import torch
import vllm.model_executor.model_loader  # first: it and the models import each other
from transformers.models.{family}.modeling_{family} import {name}RotaryEmbedding as TrainedRotary
from vllm.config import _get_and_verify_max_len
from vllm.distributed import parallel_state
from vllm.model_executor.models.{family} import {name}DecoderLayer

alone()
parallel_state.init_distributed_environment(1, 0, "env://", backend="gloo")
parallel_state.initialize_model_parallel(1, 1, "gloo")
longest = _get_and_verify_max_len(config, None)
rotary = {layer}.self_attn.rotary_emb
assert len(rotary.cos_sin_cache) >= longest, f"the cache has {{len(rotary.cos_sin_cache)}} of {{longest}}"
parts = TrainedRotary(config=config)(torch.zeros(1), torch.arange(longest)[None])
expected = torch.cat([part[0].chunk(2, -1)[0] for part in parts], -1)
apart = (rotary.cos_sin_cache[:longest] - expected).abs().max().item()
assert apart < 1e-3, f"cos and sin of an engine and of the trainer differ by {{apart}}"
print("an engine rotates as the trainer does")
"""

ANSWER = """
import torch
from vllm import LLM, SamplingParams

torch.manual_seed(0)
trained = Trained(config).eval()
trained.save_pretrained("model")
saved = json.loads(Path("model/config.json").read_text())
saved["rope_scaling"] = scaling
Path("model/config.json").write_text(json.dumps(saved))
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
prompt, length = [3 * place % 128 for place in range(32)], 24
engine = LLM("model", skip_tokenizer_init=True, dtype="float32", enforce_eager=True)
sampling = SamplingParams(
    temperature=1, seed=1, max_tokens=length, ignore_eos=True, detokenize=False, logprobs=1
)
output = engine.generate(prompt_token_ids=[prompt], sampling_params=sampling)[0].outputs[0]
answer = list(output.token_ids)
with torch.no_grad():
    scores = trained(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
expected = scores.gather(1, torch.tensor(answer)[:, None])[:, 0]
sampled = torch.tensor([found[token].logprob for found, token in zip(output.logprobs, answer)])
apart = (sampled - expected).abs().max().item()
assert apart < 1e-3, f"the trainer scores a token of an answer {apart} nats otherwise than the engine"
print("the trainer scores an answer as the engine does")
"""

TYPE = f"""
on_cpu()
{LLAMA}
{CONFIG}
from vllm.config import _get_and_verify_max_len

assert _get_and_verify_max_len(config, None) == 512, "the length includes the scaling"
print("an engine reads rope_type")
"""

REFUSED = """
on_cpu()
from transformers import LlamaConfig
from vllm.config import _get_and_verify_max_len

def ending(scaling):
    try:
        return f"vLLM accepts {_get_and_verify_max_len(LlamaConfig(rope_scaling=scaling), None)} tokens"
    except ValueError as error:
        return str(error)

found = ending({"type": "dynamic", "factor": 2.0})
assert "of the type 'dynamic'" in found and "use an image with" in found, f"dynamic is not refused: {found}"
assert _get_and_verify_max_len(LlamaConfig(rope_scaling={"type": "linear", "factor": 2}), None) == 4096
assert _get_and_verify_max_len(LlamaConfig(rope_scaling={"rope_type": "default"}), None) == 2048
print("a scaling that vLLM computes otherwise than transformers is refused")
"""


def need_an_engine_for_cpus() -> None:
    if devices.is_gpu():
        pytest.skip("vLLM's engine for CPUs is not in this image")


@pytest.mark.patch("vllm/0.4.2/0007-scale-the-rotary-embeddings-of-qwen2")
def test_qwen2_is_rotated_with_its_scaling(proves):
    layer = LAYER.format(family="qwen2", name="Qwen2", layer="Qwen2DecoderLayer(config, 0)")
    proves(f"{QWEN2}{CONFIG}{layer}", "the cache has 64 of 256")


@pytest.mark.patch("vllm/0.4.2/0007-scale-the-rotary-embeddings-of-qwen2")
def test_the_trainer_scores_what_an_engine_of_qwen2_samples(proves):
    need_an_engine_for_cpus()
    proves(f"{QWEN2}{CONFIG}{ANSWER}", "nats otherwise than the engine")


@pytest.mark.patch("vllm/0.4.2/0008-verify-the-scaling-of-rotary-embeddings")
def test_an_engine_reads_the_type_of_llama_3(proves):
    proves(TYPE, "KeyError: 'type'")


@pytest.mark.patch("vllm/0.4.2/0008-verify-the-scaling-of-rotary-embeddings")
def test_a_scaling_that_vllm_computes_otherwise_is_refused(proves):
    proves(REFUSED, "dynamic is not refused")


@pytest.mark.patch("vllm/0.4.2/0009-scale-the-frequencies-of-llama-3")
def test_llama_3_is_rotated_as_transformers_does(proves):
    layer = LAYER.format(family="llama", name="Llama", layer="LlamaDecoderLayer(config)")
    proves(f"{LLAMA}{CONFIG}{layer}", "Unknown RoPE scaling type llama3")


@pytest.mark.patch("vllm/0.4.2/0009-scale-the-frequencies-of-llama-3")
def test_the_trainer_scores_what_an_engine_of_llama_3_samples(proves):
    need_an_engine_for_cpus()
    proves(f"{LLAMA}{CONFIG}{ANSWER}", "Unknown RoPE scaling type llama3")
