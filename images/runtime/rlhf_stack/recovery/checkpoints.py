"""The checkpoints of a run: which are complete, and the choice of the one that the next attempt loads.

DeepSpeed writes ``latest`` when its rank 0 has saved, and actor and critic save one after the other. After a
fault ``latest`` may therefore name a checkpoint without the files of other ranks, or two different steps.
"""

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_stack.openrlhf import command_line
from rlhf_stack.openrlhf.run_spec import ACTOR, CRITIC, Run, run_of
from rlhf_stack.recovery import universal

TAG = re.compile(r"(?:best_)?global_step(\d+)")  # regular, or the best of an evaluation
OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt")
SHARDED_MODEL = re.compile(r"(?:bf16_)?zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt")
MODEL = re.compile(r"mp_rank_\d+_model_states\.pt")
LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
CONVERT = "convert the checkpoint by `python -m deepspeed.checkpoint.ds_to_universal` (see docs/faults.md)"
UNIVERSAL_FLAG = "--ds.use_universal_ckpt"
ASIDE = "incomplete"
END_RECORD, END_BYTES = b"PK\5\6", 22  # of a zip file without a comment, as torch writes it


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints that a run saves below ``folder``: for each of ``ranks``, a folder ``_ROLE``.

    ``every`` is the number of steps between two of them, 0 if none is saved. ``loads`` is whether the command
    already has ``load_flag``. ``stage`` and ``tensor_parallel`` decide the files of a checkpoint. If
    ``universal``, the command loads checkpoints that were converted into DeepSpeed's universal ones; None if
    the release of OpenRLHF cannot. ``unsaved`` describes state of the run that its checkpoints lack, with the
    flags that the run has it by.
    """

    folder: Path
    ranks: dict[str, int]
    every: int
    load_flag: str
    loads: bool
    stage: int
    tensor_parallel: int = 1
    universal: bool | None = None
    unsaved: tuple[str, ...] = ()

    def loaded_step(self) -> int:
        """Return the step that a command with ``load_flag`` continues from, 0 if none or a universal one.

        If the roles name different ones, it is the lowest.
        """
        names = [] if self.universal else [_named_by(self._of(role) / LATEST) for role in self.ranks]
        return min((int(found[1]) for name in names if (found := TAG.fullmatch(name))), default=0)

    def own_since(self, loaded: int) -> float:
        """Return since when checkpoints of steps after ``loaded`` are written by a run that begins now.

        It is 0 if there are none. The time is that of the file system, which wrote those that are there.
        """
        found = [tag for role in self.ranks for tag, step in self._tags(role).items() if step > loaded]
        newest = max((_written(tag, max) for tag in found), default=0.0)
        return math.nextafter(newest, math.inf) if newest else 0.0

    def complete_steps(self, since: float, loaded: int = 0) -> set[int]:
        """Return the steps of which every role has a complete checkpoint of this run.

        These are written after ``since``, in unix seconds, or at most the step ``loaded`` from which the run
        continued. Others are what an earlier run left, or what was abandoned to go back to ``loaded``.
        """
        return set(self._complete(since, loaded))

    def select(self, step: int, since: float, loaded: int = 0) -> list[Path]:
        """Make ``step`` the latest checkpoint of each role; return what was set aside, under new names.

        These are checkpoints of later steps written after ``since``; for step 0, which has no checkpoint, the
        folders of all roles.
        """
        moved, name = [], self._name(step, since, loaded)
        for role in self.ranks:
            if not step:
                moved += [_set_aside(self._of(role))] if self._of(role).is_dir() else []
                continue
            latest = self._of(role) / LATEST
            if _named_by(latest) != name:  # before what it names is moved: a full disk may refuse it
                unfinished = latest.with_name(f"{LATEST}.unfinished")
                unfinished.write_text(name, encoding="ascii")
                unfinished.rename(latest)
            for tag, later in self._tags(role).items():
                if later > step and _written(tag, max) >= since:
                    moved.append(_set_aside(tag))
        return moved

    def convert(self, step: int, since: float, loaded: int = 0) -> None:
        """Convert the checkpoint of ``step`` in `complete_steps` of each role, see `universal.convert`."""
        universal.convert([self._of(role) for role in self.ranks], self._name(step, since, loaded))

    def obstacles(self) -> list[str]:
        """Return why the run cannot load its latest checkpoints, which have the state of every rank.

        DeepSpeed loads them with as many ranks as saved them, or universal ones with any number, and those of
        different steps silently.
        """
        try:
            return self._obstacles()
        except OSError as error:
            where = error.filename or self.folder
            return [f"the checkpoint to load cannot be read: {where}: {error.strerror or error}"]

    def _obstacles(self) -> list[str]:
        found = self._different_steps() if self.loads else []
        for role, ranks in self.ranks.items() if self.loads and self.stage else ():
            if self.universal:
                latest = self._of(role) / LATEST_UNIVERSAL
                if self._of(role).is_dir() and not latest.is_file():
                    found.append(
                        f"{UNIVERSAL_FLAG}: {latest} does not exist: {CONVERT}, or leave out this flag"
                    )
                continue
            latest = self._of(role) / LATEST
            tag = _named_by(latest)
            if not tag:
                continue
            folder = self._of(role) / tag
            files = [file.name for file in folder.glob("*.pt")]
            saved = sum(bool(OPTIMIZER.fullmatch(name)) for name in files)
            remedy = f"leave out {self.load_flag} and start from a saved model"
            if not folder.is_dir():
                found.append(f"{latest} names {tag}, which does not exist: {self._if_interrupted()}{remedy}")
            elif saved and saved != ranks:
                convert = "" if self.universal is None else f"{CONVERT}, "
                found.append(
                    f"the checkpoint {tag} in {self._of(role)} has the optimizer's state of {saved} ranks, "
                    f"and {role} has {ranks} in this run, for which DeepSpeed does not load it: "
                    f"{self._if_interrupted() if saved < ranks else ''}give {role} {saved} ranks, {convert}"
                    f"or {remedy}"
                )
            elif self._completed(role, folder, 0.0) is None:
                found.append(
                    f"the checkpoint {tag} in {self._of(role)} is damaged, a file is missing or was not "
                    f"written to its end: {self._if_interrupted()}{remedy}"
                )
        return found

    def _different_steps(self) -> list[str]:
        """Return which steps the roles would continue from, if these differ.

        A role without a folder was never saved, and is meant to begin anew.
        """
        name = LATEST_UNIVERSAL if self.universal else LATEST
        latest = {role: _named_by(self._of(role) / name) for role in self.ranks if self._of(role).is_dir()}
        if len({tag.removeprefix("best_") for tag in latest.values()}) < 2:
            return []
        tags = ", ".join(f"{tag or 'missing'} in {self._of(role)}" for role, tag in latest.items())
        remedy = "convert the same step of each, or " if self.universal else self._if_interrupted()
        return [
            f"the latest checkpoint is {tags}, so that the roles would continue from different steps: "
            f"{remedy}leave out {self.load_flag} and start from a saved model"
        ]

    def _if_interrupted(self) -> str:
        """What to do if the latest checkpoint lacks ranks or a role because its save was interrupted."""
        upto = self.loaded_step()  # later ones may have been abandoned
        if not (complete := max(self.complete_steps(math.inf, upto), default=0)):
            return "if its save was interrupted, no complete one is left; otherwise "
        name = self._name(complete, math.inf, upto)
        files = ", ".join(str(self._of(role) / LATEST) for role in self.ranks)
        return f"if its save was interrupted, write {name}, which is complete, to {files}; otherwise "

    def _of(self, role: str) -> Path:
        return self.folder / f"_{role}"

    def _name(self, step: int, since: float, loaded: int) -> str:
        return self._complete(since, loaded).get(step, f"global_step{step}")

    def _complete(self, since: float, loaded: int) -> dict[int, str]:
        """The names of `complete_steps`; of two for a step the newer one.

        OpenRLHF saves the best one of an evaluation after the regular one. A run that continued from the
        regular one would not know its metric, and replace it by a worse one.
        """
        found = [
            {
                (step, tag.name): time
                for tag, step in self._tags(role).items()
                if (time := self._completed(role, tag, 0.0 if step <= loaded else since)) is not None
            }
            for role in self.ranks
        ]
        common = sorted(set.intersection(*map(set, found)), reverse=True)  # best_... last, if equally new
        return dict(sorted(common, key=lambda one: found[0][one]))

    def _tags(self, role: str) -> dict[Path, int]:
        """The checkpoints of a role and their steps, complete or not."""
        found = self._of(role).iterdir() if self._of(role).is_dir() else ()
        return {tag: int(match[1]) for tag in found if (match := TAG.fullmatch(tag.name))}

    def _completed(self, role: str, tag: Path, since: float) -> float | None:
        """When the last file of a checkpoint was written.

        None if the files of every rank are not there, each written after ``since`` and to its end.
        """
        ranks = self.ranks[role]
        model = (SHARDED_MODEL, ranks) if self.stage == 3 else (MODEL, self.tensor_parallel)
        expected = [model, *([(OPTIMIZER, ranks)] if self.stage else [])]
        try:
            files = [file for file in tag.iterdir() if file.suffix == ".pt"]
            counts = [sum(bool(name.fullmatch(file.name)) for file in files) for name, _ in expected]
            is_whole = counts == [count for _, count in expected] and all(map(_is_whole, files))
            return _written(tag, max) if is_whole and _written(tag, min) >= since else None
        except FileNotFoundError:  # a rank that is ending has removed it meanwhile
            return None


def checkpoints_of(words: Sequence[str]) -> tuple[Run, Checkpoints]:
    """Return the run and its checkpoints; `ArgumentsError` if OpenRLHF rejects the command line."""
    parsed = command_line.parse(command_line.extract_arguments(words))
    run = run_of(parsed.release, parsed.values)
    folder, every, loads, without = _settings(run, parsed.values)
    is_universal = None if run.flat else bool(parsed.values.ds.use_universal_ckpt)
    ranks = {role.name: role.ranks for role in run.roles if role.name in (ACTOR, CRITIC)}
    flag = "--load_checkpoint" if run.flat else "--ckpt.load_enable"
    saved = 0 if without else max(0, every)
    of_zero = run.zero.stage, run.tensor_parallel, is_universal
    return run, Checkpoints(Path(folder), ranks, saved, flag, loads, *of_zero, _unsaved(run))


def _settings(run: Run, values: Any) -> tuple[str, int, bool, bool]:
    """The folder, the steps between checkpoints, whether one is loaded, and whether DeepSpeed's are off."""
    if run.flat:
        disabled = bool(getattr(values, "disable_ds_ckpt", False))
        return values.ckpt_path, values.save_steps, values.load_checkpoint, disabled
    own = values.ckpt
    return own.path, own.save_steps, own.load_enable, own.disable_ds


def _unsaved(run: Run) -> tuple[str, ...]:
    """Describe the state of a run that is in no checkpoint."""
    flag = "--enable_ema" if run.flat else "--train.enable_ema"
    return (f"the moving average of the weights ({flag})",) if run.ema else ()


def _named_by(latest: Path) -> str:
    """The checkpoint that a file of DeepSpeed names; empty without the file."""
    return latest.read_text(encoding="utf-8").strip() if latest.is_file() else ""


def _written(tag: Path, choose: Callable[[list[float]], float]) -> float:
    """The oldest or newest time of a checkpoint's files; 0 without a file."""
    return choose([file.stat().st_mtime for file in tag.glob("*.pt")] or [0.0])


def _is_whole(file: Path) -> bool:
    """Whether torch wrote a file to its end.

    `zipfile.is_zipfile` is also False for an error of the file system, such as ESTALE of NFS.
    """
    with file.open("rb") as opened:
        opened.seek(max(0, os.fstat(opened.fileno()).st_size - END_BYTES))
        return opened.read().startswith(END_RECORD)


def _set_aside(path: Path) -> Path:
    """Rename a folder so that no run loads it.

    OpenRLHF keeps so many folders (``--ckpt.max_num``), whatever their names, and removes first those without
    the metric of an evaluation, then the oldest. Without the metric and the oldest, this one goes first.
    """
    number = 1
    while (aside := path.with_name(f"{ASIDE}-{path.name}-{number}")).exists():
        number += 1
    path.rename(aside)
    (aside / universal.METRIC).unlink(missing_ok=True)
    os.utime(aside, (0, 0))
    return aside
