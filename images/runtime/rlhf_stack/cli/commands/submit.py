"""Submit a run to the Ray cluster of this machine if it fits, and follow it until it ends.

Plans the run with the free resources of the cluster, and refuses it with the reason if it cannot be placed or
does not fit. Otherwise submits the unchanged command line to Ray's job server, prints the job's output, and
exits with the job's exit code (1 if Ray reports none, or one of the codes below). A command other than an
OpenRLHF run is not planned.

  rlhf-stack submit -- python -m openrlhf.cli.train_ppo_ray ...
  rlhf-stack submit --gpu-memory 80 --env WANDB_API_KEY --env NCCL_DEBUG=INFO -- python -m ...

Ray's workers inherit the environment of their machine, not of this shell. The runtime_env of the job contains
the RLHF_STACK_* variables of this shell, such as RLHF_STACK_VERIFY_SYNC, and the variables named by --env.
Ctrl-C does not stop the job: use `ray job logs -f ID` and `ray job stop ID`.

Exit codes of submit itself: 120 the run does not fit and was not submitted (--force submits it anyway), 121
wrong usage, or the job could not be submitted, 122 the connection to the running job was lost. --json prints
rlhf-stack/submit/1 when the job has ended, with the job's output on stderr: `submitted`, `job`, `status`,
`code` (that of the job, unchanged), `problems`.
"""

import argparse
import asyncio
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_stack.cli import run_options
from rlhf_stack.cli.json_output import print_json
from rlhf_stack.cli.option_types import gibibytes
from rlhf_stack.cluster.connect import summarize_ray_error
from rlhf_stack.cluster.readiness import DASHBOARD
from rlhf_stack.config import env_vars
from rlhf_stack.errors import UserError
from rlhf_stack.openrlhf import command_line

REFUSED, WRONG_USAGE, LOST = 120, 121, 122  # exit codes that are never those of the job
PREFIX = "RLHF_STACK_"
OF_THE_IMAGE = (env_vars.ACCELERATOR, "RLHF_STACK_TOLD")  # set by the image on every machine
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


@dataclass(frozen=True)
class Ended:
    """The final state of a job; ``code`` is its exit code, or 1 if it failed and Ray reports none."""

    job: str
    status: str
    code: int


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the cluster, the job and the run."""
    parser.add_argument(
        "--address", default=DASHBOARD, metavar="URL", help=f"address of Ray's job server ({DASHBOARD})"
    )
    parser.add_argument(
        "--ray", default="auto", metavar="ADDRESS", help="address of the cluster to plan on (auto)"
    )
    parser.add_argument(
        "--gpu-memory",
        type=gibibytes,
        default=0.0,
        metavar="GIB",
        help="memory per GPU, in GiB or as 80GB; required to check it",
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="a variable for the job; repeatable",
    )
    parser.add_argument("--working-dir", metavar="FOLDER", help="a folder that Ray copies to every machine")
    parser.add_argument("--force", action="store_true", help="submit a run that does not fit")
    parser.add_argument("--json", action="store_true", help="print rlhf-stack/submit/1 (see above)")
    run_options.add_run_options(parser)


def run(options: argparse.Namespace) -> int:
    """Plan the run, submit it and follow it; return the job's exit code."""
    words = run_options.command_words(options)
    environment = runtime_env(os.environ, options.env, options.working_dir)
    problems = _problems(options, words)
    for problem in problems:
        print(f"rlhf-stack: {problem}", file=sys.stderr)
    if problems and not options.force:
        print("rlhf-stack: not submitted; --force submits it anyway", file=sys.stderr)
        if options.json:
            print_json("submit", 1, submitted=False, job=None, status=None, code=REFUSED, problems=problems)
        return REFUSED
    ended = _follow(options.address, words, environment, sys.stderr if options.json else sys.stdout)
    if options.json:
        print_json(
            "submit",
            1,
            submitted=True,
            job=ended.job,
            status=ended.status,
            code=ended.code,
            problems=problems,
        )
    return 1 if ended.code in (REFUSED, WRONG_USAGE, LOST) else ended.code


def runtime_env(
    environment: Mapping[str, str], named: Sequence[str], working_dir: str | None = None
) -> dict[str, Any]:
    """Ray's ``runtime_env`` for a job: the RLHF_STACK_* variables of ``environment`` and those in ``named``.

    ``named`` has entries NAME or NAME=VALUE; `UserError` for a NAME that is not in ``environment``.
    """
    variables = {
        name: value
        for name, value in environment.items()
        if name.startswith(PREFIX) and name not in OF_THE_IMAGE and value
    }
    for text in named:
        name, equals, value = text.partition("=")
        if not name or (not equals and name not in environment):
            raise UserError(f"--env {text}: {name or 'it'} is not set in this shell; give it as NAME=VALUE")
        variables[name] = value if equals else environment[name]
    return {"env_vars": variables} | ({"working_dir": working_dir} if working_dir else {})


def _problems(options: argparse.Namespace, words: Sequence[str]) -> list[str]:
    """The reasons why the run cannot start on the cluster now; none for a command that is not a run."""
    try:
        command_line.extract_arguments(words)
    except command_line.ArgumentsError:
        return []
    from rlhf_stack.planning import assess

    run, _ = run_options.parse_run(options)
    machines = run_options.ray_machines(options.ray, options.gpu_memory)
    return list(assess(run, machines, run_options.read_shapes(run, options)).problems)


def _follow(address: str, words: Sequence[str], environment: Mapping[str, Any], output: Any) -> Ended:
    """Submit the job, copy its output to ``output`` until it ends, and return its final state."""
    from aiohttp import ClientError
    from ray.exceptions import RayError
    from ray.job_submission import JobSubmissionClient

    try:
        client = JobSubmissionClient(address)
        job = client.submit_job(entrypoint=shlex.join(words), runtime_env=dict(environment))
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise UserError(f"Ray's job server at {address}: {summarize_ray_error(error)}") from None
    print(f"rlhf-stack: job {job}", file=sys.stderr, flush=True)
    try:
        asyncio.run(_tail(client, job, output))
        info = client.get_job_info(job)
    except KeyboardInterrupt:
        print(
            f"rlhf-stack: job {job} is still running: ray job logs -f {job}, ray job stop {job}",
            file=sys.stderr,
        )
        raise
    except (OSError, RuntimeError, RayError, ClientError) as error:
        raise _lost(job, address, summarize_ray_error(error)) from None
    status = str(getattr(info.status, "value", info.status))
    if status not in ENDED:
        raise _lost(job, address, f"its log ended, but its status is {status}")
    if status != "SUCCEEDED":
        print(f"rlhf-stack: job {job} {status.lower()}: {_first(info.message)}", file=sys.stderr)
    code = getattr(info, "driver_exit_code", None)
    return Ended(job, status, 0 if status == "SUCCEEDED" else code or 1)


def _lost(job: str, address: str, why: str) -> UserError:
    return UserError(
        f"Ray's head at {address} was lost while job {job} ran: {why}. If the head ended, its jobs ended "
        "too, and a restarted head does not know them: submit the command again, with the flag that loads "
        f"its last checkpoint. If only the connection was lost: ray job logs -f {job}",
        LOST,
    )


def _first(message: str | None) -> str:
    """The first line of a message, without the log lines that Ray appends."""
    return (message or "no reason").split(", last available logs")[0].splitlines()[0]


async def _tail(client: Any, job: str, output: Any) -> None:
    async for lines in client.tail_job_logs(job):
        print(lines, end="", file=output, flush=True)
