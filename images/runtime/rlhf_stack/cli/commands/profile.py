"""Tune the settings of a run for its model, its length and its cluster, each with its reason.

Takes the command line that you mean to run, and the machines as `plan` does, and looks by the same model of
memory for the settings that fit and cost least: micro batches as large as there is room for, no offloading
and no recomputation that is not needed, sleep where GPUs are shared, the engine's share of a GPU. Exit code
1 if no setting that is known here makes the run fit.

  rlhf-stack profile --nodes 2 --gpus 8 --gpu-memory 80 -- python -m openrlhf.cli.train_ppo_ray ...
  eval "$(rlhf-stack profile --nodes 2 --gpus 8 --gpu-memory 80 --apply -- python -m ...)"

--apply prints the whole command line with the settings in it, and nothing else. --json prints
rlhf-stack/profile/1: `fits`, `settings` (setting: a flag or a variable; dropped: whether it is to be left
out; reason) and `command_line`.
"""

import argparse
import shlex

from rlhf_stack.cli import run_options
from rlhf_stack.cli.json_output import show_json
from rlhf_stack.errors import UserError
from rlhf_stack.planning.tuning import applied, tune


def arguments(parser: argparse.ArgumentParser) -> None:
    """The cluster, the models, how to show it, and the command line of the run."""
    run_options.cluster_options(parser)
    run_options.run_options(parser)
    parser.add_argument("--apply", action="store_true", help="print the command line with the settings in it")
    parser.add_argument("--json", action="store_true", help="print rlhf-stack/profile/1 (see above)")


def run(options: argparse.Namespace) -> int:
    """Tune and show; 1 if nothing fits."""
    asked, _ = run_options.asked_run(options)
    machines = run_options.machines(options)
    if not all(machine.gpu_memory for machine in machines if machine.gpus):
        raise UserError(
            "settings follow from the memory of the GPUs: give --gpu-memory GIB, or gpu_memory in the file"
        )
    tuned = tune(asked, machines, run_options.shapes(asked, options))
    words = applied(run_options.command_of(options), tuned)
    if options.json:
        settings = [
            {"setting": one.text, "dropped": one.dropped, "reason": one.reason} for one in tuned.settings
        ]
        show_json("profile", 1, fits=tuned.fits, settings=settings, command_line=words)
    elif options.apply and tuned.fits:
        print(shlex.join(words))
    else:
        for one in tuned.settings:
            print(f"{('no ' if one.dropped else '') + one.text:45} {one.reason}")
        for problem in tuned.problems:
            print(f"problem: {problem}")
    return 0 if tuned.fits else 1
