"""Submit a run to the Ray cluster of this machine if it fits, and follow it until it ends.

Plans the run with the free resources of the cluster, and refuses it with the reason if it cannot be placed or
does not fit; GPUs that another job holds are awaited for RLHF_STACK_PLACEMENT_TIMEOUT seconds (120) first.
Otherwise submits the unchanged command line to Ray's job server, prints the job's output, and exits with the
job's exit code (1 if Ray reports none, or one of the codes below). Only train_ppo_ray is planned. The
arguments of the installed OpenRLHF's SFT, DPO and RM are checked as by `plan`; another command, such as
one of a fork in --working-dir or --env PYTHONPATH, is submitted as it is, with a warning if it names one of
these programs and was not read as its start.

  rlhf-stack submit -- python -m openrlhf.cli.train_ppo_ray ...
  rlhf-stack submit --gpu-memory 80 --env NCCL_DEBUG=INFO --env WANDB_MODE -- python -m ...

Ray's workers inherit the environment of their machine, not of this shell. The runtime_env of the job contains
the RLHF_STACK_* variables of this shell, such as RLHF_STACK_VERIFY_SYNC, unless they have the default of the
image, and the variables named by --env. They are public: Ray shows them to everyone who reaches its
dashboard, so that a secret among them is a warning. Ctrl-C and SIGTERM do not stop the job: use `ray job logs
-f ID` and `ray job stop ID`.

With --restarts N a run that fails is submitted again up to N times, by this process: it removes what the run
left on each node, waits for lost nodes (--node-wait), selects the last checkpoint that is complete for every
rank and role, and adds the flag that loads it. With --min-nodes M it then continues on M nodes or more, with
fewer engines if it must, or with fewer ranks of the trainer, for which it converts the checkpoint. A node
that was lost twice is used again only if the run has no other place. What would fail again is not repeated: a
rejected command line, a known cause that the installed versions confirm, memory that ran out before the
attempt saved a checkpoint, or the same error of the program in two attempts in sequence without progress.
Ctrl-C and SIGTERM stop the job. If this process is killed, or the head does not answer for --node-wait
seconds (at least 30), the job continues; the same command follows it again, unless the head was restarted. So
it does after a signal, if the job server does not confirm within about a minute that the job has ended: the
job is named then.

  rlhf-stack submit --restarts 5 --min-nodes 3 -- python -m openrlhf.cli.train_ppo_ray ...

With --grace SECONDS, for a machine that is taken away, Ctrl-C and SIGTERM make OpenRLHF 0.11.2 save a
checkpoint of the last step first, if it is complete within that time, also while engines generate; then they
stop the job. The same command with the flag that loads a checkpoint continues. `rlhf-stack checkpoint` asks
for a checkpoint from elsewhere.

  rlhf-stack submit --grace 60 -- python -m openrlhf.cli.train_ppo_ray ... --ckpt.load_enable

With --log-format json the messages of this command on standard error, and rlhf_stack's lines among the job's
output, are JSON lines: time, level, host, pid, logger, message.

Exit codes of submit itself: 120 the run does not fit and was not submitted (--force submits it anyway), 121
wrong usage, or the job could not be submitted, 122 the connection to the running job was lost, 130 Ctrl-C,
143 SIGTERM. --json prints rlhf-stack/submit/1 when the job has ended, with the job's output on stderr:
`submitted`, `job`, `status`, `code` (that of the job, unchanged), `problems`; with --restarts also `attempts`
(job, status, code, seconds, resumed, saved: the step of the last complete checkpoint, error, lost: addresses
of nodes, causes, waited: seconds before it, changed: what differs from the attempt before).
"""

import argparse
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rlhf_stack.cli import run_options, supervised
from rlhf_stack.cli.job_output import JobOutput
from rlhf_stack.cli.json_output import print_json
from rlhf_stack.cli.option_types import (
    gibibytes,
    node_count,
    non_negative_int,
    refuse_without_effect,
    seconds,
)
from rlhf_stack.cluster.readiness import DASHBOARD
from rlhf_stack.config import env_vars, image
from rlhf_stack.config.secret_names import has_password, is_secret, is_secret_flag
from rlhf_stack.errors import UserError
from rlhf_stack.inputs.text import shortened
from rlhf_stack.openrlhf import command_line
from rlhf_stack.openrlhf.trainer_command import program_of, unread_program
from rlhf_stack.recovery import job as jobs
from rlhf_stack.recovery.checkpoints import checkpoints_of
from rlhf_stack.recovery.supervisor import Limits
from rlhf_stack.telemetry import run_log
from rlhf_stack.telemetry.run_log import messages

REFUSED, WRONG_USAGE = 120, 121  # exit codes that are never those of the job, as `jobs.LOST`
LEAST_GRACE = 10.0  # seconds
POLL_SECONDS = 2.0
PREFIX = "RLHF_STACK_"
SHOWN = re.compile(r"(?![Tt]rue$)[^$-]")  # the value of a secret, which is no switch, variable or flag
OF_THE_IMAGE = (env_vars.ACCELERATOR, env_vars.INPUTS, "RLHF_STACK_TOLD")  # set by the image on every machine
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


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
    parser.add_argument(
        "--restarts",
        type=non_negative_int,
        default=0,
        metavar="N",
        help="submit the run again after a fault, at most N times (0)",
    )
    parser.add_argument(
        "--min-nodes",
        type=node_count,
        metavar="M",
        help="continue on M nodes or more if others stay lost [all are needed]",
    )
    parser.add_argument(
        "--node-wait",
        type=seconds,
        metavar="SECONDS",
        help=f"time limit of each wait for lost nodes ({Limits.seconds:.0f})",
    )
    parser.add_argument(
        "--grace",
        type=grace_time,
        default=0.0,
        metavar="SECONDS",
        help=f"on Ctrl-C and SIGTERM, save a checkpoint within this time first, {LEAST_GRACE:.0f} or more",
    )
    parser.add_argument(
        "--log-format",
        choices=env_vars.LOG_FORMATS,
        help=f"of this command's messages, and rlhf_stack's lines in the job [{env_vars.LOG_FORMAT}, text]",
    )
    parser.add_argument(
        "--log-level", choices=env_vars.LOG_LEVELS, help=f"the lowest one logged [{env_vars.LOG_LEVEL}, info]"
    )
    parser.add_argument("--force", action="store_true", help="submit a run that does not fit")
    parser.add_argument("--json", action="store_true", help="print rlhf-stack/submit/1 (see above)")
    run_options.add_run_options(parser)


def grace_time(text: str) -> float:
    """A time in seconds that is long enough to reach the trainer and to stop the job."""
    if (found := seconds(text)) < LEAST_GRACE:
        raise argparse.ArgumentTypeError(f"{text}: expected {LEAST_GRACE:.0f} seconds or more")
    return found


def run(options: argparse.Namespace) -> int:
    """Plan the run, submit it and follow it; return the job's exit code."""
    with supervised.terminable():
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    words = run_options.command_words(options)
    if not options.address.strip():
        raise UserError("--address: expected the address of Ray's job server")
    _configure_log(options)

    variables_of_run, unused = run_options.variables_of_run(words)

    def environment() -> dict[str, Any]:
        return runtime_env(os.environ, [*options.env, *variables_of_run], options.working_dir)

    if not options.restarts:
        refuse_without_effect(options, ("min_nodes", "node_wait"), "without --restarts")
    # Before anything starts: `UserError` for a variable without a value, or with an invalid one.
    variables = environment()["env_vars"]
    env_vars.check(variables)
    _warn_of_secrets(variables, words)
    for name in unused:
        messages.warning(
            f"{name} in the command has no effect: Ray selects the GPUs; set it on the containers"
        )
    for text in replaced_by_profile(os.environ, variables):
        messages.info(text)
    is_supervised = bool(options.restarts or options.grace)
    write = JobOutput("stderr" if options.json else "stdout", is_supervised)
    supervision = _supervision(options, words, environment) if is_supervised else None
    follows = supervision is not None and supervision.follows_a_job
    problems = [] if follows else _problems_after_wait(options, words, variables)
    for problem in problems:
        messages.error(problem)
    if problems and not options.force:
        messages.error("not submitted; --force submits it anyway")
        if options.json:
            print_json("submit", 1, submitted=False, job=None, status=None, code=REFUSED, problems=problems)
        return REFUSED
    ended = supervision.run(write) if supervision else _once(options.address, words, environment(), write)
    if options.json:
        attempts = [asdict(one) for one in supervision.attempts] if supervision else []
        print_json(
            "submit",
            1,
            submitted=True,
            job=ended.job,
            status=ended.status,
            code=ended.code,
            problems=problems,
            **({"attempts": attempts} if supervision else {}),
        )
    return 1 if ended.code in (REFUSED, WRONG_USAGE, jobs.LOST) else ended.code


def _configure_log(options: argparse.Namespace) -> None:
    """Apply --log-format and --log-level, or the variables, to this command and to its job."""
    for variable, value in (
        (env_vars.LOG_FORMAT, options.log_format),
        (env_vars.LOG_LEVEL, options.log_level),
    ):
        if value:
            os.environ[variable] = value  # `runtime_env` passes it on
    run_log.configure_messages()


def _supervision(
    options: argparse.Namespace,
    words: Sequence[str],
    environment: Callable[[], dict[str, Any]],
) -> supervised.Supervision:
    def assess(changed: Sequence[str], variables: Mapping[str, str], scales: bool) -> list[str]:
        described = argparse.Namespace(**(vars(options) | {"command_line": list(changed)}))
        return _problems(described, changed, variables, scales=scales)  # the first attempt has shown them

    limits = Limits(options.restarts, options.min_nodes, options.node_wait or Limits.seconds, options.grace)
    return supervised.Supervision(options.address, options.ray, words, limits, assess, environment)


def _once(
    address: str, words: Sequence[str], environment: Mapping[str, Any], write: Callable[[str], None]
) -> jobs.Ended:
    """Submit the job and follow it until it ends."""
    job = jobs.new_id()
    try:
        jobs.submit(address, job, words, environment, jobs.LOST_SECONDS)
        return jobs.follow(address, job, write, jobs.LOST_SECONDS)
    except (KeyboardInterrupt, supervised.TerminatedError):
        messages.warning(f"job {job} is not stopped: ray job logs -f {job}, ray job stop {job}")
        raise


def _warn_of_secrets(variables: Mapping[str, str], words: Sequence[str]) -> None:
    """Print a warning for secrets that Ray would show: variables of the job, and flags of the command."""
    named = sorted(name for name, value in variables.items() if is_secret(name, value))
    found = [f"the job's runtime_env contains {', '.join(named)}"] if named else []
    if has_password(" ".join(words)) or _shows_secret(words):
        found.append("the command line contains a secret")
    for text in found:
        messages.warning(
            f"{text}, which everyone who reaches Ray's dashboard can read: set it on the machines instead"
        )


def _shows_secret(words: Sequence[str]) -> bool:
    """Report whether a flag or a variable of a command line has a secret, also in a word for a shell."""
    program = program_of(words)
    before = " ".join(program.launcher if program else words).split()
    variables = [part.partition("=") for part in before if VARIABLE.fullmatch(part.partition("=")[0])]
    if any(is_secret(name, value) and SHOWN.match(value) for name, _, value in variables):
        return True
    parts = " ".join(words).split()
    for part, following in zip(parts, [*parts[1:], ""], strict=True):
        name, equals, value = part.partition("=")
        is_flag = name.startswith("--") and is_secret_flag(name)
        if is_flag and SHOWN.match(value if equals else following):
            return True
    return False


def replaced_by_profile(environment: Mapping[str, str], variables: Mapping[str, str]) -> list[str]:
    """Describe each value of this shell that the job, with ``variables``, does not get but the profile's.

    The shell's is the image's default, which it also has without a user, such as in `docker exec`.
    """
    profile = environment.get(env_vars.PROFILE, "")
    return [
        f"the job uses {name}={value}, of profile {profile}; --env {name}={here} selects the shell's value"
        for name, value in image.profile_values(profile).items()
        if name.startswith(PREFIX)
        and name not in variables
        and (here := environment.get(name)) not in (None, "", value)
    ]


def runtime_env(
    environment: Mapping[str, str], named: Sequence[str], working_dir: str | None = None
) -> dict[str, Any]:
    """Ray's ``runtime_env`` for a job: the RLHF_STACK_* variables of ``environment`` and those in ``named``.

    Those with the image's default are left to the job's machines, whose profile may set another value.
    ``named`` has entries NAME or NAME=VALUE; `UserError` for a NAME that is given twice, that no job reads,
    or that has no value and is not in ``environment``.
    """
    defaults = image.env_defaults()
    variables = {
        name: value
        for name, value in environment.items()
        if name.startswith(PREFIX)
        and name not in (*OF_THE_IMAGE, env_vars.PROFILE)
        and value not in ("", defaults.get(name))
    }
    given: set[str] = set()
    for text in named:
        name, equals, value = text.partition("=")
        if not VARIABLE.fullmatch(name):
            raise UserError(
                f"--env {shortened(text)!r}: expected NAME or NAME=VALUE, such as NCCL_DEBUG=INFO"
            )
        if name == env_vars.PROFILE:
            raise UserError(
                f"--env {name}: a job does not read it: start the containers with docker run -e {name}=..."
            )
        if not equals and name not in environment:
            raise UserError(f"--env {text}: {name} is not set in this shell; give it as NAME=VALUE")
        if name in given:
            raise UserError(f"--env {name} is given twice, or also by env in the command")
        given.add(name)
        variables[name] = value if equals else environment[name]
    if (
        working_dir is not None
        and "://" not in working_dir
        and not (working_dir and Path(working_dir).is_dir())
    ):
        raise UserError(f"--working-dir {shortened(working_dir)!r}: no such folder")
    return {"env_vars": variables} | ({"working_dir": working_dir} if working_dir else {})


def _problems_after_wait(
    options: argparse.Namespace, words: Sequence[str], variables: Mapping[str, str]
) -> list[str]:
    """The reasons why the run cannot start; GPUs that are in use are awaited as long as a reservation waits.

    The processes of a job that has just ended may still hold them. ``variables`` are those of the job.
    """
    problems = _problems(options, words, variables, messages.warning)
    if not problems or options.force:
        return problems
    if idle := _problems(options, words, variables, idle=True):
        return [*problems, *(problem for problem in idle if problem not in problems)]
    limit = env_vars.placement_timeout(variables)
    within = f"{limit:.0f} s ({env_vars.PLACEMENT_TIMEOUT})"
    messages.info(f"waiting up to {within} for GPUs in use: {problems[0].splitlines()[0]}")
    end = time.monotonic() + limit
    while problems and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
        problems = _problems(options, words, variables)
    return [*problems, f"GPUs in use were not released within {within}"] if problems else []


def _unheard(_: str) -> None:
    """Drop a message that was shown already."""


def _problems(
    options: argparse.Namespace,
    words: Sequence[str],
    variables: Mapping[str, str],
    warn: Callable[[str], None] = _unheard,
    idle: bool = False,
    scales: bool = True,
) -> list[str]:
    """The reasons why the run cannot start on the cluster now; none for a command that is not a run.

    `UserError` if the image cannot run it, also for SFT, DPO and RM. Messages of OpenRLHF's parser go to
    ``warn``. With ``idle``, the reasons why it could not even if no other job used the cluster. With
    ``scales``, too few resources are no reason if the run may ask an autoscaler for them.
    """
    try:
        command_line.extract_arguments(words)
    except command_line.ArgumentsError:
        if name := unread_program(words):
            warn(
                f"{name} is named, but not read as the program that the command starts: it is neither "
                f"planned nor checked. Start it with python -m openrlhf.cli.{name}"
            )
        if "PYTHONPATH" in variables:  # it can contain a fork of OpenRLHF
            return []
        for note in run_options.check_trainer(words, options.working_dir):
            warn(f"OpenRLHF: {note}")
        return []
    from rlhf_stack.planning import assess
    from rlhf_stack.planning.assessment import ALLOW_LONG

    run, notes = run_options.parse_run(options)
    for note in notes:
        warn(f"OpenRLHF: {note}")
    # A variable that the job does not set has the value of its machine, which is that of this one.
    # vLLM's own is not passed to the job, and a shell may set it for `plan`: it counts with --env alone.
    of_job = {**{name: value for name, value in os.environ.items() if name != ALLOW_LONG}, **variables}
    machines = run_options.ray_machines(options.ray, options.gpu_memory, of_job)
    if idle:
        machines = [replace(machine, free_gpus=None, free_cpus=None) for machine in machines]
    found = assess(run, machines, run_options.read_shapes(run, options), of_job)
    of_checkpoints = checkpoints_of(words)[1].obstacles()
    if found.refusal and scales and env_vars.flag(env_vars.AUTOSCALE, variables):
        messages.info(f"{found.refusal}; the run will ask the autoscaler")
        return [*of_checkpoints, *(problem for problem in found.problems if problem != found.refusal)]
    return [*of_checkpoints, *found.problems]
