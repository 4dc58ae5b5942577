"""Ask the runs of this cluster for a checkpoint now, for instance before a machine is taken away.

OpenRLHF 0.11.2 saves the last step that ended: while engines generate it does so at once, otherwise at the
end of the step. Another step begins when the checkpoint is complete. A run before the end of its first step,
and a run of another release, does not answer.

  rlhf-stack checkpoint                        every run saves within 60 s
  rlhf-stack checkpoint --within 25            as a preStop hook of Kubernetes, or on a spot machine's notice
  rlhf-stack checkpoint --json | jq '.runs[].step'

Exit code: 0 every run that answered saved a checkpoint; 1 a run did not, or none answered.

--json prints rlhf-stack/checkpoint/1: `runs` (job: Ray's id of it, done: whether it answered in time, saved,
step, seconds of the save, problem).
"""

import argparse
from dataclasses import asdict

from rlhf_stack.cli.json_output import print_json
from rlhf_stack.cli.option_types import seconds
from rlhf_stack.cluster.connect import connected
from rlhf_stack.errors import UserError
from rlhf_stack.recovery import preemption

SECONDS = 60.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the time and the cluster."""
    parser.add_argument(
        "--within", type=seconds, default=SECONDS, metavar="SECONDS", help=f"time limit ({SECONDS:.0f})"
    )
    parser.add_argument("--ray", default="auto", metavar="ADDRESS", help="address of the cluster (auto)")
    parser.add_argument("--json", action="store_true", help="print rlhf-stack/checkpoint/1 (see above)")


def run(options: argparse.Namespace) -> int:
    """Ask for checkpoints and print the answers."""
    with connected(options.ray):
        replies = preemption.request(options.within)
    if not replies:
        raise UserError("no run answered: none has ended a step, or their release saves none on request", 1)
    if options.json:
        print_json("checkpoint", 1, runs=[asdict(reply) for reply in replies])
    else:
        for reply, line in zip(replies, preemption.describe(replies), strict=True):
            print(f"job {reply.job}: {line}")
    return 0 if all(reply.saved for reply in replies) else 1
