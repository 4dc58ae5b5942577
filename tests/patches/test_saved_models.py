"""A trained model whose generation settings transformers 5 refuses to save."""

import pytest

SAVED = """
import torch
from rlhf_stack.demo import tiny_model
from transformers import AutoModelForCausalLM

on_cpu()
alone()
from openrlhf.utils.deepspeed.deepspeed import DeepspeedStrategy

folder = Path("model")
tiny_model.make_model(folder, seed=0, layers=1, heads=4)
for settings in ({"temperature": 0.9, "top_p": 0.6}, {"do_sample": True, "temperature": 0.0}, {}):
    generation = {"eos_token_id": 1, "pad_token_id": 0, **settings}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    model = AutoModelForCausalLM.from_pretrained(folder)
    strategy = DeepspeedStrategy.__new__(DeepspeedStrategy)
    strategy.stage = 2
    strategy.args = stub(
        "arguments of a run", ds=types.SimpleNamespace(zero_stage=2, tensor_parallel_size=1)
    )
    strategy._unwrap_model = lambda model: model
    try:
        strategy.save_model(model, stub("a tokenizer", save_pretrained=lambda _: None), "trained")
    except ValueError as error:
        raise AssertionError(f"the trained model was not saved: {'GenerationConfig' in str(error)}") from None
    kept = json.loads(Path("trained/generation_config.json").read_text())
    assert kept["eos_token_id"] == 1, kept
    assert kept.get("top_p") == settings.get("top_p"), kept
print("a model with inconsistent generation settings is saved")
"""


@pytest.mark.patch("openrlhf/0.11.2/0067-save-models-with-inconsistent-generation-settings")
def test_a_model_with_inconsistent_generation_settings_is_saved(proves):
    proves(SAVED, "the trained model was not saved: True")
