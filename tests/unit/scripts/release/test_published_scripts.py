"""The catalogue's table of OpenRLHF's published scripts."""

from scripts.matrix.load import load
from scripts.matrix.model import named
from scripts.release import published_scripts, render

OUTCOMES = {row[:2]: row[-1] for row in published_scripts.rows()}
NEW, OLD = "0.11.2", "0.5.1"


def test_each_command_has_a_row_with_its_outcome() -> None:
    assert len(OUTCOMES) == len(published_scripts.rows()) > 30
    assert "successor" in OUTCOMES["train_dapo_ray_hybrid_engine", NEW]
    assert OUTCOMES["train_dpo_llama", NEW] == "`plan` accepts it; made small, it takes two steps"
    assert OUTCOMES["train_dpo_llama", OLD] == "`plan` accepts it"
    ring = OUTCOMES["train_reinforce_baseline_ray_agent_async", NEW]
    assert "refuses it: --ds.ring_attn_size 2" in ring
    assert "80 GiB: 32 GPUs are requested" in OUTCOMES["train_ppo_llama_ray_70b", OLD]
    assert "`plan` accepts it" in OUTCOMES["train_prorlv2_math_hybrid_engine", NEW]
    vision = OUTCOMES["train_vlm_math_hybrid_engine", NEW]
    assert "refuses it: --data.max_images_per_prompt 1 needs torchvision; not trained: " in vision


def test_the_release_that_trains_is_that_of_the_default_image() -> None:
    packages = named(load().stacks, "current").packages
    (pin,) = (pin for pin in packages if pin.name == "openrlhf")
    assert pin.version == published_scripts.TRAINED
    assert next(row[1] for row in published_scripts.rows()) == published_scripts.TRAINED


def test_the_page_has_the_table() -> None:
    page = render.page([], {})
    for row in published_scripts.rows():
        assert f"| {row[0]} | {row[1]} | {row[2]} | " in page
