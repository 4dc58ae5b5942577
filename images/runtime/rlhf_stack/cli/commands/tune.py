"""Choose the fastest settings with which a run fits its cluster, and give a reason for each.

Uses the command line of the run, the machines and the memory model of `plan`. Chooses the largest micro
batches, no unnecessary offloading or recomputation, sleep mode where engines and trainer share GPUs, and the
engine's fraction of GPU memory. Exit code 1 if no known setting makes the run fit.

  rlhf-stack tune --nodes 2 --gpus 8 --gpu-memory 80 -- python -m openrlhf.cli.train_ppo_ray ...
  eval "$(rlhf-stack tune --nodes 2 --gpus 8 --gpu-memory 80 --apply -- python -m ...)"

--apply prints only the complete command line with the chosen settings; messages of OpenRLHF's parser go to
standard error. --json prints rlhf-stack/profile/1: `fits`, `settings` (setting: a flag or a variable;
dropped: whether to remove it; reason), `command_line` and `said` (messages of the parser).
"""

import argparse
import shlex
import sys

from rlhf_stack.cli import run_options
from rlhf_stack.cli.json_output import print_json
from rlhf_stack.errors import UserError
from rlhf_stack.planning.tuning import apply_settings, tune


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the cluster, the run and the output."""
    run_options.add_cluster_options(parser)
    run_options.add_run_options(parser)
    parser.add_argument(
        "--apply", action="store_true", help="print the command line with the chosen settings"
    )
    parser.add_argument("--json", action="store_true", help="print rlhf-stack/profile/1 (see above)")


def run(options: argparse.Namespace) -> int:
    """Choose the settings and print them; return 1 if the run does not fit."""
    if options.apply and options.json:
        raise UserError("--apply and --json exclude each other: JSON has the command line too")
    command = run_options.command_words(options)
    with run_options.environment_of_run(command):
        machines = run_options.read_machines(options)
        run, notes = run_options.parse_run(options, machines)
        if not all(machine.gpu_memory for machine in machines if machine.gpus):
            raise UserError("the GPU memory is required: give --gpu-memory GIB, or gpu_memory in the file")
        tuned = tune(run, machines, run_options.read_shapes(run, options))
    words = apply_settings(command, tuned)
    for note in () if options.json else notes:
        print(f"OpenRLHF: {note}", file=sys.stderr)
    if options.json:
        settings = [
            {"setting": one.text, "dropped": one.dropped, "reason": one.reason} for one in tuned.settings
        ]
        print_json("profile", 1, fits=tuned.fits, settings=settings, command_line=words, said=list(notes))
    elif options.apply and tuned.fits:
        print(shlex.join(words))
    else:
        for one in tuned.settings:
            print(f"{('no ' if one.dropped else '') + one.text:45} {one.reason}")
        for problem in tuned.problems:
            print(f"problem: {problem}")
    return 0 if tuned.fits else 1
