"""rlhf_stack.recovery.checkpoints: which checkpoints are complete, and what the next attempt loads."""

import errno
import json
import os
import shutil
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from rlhf_stack.cli import supervised
from rlhf_stack.errors import UserError
from rlhf_stack.recovery import checkpoints as checkpoints_module
from rlhf_stack.recovery import universal
from rlhf_stack.recovery.checkpoints import Checkpoints
from rlhf_stack.recovery.supervisor import (
    GivenUpError,
    Limits,
    State,
    Supervisor,
    last_saved,
    select_checkpoint,
)

EARLIER, BEGAN, NOW = 1000.0, 2000.0, 3000.0


def checkpoints(folder: Path, stage: int = 2, **ranks: int) -> Checkpoints:
    return Checkpoints(folder, ranks or {"actor": 2}, 1, "--load", loads=False, stage=stage)


def save(
    folder: Path,
    role: str,
    step: int,
    ranks: int = 2,
    stage: int = 2,
    written: float = NOW,
    prefix: str = "global_step",
) -> Path:
    """Write the files of a checkpoint, as DeepSpeed names them, and `latest`."""
    tag = folder / f"_{role}" / f"{prefix}{step}"
    tag.mkdir(parents=True)
    names = [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(ranks if stage else 0)]
    if stage == 3:
        names += [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(ranks)]
    else:
        names.append("mp_rank_00_model_states.pt")
    for name in names:
        with zipfile.ZipFile(tag / name, "w") as archive:
            archive.writestr("data", bytes(100))
        os.utime(tag / name, (written, written))
    (tag.parent / "latest").write_text(tag.name)
    return tag


def latest(folder: Path, role: str) -> str:
    return (folder / f"_{role}" / "latest").read_text()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_checkpoint_with_the_files_of_every_rank_is_complete(tmp_path: Path, stage: int) -> None:
    save(tmp_path, "actor", 4, stage=stage)
    assert checkpoints(tmp_path, stage).complete_steps(BEGAN) == {4}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_checkpoint_without_the_file_of_a_rank_is_not_complete(tmp_path: Path, stage: int) -> None:
    save(tmp_path, "actor", 4, stage=stage)
    next((tmp_path / "_actor/global_step4").glob("*rank_1_mp*")).unlink()
    assert checkpoints(tmp_path, stage).complete_steps(BEGAN) == set()


def test_a_checkpoint_of_another_number_of_ranks_is_not_complete(tmp_path: Path) -> None:
    save(tmp_path, "actor", 4, ranks=3)
    assert checkpoints(tmp_path, actor=2).complete_steps(BEGAN) == set()


@pytest.mark.parametrize(
    ("ranks", "stage", "loads", "refused"),
    [(3, 2, True, True), (3, 3, True, True), (2, 2, True, False), (3, 2, False, False), (3, 0, True, False)],
)
def test_a_checkpoint_of_another_number_of_ranks_is_refused(
    tmp_path: Path, ranks: int, stage: int, loads: bool, refused: bool
) -> None:
    assert Checkpoints(tmp_path, {"actor": 2}, 1, "--load", loads, stage).obstacles() == []
    save(tmp_path, "actor", 4, ranks, stage)
    found = Checkpoints(tmp_path, {"actor": 2}, 1, "--load", loads, stage).obstacles()
    assert len(found) == refused
    if refused:
        assert "global_step4" in found[0]
        assert "has the optimizer's state of 3 ranks, and actor has 2 in this run" in found[0]
        assert "interrupted" not in found[0]
        assert "leave out --load" in found[0]


def test_a_checkpoint_whose_save_was_interrupted_names_the_last_complete_one(tmp_path: Path) -> None:
    resumed = Checkpoints(tmp_path, {"actor": 2}, 1, "--load", loads=True, stage=2)
    next(save(tmp_path, "actor", 5).glob("*rank_1_mp*")).unlink()
    assert "if its save was interrupted, no complete one is left" in resumed.obstacles()[0]
    save(tmp_path, "actor", 4)
    (tmp_path / "_actor" / "latest").write_text("global_step5")
    (found,) = resumed.obstacles()
    assert f"write global_step4, which is complete, to {tmp_path / '_actor' / 'latest'}" in found


@pytest.mark.parametrize("damaged", ["*optim_states.pt", "mp_rank_*"])
@pytest.mark.parametrize("is_missing", [True, False])
def test_a_checkpoint_with_a_damaged_file_is_refused(tmp_path: Path, damaged: str, is_missing: bool) -> None:
    resumed = Checkpoints(tmp_path, {"actor": 2}, 1, "--load", loads=True, stage=2)
    save(tmp_path, "actor", 4)
    tag = save(tmp_path, "actor", 5)
    assert resumed.obstacles() == []
    for file in tag.glob(damaged):
        if is_missing:
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-30])
    (found,) = resumed.obstacles()
    assert "global_step5" in found
    assert "is damaged" in found
    assert f"write global_step4, which is complete, to {tag.with_name('latest')}" in found


@pytest.mark.parametrize("stage", [0, 2])
def test_roles_that_would_continue_from_different_steps_are_refused(tmp_path: Path, stage: int) -> None:
    resumed = Checkpoints(tmp_path, {"actor": 2, "critic": 2}, 1, "--load", loads=True, stage=stage)
    save(tmp_path, "actor", 20, stage=stage)
    assert resumed.obstacles() == [], "the critic was never saved"
    (tmp_path / "_critic").mkdir()
    (found,) = resumed.obstacles()
    assert f"global_step20 in {tmp_path / '_actor'}, missing in {tmp_path / '_critic'}" in found
    assert "no complete one is left; otherwise leave out --load" in found
    save(tmp_path, "critic", 20, stage=stage)
    assert resumed.obstacles() == []
    save(tmp_path, "actor", 40, stage=stage)
    (found,) = resumed.obstacles()
    assert f"global_step40 in {tmp_path / '_actor'}, global_step20 in {tmp_path / '_critic'}" in found
    files = ", ".join(str(tmp_path / role / "latest") for role in ("_actor", "_critic"))
    assert f"if its save was interrupted, write global_step20, which is complete, to {files}" in found
    save(tmp_path, "critic", 40, stage=stage)
    save(tmp_path, "actor", 40, stage=stage, prefix="best_global_step")
    assert resumed.obstacles() == [], "the best checkpoint of a step is the regular one"
    assert Checkpoints(tmp_path, resumed.ranks, 1, "--load", loads=False, stage=stage).obstacles() == []


def test_universal_checkpoints_of_different_steps_are_refused(tmp_path: Path) -> None:
    ranks = {"actor": 2, "critic": 2}
    universal = Checkpoints(tmp_path, ranks, 1, "--load", loads=True, stage=2, universal=True)
    for role, step in (("actor", 40), ("critic", 20)):
        latest_one = save(tmp_path, role, step).parent / "latest_universal"
        latest_one.write_text(f"global_step{step}_universal\n")
    (found,) = universal.obstacles()
    assert "convert the same step of each, or leave out --load" in found
    latest_one.write_text("global_step40_universal")
    assert universal.obstacles() == []


def test_a_universal_checkpoint_has_no_number_of_ranks_but_must_exist(tmp_path: Path) -> None:
    universal = Checkpoints(tmp_path, {"actor": 2}, 1, "--load", loads=True, stage=2, universal=True)
    assert universal.obstacles() == []
    tag = save(tmp_path, "actor", 4, ranks=3)
    (found,) = universal.obstacles()
    assert f"--ds.use_universal_ckpt: {tag.parent}/latest_universal does not exist" in found
    (tag.parent / "latest_universal").write_text("global_step4_universal")
    assert universal.obstacles() == []


def test_a_file_that_was_written_in_part_is_not_complete(tmp_path: Path) -> None:
    tag = save(tmp_path, "actor", 4)
    file = next(tag.glob("*optim_states.pt"))
    file.write_bytes(file.read_bytes()[:-30])
    os.utime(file, (NOW, NOW))
    assert checkpoints(tmp_path).complete_steps(BEGAN) == set()


def test_a_step_counts_only_if_every_role_has_it(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, "actor", step)
    save(tmp_path, "critic", 1, ranks=1)
    both = checkpoints(tmp_path, actor=2, critic=1)
    assert both.complete_steps(BEGAN) == {1}
    moved = both.select(1, BEGAN)
    assert latest(tmp_path, "actor") == latest(tmp_path, "critic") == "global_step1"
    assert [path.name for path in moved] == ["incomplete-global_step2-1"]
    assert moved[0].is_dir()


def rotated(folder: Path, most: int = 3) -> list[str]:
    """Remove folders as `save_ckpt` of OpenRLHF 0.11.2 does before a save; 0.5.1 knows no metrics."""

    def value(tag: Path) -> tuple[bool, str, float]:
        metric = tag / "metric.json"
        return metric.is_file(), metric.read_text() if metric.is_file() else "", tag.stat().st_mtime

    gone = []
    while len(found := [one for one in folder.iterdir() if one.is_dir()]) >= most:
        least = min(found, key=value)
        shutil.rmtree(least)
        gone.append(least.name)
    return gone


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_checkpoint_that_was_set_aside_is_the_first_that_openrlhf_removes(
    tmp_path: Path, evaluates: bool
) -> None:
    own = checkpoints(tmp_path, actor=2, critic=2)
    for step in (20, 40, 60):
        save(tmp_path, "actor", step)
    for step in (20, 40):
        save(tmp_path, "critic", step)
    for step in (20, 40, 60):
        tag = tmp_path / "_actor" / f"global_step{step}"
        if evaluates:
            (tag / "metric.json").write_text(f"{step}")
        os.utime(tag, (NOW + step, NOW + step))
    for _ in range(3):
        own.select(40, BEGAN)
        assert rotated(tmp_path / "_actor") == ["incomplete-global_step60-1"]
        save(tmp_path, "actor", 60)
    assert own.complete_steps(BEGAN) == {20, 40}


def test_the_best_checkpoint_of_an_evaluation_is_one_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the only one by default (--ckpt.save_steps -1), and knows its metric, unlike the regular one."""
    own, best = checkpoints(tmp_path, actor=2, critic=2), "best_global_step"
    for role in ("actor", "critic"):
        save(tmp_path, role, 40, prefix=best)
        save(tmp_path, role, 50, written=EARLIER)
    save(tmp_path, "actor", 60, prefix=best)
    assert own.complete_steps(BEGAN) == {40}
    assert [path.name for path in own.select(40, BEGAN)] == ["incomplete-best_global_step60-1"]
    assert latest(tmp_path, "actor") == latest(tmp_path, "critic") == "best_global_step40"
    names: list[str] = []
    monkeypatch.setattr(universal, "convert", lambda _, name: names.append(name))
    for written, expected in ((NOW - 1, f"{best}40"), (NOW, f"{best}40"), (NOW + 1, "global_step40")):
        for role in ("actor", "critic"):
            shutil.rmtree(tmp_path / f"_{role}" / "global_step40", ignore_errors=True)
            save(tmp_path, role, 40, written=written)
        own.select(40, BEGAN)
        own.convert(40, BEGAN)
        assert latest(tmp_path, "actor") == latest(tmp_path, "critic") == names[-1] == expected


def interrupted(folder: Path, job: Callable[[], object], kept: dict[str, Any] | None = None) -> State:
    """Start `submit --grace` of a command that loads a checkpoint, and interrupt it after ``job``."""
    own = replace(checkpoints(folder), loads=True)
    cluster = MagicMock(**{"return_value.recall.return_value": kept})
    states: list[State] = []

    def supervise(supervisor: Supervisor) -> None:
        states.append(supervisor.state)
        supervisor.state.job = "job"
        job()
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervised, "checkpoints_of", lambda _: (MagicMock(flat=False), own))
        patch.setattr(supervised, "RayCluster", cluster)
        patch.setattr(supervised.Supervision, "_stop", lambda *_: True)
        patch.setattr(Supervisor, "supervise", supervise)
        one = supervised.Supervision("", "", ["x", "--load"], Limits(0, grace=30.0), lambda *_: [], dict)
        with pytest.raises(KeyboardInterrupt):
            one.run(print)
    return states[0]


@pytest.fixture
def rolled_back(tmp_path: Path) -> Path:
    """A folder whose user went back to step 60."""
    for step in (40, 60, 80, 90, 100):
        save(tmp_path, "actor", step)
    (tmp_path / "_actor" / "latest").write_text("global_step60")
    return tmp_path


def save_again(folder: Path, step: int, files: str = "*") -> None:
    for file in (folder / "_actor" / f"global_step{step}").glob(files):
        os.utime(file, (NOW + step, NOW + step))
    (folder / "_actor" / "latest").write_text(f"global_step{step}")


def test_a_run_that_was_rolled_back_does_not_continue_from_what_was_abandoned(rolled_back: Path) -> None:
    """It jumped from step 60 to step 100 after its first fault."""
    interrupted(rolled_back, lambda: None)
    assert latest(rolled_back, "actor") == "global_step60"
    assert len(list((rolled_back / "_actor").glob("global_step*"))) == 5, "nothing is moved"


def test_a_run_that_was_rolled_back_continues_from_what_it_has_saved_again(rolled_back: Path) -> None:
    """Also after another supervisor has taken it over, for which ``latest`` names another step."""

    def job() -> None:
        save_again(rolled_back, 80)
        save_again(rolled_back, 100, "*rank_0_mp*")  # interrupted
        (rolled_back / "_actor" / "incomplete-global_step100-1").mkdir(exist_ok=True)

    state = interrupted(rolled_back, job)
    assert latest(rolled_back, "actor") == "global_step80"
    assert (rolled_back / "_actor" / "incomplete-global_step100-2").is_dir(), "set aside"
    (rolled_back / "_actor" / "latest").write_text("global_step100")
    interrupted(rolled_back, lambda: None, json.loads(json.dumps(state.to_json())))
    assert latest(rolled_back, "actor") == "global_step80", "not 90"
    shutil.rmtree(rolled_back / "_actor" / "global_step80")
    shutil.rmtree(rolled_back / "_actor" / "global_step60")
    interrupted(rolled_back, lambda: None, json.loads(json.dumps(state.to_json())))
    assert latest(rolled_back, "actor") == "global_step40", "as --ckpt.max_num may leave"


def test_a_damaged_checkpoint_is_not_replaced_by_an_abandoned_one(rolled_back: Path) -> None:
    next((rolled_back / "_actor" / "global_step60").glob("*optim_states.pt")).unlink()
    (found,) = replace(checkpoints(rolled_back), loads=True).obstacles()
    assert "write global_step40, which is complete" in found


def test_a_universal_checkpoint_that_was_loaded_is_not_replaced_by_an_earlier_one(tmp_path: Path) -> None:
    save(tmp_path, "actor", 20)
    own = replace(checkpoints(tmp_path), loads=True, universal=True)
    since = own.own_since(own.loaded_step())
    assert own.complete_steps(since, own.loaded_step()) == set()
    save(tmp_path, "actor", 60, written=NOW + 1)
    assert own.complete_steps(since, own.loaded_step()) == {60}


def test_a_run_that_goes_on_from_its_last_checkpoint_has_no_other_time_than_its_files(tmp_path: Path) -> None:
    save(tmp_path, "actor", 4, written=EARLIER)
    own = replace(checkpoints(tmp_path), loads=True)
    assert (own.loaded_step(), own.own_since(4)) == (4, 0.0), "whatever the clocks of two machines"


def test_an_error_of_the_file_system_does_not_make_a_checkpoint_incomplete(tmp_path: Path) -> None:
    """Every checkpoint was set aside, and the run began again."""
    file = save(tmp_path, "actor", 4) / "mp_rank_00_model_states.pt"
    file.unlink()
    file.symlink_to("/proc/self/mem")  # EIO
    own = replace(checkpoints(tmp_path), loads=True)
    with pytest.raises(GivenUpError, match=r"the checkpoint to continue from: .*Input/output error"):
        last_saved(own, State([], BEGAN))
    (found,) = own.obstacles()
    assert "the checkpoint to load cannot be read: " in found
    assert "Input/output error" in found


def test_what_an_earlier_run_left_is_neither_loaded_nor_moved(tmp_path: Path) -> None:
    save(tmp_path, "actor", 50, written=EARLIER)
    own = checkpoints(tmp_path)
    assert own.complete_steps(BEGAN) == set()
    save(tmp_path, "actor", 5)
    assert own.complete_steps(BEGAN) == {5}
    assert own.select(5, BEGAN) == []
    assert latest(tmp_path, "actor") == "global_step5"
    assert own.complete_steps(0.0) == {5, 50}


def test_a_full_disk_does_not_prevent_the_choice_of_the_latest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "actor", 4)
    own = checkpoints(tmp_path)
    next(save(tmp_path, "actor", 9).glob("*optim_states.pt")).unlink()
    (tmp_path / "_actor" / "latest").write_text("global_step4")
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(Path, "write_text", MagicMock(side_effect=full))
    assert [path.name for path in own.select(4, BEGAN)] == ["incomplete-global_step9-1"]
    assert latest(tmp_path, "actor") == "global_step4"


def test_a_latest_checkpoint_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    """DeepSpeed would end the run on an assertion, after all models were loaded."""
    save(tmp_path, "actor", 4)
    (tmp_path / "_actor" / "latest").write_text("global_step9")
    (found,) = replace(checkpoints(tmp_path), loads=True).obstacles()
    assert "latest names global_step9, which does not exist: if its save was interrupted, write" in found
    assert "global_step4, which is complete" in found


def test_a_checkpoint_that_is_removed_meanwhile_is_not_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a rank of a job that is ending removes an old one."""
    save(tmp_path, "actor", 4)
    monkeypatch.setattr(Path, "open", MagicMock(side_effect=FileNotFoundError))
    assert checkpoints(tmp_path).complete_steps(BEGAN) == set()


def test_without_a_complete_checkpoint_no_run_finds_a_folder_to_load(tmp_path: Path) -> None:
    tag = save(tmp_path, "actor", 1)
    next(tag.glob("*optim_states.pt")).unlink()
    own = checkpoints(tmp_path)
    (aside,) = own.select(0, BEGAN)
    assert not (tmp_path / "_actor").exists()
    assert (aside / "global_step1").is_dir()
    save(tmp_path, "actor", 1)
    assert [path.name for path in own.select(0, BEGAN)] == ["incomplete-_actor-2"]


@pytest.mark.parametrize(("loads", "universal"), [(True, None), (True, True), (False, None)])
def test_a_command_that_loads_finds_no_incomplete_checkpoint(
    loads: bool, universal: bool | None, tmp_path: Path
) -> None:
    """After a signal, too: `submit --grace` left the folder of an interrupted first save."""
    next(save(tmp_path, "actor", 1).glob("*optim_states.pt")).unlink()
    own = replace(checkpoints(tmp_path), loads=loads, universal=universal)
    moved = select_checkpoint(own, State([], BEGAN), 0)
    assert [path.name for path in moved] == (["incomplete-_actor-1"] if loads and not universal else [])


def test_a_run_that_has_not_saved_has_no_complete_step(tmp_path: Path) -> None:
    own = checkpoints(tmp_path / "missing", actor=2, critic=2)
    assert own.complete_steps(BEGAN) == set()
    assert own.select(0, BEGAN) == []


def test_checkpoints_are_converted_by_deepspeed_for_each_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for role in ("actor", "critic"):
        save(tmp_path, role, 4)
        (tmp_path / f"_{role}" / "global_step4_universal").mkdir()
        (tmp_path / f"_{role}" / "global_step4_universal" / "interrupted").touch()
    program = tmp_path / "converter.py"
    program.write_text("import sys; from pathlib import Path; Path(sys.argv[-1]).mkdir(); print(sys.argv)")
    monkeypatch.setattr(universal, "CONVERTER", (sys.executable, str(program)))
    checkpoints(tmp_path, actor=2, critic=2).convert(4, BEGAN)
    assert [list(one.iterdir()) for one in sorted(tmp_path.glob("_*/global_step4_universal"))] == [[], []]
    (tmp_path / "_actor" / "global_step4" / "metric.json").write_text("{}")
    checkpoints(tmp_path, actor=2).convert(4, BEGAN)
    kept = tmp_path / "_actor" / "global_step4_universal" / "metric.json"
    assert kept.is_file(), "OpenRLHF removes a checkpoint without one first"
    save(tmp_path, "actor", 5, prefix="best_global_step")
    checkpoints(tmp_path, actor=2).convert(5, BEGAN)
    assert (tmp_path / "_actor" / "global_step5_universal").is_dir(), "OpenRLHF removes best... too early"
    program.write_text("print('a line'); raise SystemExit('no universal information')")
    with pytest.raises(UserError, match=r"_actor/global_step4 cannot be converted .*: no universal info"):
        checkpoints(tmp_path, actor=2).convert(4, BEGAN)


@pytest.mark.parametrize(
    ("flat", "ema", "expected"),
    [
        (False, False, ()),
        (False, True, ("the moving average of the weights (--train.enable_ema)",)),
        (True, True, ("the moving average of the weights (--enable_ema)",)),
    ],
)
def test_what_no_checkpoint_has_is_named_by_its_flag(
    flat: bool, ema: bool, expected: tuple[str, ...]
) -> None:
    run: Any = SimpleNamespace(flat=flat, ema=ema)
    assert checkpoints_module._unsaved(run) == expected
