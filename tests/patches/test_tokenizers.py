"""Tokenizers of bytes whose configuration names Llama's class, as DeepSeek's models do."""

import pytest

LOADED = """
from rlhf_stack.demo import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

on_cpu()
folder = Path("model")
tiny_model.make_model(folder, seed=0, layers=1, heads=4)
config = json.loads((folder / "config.json").read_text())
config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
(folder / "config.json").write_text(json.dumps(config))
text = "What is the sum?\\n\\nAnswer: 12"
whole = Tokenizer(models.BPE())
whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
whole.decoder = decoders.ByteLevel()
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
whole.train_from_iterator(
    [text] * 50, trainers.BpeTrainer(vocab_size=300, special_tokens=["<b>", "<e>"], initial_alphabet=alphabet)
)
whole.save(str(folder / "tokenizer.json"))
named = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<b>", "eos_token": "<e>"}
(folder / "tokenizer_config.json").write_text(json.dumps(named))

from openrlhf.cli import lora_combiner
from openrlhf.utils.utils import get_tokenizer


def same(tokenizer):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids == whole.encode(text).ids and tokenizer.decode(ids) == text


try:
    lora_combiner.apply_lora(str(folder), "no adapter", "combined", False, "bf16")
except (OSError, ValueError):  # after the tokenizer
    pass
assert same(lora_combiner.AutoTokenizer.from_pretrained(folder)), "spaces and line breaks are lost"
trained = get_tokenizer(str(folder), None, "left", None)
assert same(trained), "spaces and line breaks are lost"
assert (trained.eos_token, trained.padding_side) == ("<e>", "left")
trained.save_pretrained("saved")
assert same(get_tokenizer("saved", None, "left", None))
from vllm.tokenizers import get_tokenizer as of_vllm

assert same(of_vllm(str(folder))), "vLLM loses spaces and line breaks"
print("a tokenizer of bytes is loaded as it is")
"""


@pytest.mark.patch("openrlhf/0.11.2/0068-keep-byte-level-tokenizers")
def test_a_tokenizer_of_bytes_keeps_spaces_and_line_breaks(proves):
    proves(LOADED, "spaces and line breaks are lost")
