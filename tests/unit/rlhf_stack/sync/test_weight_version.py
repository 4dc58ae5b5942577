"""rlhf_stack.sync.trainer: the version of the weights that a sync sends, also after a checkpoint."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rlhf_stack.sync.trainer import next_weight_version, weight_version


def trainer(folder: Path, loads: bool = True, universal: bool = False, flat: bool = False) -> Any:
    """A trainer of OpenRLHF with the arguments of its checkpoints."""
    if flat:
        arguments = SimpleNamespace(ckpt_path=str(folder), load_checkpoint=loads)
    else:
        arguments = SimpleNamespace(
            ckpt=SimpleNamespace(path=str(folder), load_enable=loads),
            ds=SimpleNamespace(use_universal_ckpt=universal),
        )
    return SimpleNamespace(strategy=SimpleNamespace(args=arguments))


def saved(folder: Path, name: str, tag: str) -> None:
    (folder / "_actor").mkdir(exist_ok=True)
    (folder / "_actor" / name).write_text(tag)


def versions(one: Any, syncs: int = 3) -> list[int]:
    found = []
    for _ in range(syncs):
        one.weight_version = next_weight_version(one)
        found.append(weight_version(one))
    return found


@pytest.mark.parametrize("flat", [True, False])
def test_the_weights_of_a_checkpoint_have_the_version_of_its_step(tmp_path: Path, flat: bool) -> None:
    saved(tmp_path, "latest", "global_step4\n")
    one = trainer(tmp_path, flat=flat)
    assert weight_version(one) == 0, "none was sent"
    assert versions(one) == [4, 5, 6]
    saved(tmp_path, "latest", "global_step40")
    assert versions(one) == [7, 8, 9], "what the run itself saves changes nothing"
    assert versions(trainer(tmp_path, loads=False, flat=flat)) == [1, 2, 3]


def test_a_run_that_begins_counts_from_one(tmp_path: Path) -> None:
    assert versions(trainer(tmp_path)) == [1, 2, 3], "there is no checkpoint yet"
    saved(tmp_path, "latest", "of another program")
    assert versions(trainer(tmp_path)) == [1, 2, 3]
    without: Any = SimpleNamespace(strategy=SimpleNamespace(args=SimpleNamespace()))
    assert versions(without) == [1, 2, 3]


def test_a_universal_checkpoint_and_the_best_one_have_a_step_too(tmp_path: Path) -> None:
    saved(tmp_path, "latest", "best_global_step8")
    saved(tmp_path, "latest_universal", "global_step6_universal")
    assert versions(trainer(tmp_path)) == [8, 9, 10]
    assert versions(trainer(tmp_path, universal=True)) == [6, 7, 8]
