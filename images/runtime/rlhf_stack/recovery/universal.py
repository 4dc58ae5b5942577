"""Conversion of a checkpoint of DeepSpeed, so that another number of ranks can load it."""

import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from rlhf_stack.errors import UserError
from rlhf_stack.telemetry.run_log import messages

METRIC = "metric.json"  # CKPT_METRIC_FILENAME of OpenRLHF 0.11.2
CONVERTER = (sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state")


def convert(folders: Iterable[Path], name: str) -> None:
    """Convert the checkpoints ``name`` in ``folders``, one for each role, by DeepSpeed's own program.

    Each folder then has ``global_stepN_universal`` and a ``latest_universal`` that names it. `UserError` with
    the program's last line if it fails. Source: ``deepspeed/checkpoint/ds_to_universal.py``.
    """
    for folder in folders:
        tag = folder / name
        # OpenRLHF removes a folder best* before it has saved the next one.
        converted = folder / f"{name.removeprefix('best_')}_universal"
        messages.info(f"converting {tag} for another number of ranks")
        shutil.rmtree(converted, ignore_errors=True)  # what an interrupted conversion left
        done = subprocess.run(
            [*CONVERTER, "--input_folder", str(tag), "--output_folder", str(converted)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            last = (done.stdout.strip().splitlines() or ["no output"])[-1]
            raise UserError(f"{tag} cannot be converted for another number of ranks: {last}")
        if (metric := tag / METRIC).is_file():  # upstream removes a folder without one first
            shutil.copyfile(metric, converted / METRIC)
