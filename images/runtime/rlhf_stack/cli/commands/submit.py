"""Submit a run to the Ray cluster of this machine, if it can run there, and follow it to its end.

Plans the run on what the cluster has free now, and refuses one that cannot be placed or does not fit, with
the reason; the command then goes to Ray's job server as it is, its output comes here, and its exit code is
that of this command (1 if Ray has none). A command that is no run of OpenRLHF is submitted without a plan.

  rlhf-stack submit -- python -m openrlhf.cli.train_ppo_ray ...
  rlhf-stack submit --gpu-memory 80 --env WANDB_API_KEY --env NCCL_DEBUG=INFO -- python -m ...

Ray's workers have the environment of the machine on which they run, and not that of this shell. The variables
of rlhf_stack that are set here (RLHF_STACK_VERIFY_SYNC and its like) go along in the runtime_env, and so does
each that --env names. Interrupted, the job goes on: `ray job logs -f` and `ray job stop` take its id.

Exit code 3: the run does not fit and was not submitted. --force submits it all the same. --json prints
rlhf-stack/submit/1 at the end, after the output of the job on stderr: `submitted`, `job`, `status`, `code`,
`problems`.
"""

import argparse
import asyncio
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_stack.cli import option_types, run_options
from rlhf_stack.cli.json_output import show_json
from rlhf_stack.cluster.connect import said
from rlhf_stack.cluster.readiness import DASHBOARD
from rlhf_stack.config import env_vars
from rlhf_stack.errors import UserError
from rlhf_stack.openrlhf import command_line

REFUSED = 3
PREFIX = "RLHF_STACK_"
OF_THE_IMAGE = (env_vars.ACCELERATOR, "RLHF_STACK_TOLD")  # set by it on every machine
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


@dataclass(frozen=True)
class Ended:
    """How a job ended; ``code`` is its exit code, if Ray tells one."""

    job: str
    status: str
    code: int


def arguments(parser: argparse.ArgumentParser) -> None:
    """The cluster, what goes along, and the command line."""
    parser.add_argument(
        "--address", default=DASHBOARD, metavar="URL", help=f"of Ray's job server ({DASHBOARD})"
    )
    parser.add_argument(
        "--ray", default="auto", metavar="ADDRESS", help="of the cluster, to plan on it (auto)"
    )
    parser.add_argument(
        "--gpu-memory",
        type=option_types.amount,
        default=0.0,
        metavar="GIB",
        help="judge the memory of GPUs too",
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="a variable that goes along; repeatable",
    )
    parser.add_argument("--working-dir", metavar="FOLDER", help="a folder that Ray brings to every machine")
    parser.add_argument("--force", action="store_true", help="submit what does not fit, too")
    parser.add_argument("--json", action="store_true", help="print rlhf-stack/submit/1 (see above)")
    run_options.run_options(parser)


def run(options: argparse.Namespace) -> int:
    """Plan, submit, follow; the job's exit code."""
    words = run_options.command_of(options)
    environment = runtime_env(os.environ, options.env, options.working_dir)
    problems = _problems(options, words)
    for problem in problems:
        print(f"rlhf-stack: {problem}", file=sys.stderr)
    if problems and not options.force:
        print("rlhf-stack: not submitted; --force submits it all the same", file=sys.stderr)
        if options.json:
            show_json("submit", 1, submitted=False, job=None, status=None, code=REFUSED, problems=problems)
        return REFUSED
    ended = _follow(options.address, words, environment, sys.stderr if options.json else sys.stdout)
    if options.json:
        show_json(
            "submit",
            1,
            submitted=True,
            job=ended.job,
            status=ended.status,
            code=ended.code,
            problems=problems,
        )
    return ended.code


def runtime_env(
    environment: Mapping[str, str], named: Sequence[str], working_dir: str | None = None
) -> dict[str, Any]:
    """Ray's ``runtime_env`` for a job: rlhf_stack's settings in ``environment``, and what ``named`` says.

    `UserError` for a variable that is named without a value and not set.
    """
    variables = {
        name: value
        for name, value in environment.items()
        if name.startswith(PREFIX) and name not in OF_THE_IMAGE and value
    }
    for text in named:
        name, equals, value = text.partition("=")
        if not name or (not equals and name not in environment):
            raise UserError(f"--env {text}: {name or 'it'} is not set here; give it as NAME=VALUE")
        variables[name] = value if equals else environment[name]
    return {"env_vars": variables} | ({"working_dir": working_dir} if working_dir else {})


def _problems(options: argparse.Namespace, words: Sequence[str]) -> list[str]:
    """Why the run cannot go on the cluster as it is now; none of a command that is no run."""
    try:
        command_line.arguments_in(words)
    except command_line.ArgumentsError:
        return []
    from rlhf_stack.planning import report

    asked, _ = run_options.asked_run(options)
    machines = run_options.of_ray(options.ray, options.gpu_memory)
    return list(report(asked, machines, run_options.shapes(asked, options)).problems)


def _follow(address: str, words: Sequence[str], environment: Mapping[str, Any], output: Any) -> Ended:
    """Submit, write the job's output to ``output``, and say how it ended."""
    from aiohttp import ClientError
    from ray.exceptions import RayError
    from ray.job_submission import JobSubmissionClient

    try:
        client = JobSubmissionClient(address)
        job = client.submit_job(entrypoint=shlex.join(words), runtime_env=dict(environment))
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise UserError(f"Ray's job server at {address}: {said(error)}") from None
    print(f"rlhf-stack: job {job}", file=sys.stderr, flush=True)
    try:
        asyncio.run(_tail(client, job, output))
        info = client.get_job_info(job)
    except KeyboardInterrupt:
        print(f"rlhf-stack: job {job} goes on: ray job logs -f {job}, ray job stop {job}", file=sys.stderr)
        raise
    except (OSError, RuntimeError, RayError, ClientError) as error:
        raise _lost(job, address, said(error)) from None
    status = str(getattr(info.status, "value", info.status))
    if status not in ENDED:
        raise _lost(job, address, f"its log ended, and it is {status}")
    if status != "SUCCEEDED":
        print(f"rlhf-stack: job {job} {status.lower()}: {_first(info.message)}", file=sys.stderr)
    code = getattr(info, "driver_exit_code", None)
    return Ended(job, status, 0 if status == "SUCCEEDED" else code or 1)


def _lost(job: str, address: str, why: str) -> UserError:
    return UserError(
        f"Ray's head at {address} was lost while job {job} ran: {why}. A head that ended took its jobs with "
        "it, and knows none of them when it is started again: submit the command again, with the flag that "
        f"loads its last checkpoint. If only the connection was lost: ray job logs -f {job}"
    )


def _first(message: str | None) -> str:
    """A message without the log that Ray repeats after it."""
    return (message or "no reason").split(", last available logs")[0].splitlines()[0]


async def _tail(client: Any, job: str, output: Any) -> None:
    async for lines in client.tail_job_logs(job):
        print(lines, end="", file=output, flush=True)
