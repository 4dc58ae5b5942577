"""Start Ray on this machine, as the head or as a node of one, so that what is declared is what is there.

Declares the GPUs that processes see, an object store that fits in /dev/shm, and the environment that the
image says; keeps the dashboard on this machine; asks everyone for a token where Ray knows them (2.52 and
later), and refuses a public address where it does not. With --expect-nodes it waits until the others have
joined, and shows them. Every other option of ray start can be had from ray start itself, to which an image
stays transparent.

  rlhf-stack start --head --expect-nodes 2 --block        # on the first machine
  rlhf-stack start --join 10.0.0.1 --block                # on each of the others
  rlhf-stack start --head --dry-run                       # show the ray start, and start nothing

On the head a token is made where there is none (~/.ray/auth_token, for its owner alone; RAY_AUTH_TOKEN and
RAY_AUTH_TOKEN_PATH are honoured); the other machines must have the same. Programs that talk to the cluster
by themselves, such as `ray job submit`, need RAY_AUTH_MODE=token; `rlhf-stack submit` sets it. Exit code 1
if Ray does not start or the others do not join in time.

--json prints rlhf-stack/start/1 once all is there: `ray_start`, `token` (whether one is asked for), and
`nodes` (address, gpus, cpus, memory in bytes), which is empty without --expect-nodes.
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rlhf_stack.cli import option_types
from rlhf_stack.cli.json_output import show_json
from rlhf_stack.cluster import auth_token
from rlhf_stack.cluster.host import look, wait_for
from rlhf_stack.cluster.start_command import LOOPBACK, PORT, Asked, command, with_port
from rlhf_stack.errors import UserError

ENTRYPOINT = "rlhf-entrypoint"  # puts the image's environment in force, and becomes the command
START_SECONDS = 180.0


def arguments(parser: argparse.ArgumentParser) -> None:
    """What of ``ray start`` has to be right, and what is waited for."""
    role = parser.add_mutually_exclusive_group(required=True)
    role.add_argument("--head", action="store_true", help="be the first machine")
    role.add_argument("--join", metavar="ADDRESS", help=f"be one more, of the head at ADDRESS[:{PORT}]")
    parser.add_argument(
        "--num-gpus", type=option_types.whole, metavar="N", help="where there is no GPU: places for processes"
    )
    parser.add_argument(
        "--num-cpus", type=option_types.whole, metavar="N", help="CPUs to declare (those that there are)"
    )
    parser.add_argument(
        "--object-store-memory", type=option_types.count, metavar="BYTES", help="(as /dev/shm allows)"
    )
    parser.add_argument(
        "--node-ip-address", metavar="ADDRESS", help="this machine's, by which others reach it"
    )
    parser.add_argument("--port", type=option_types.port, default=PORT, help=f"of the head ({PORT})")
    parser.add_argument("--dashboard-host", default=LOOPBACK, metavar="ADDRESS", help=f"({LOOPBACK})")
    parser.add_argument(
        "--auth", choices=("auto", "token", "none"), default="auto", help="auto: a token where Ray knows them"
    )
    parser.add_argument(
        "--expect-nodes", type=option_types.count, metavar="N", help="wait for N nodes, this one included"
    )
    parser.add_argument(
        "--expect-gpus", type=option_types.amount, default=0.0, metavar="N", help="and for N GPUs in all"
    )
    parser.add_argument(
        "--timeout",
        type=option_types.positive,
        default=300.0,
        metavar="SECONDS",
        help="for that, and for the head to answer (300)",
    )
    parser.add_argument("--block", action="store_true", help="stay until Ray ends")
    parser.add_argument("--dry-run", action="store_true", help="print the ray start, and start nothing")
    parser.add_argument("--json", action="store_true", help="print rlhf-stack/start/1 (see above)")


def run(options: argparse.Namespace) -> int:
    """Start, wait, show; with --block until Ray ends."""
    environment = dict(os.environ)
    if with_token := _token(options, environment):
        environment[auth_token.MODE] = "token"
    else:
        environment.pop(auth_token.MODE, None)
    asked = Asked(
        join=options.join,
        gpus=options.num_gpus,
        cpus=options.num_cpus,
        object_store=options.object_store_memory,
        address=options.node_ip_address,
        port=options.port,
        dashboard=options.dashboard_host,
        block=options.block,
    )
    started = command(asked, look(environment), with_token)
    if options.dry_run:
        print(shlex.join(started))
        return 0
    if shutil.which(started[0]) is None:
        raise UserError(
            "there is no `ray` on the PATH: run this in an image, or activate the environment of Ray"
        )
    if with_token and options.head and auth_token.ensure(environment):
        _say(f"made a token in {auth_token.path(environment)}: the other machines need the same")
    if options.join:
        wait_for(with_port(options.join), options.timeout)
    os.environ.update(environment)  # Ray reads the mode when it is imported
    return _start(started, options, with_token)


def _token(options: argparse.Namespace, environment: Mapping[str, str]) -> bool:
    """Whether the cluster asks for a token; `UserError` if it must and cannot."""
    if options.auth == "none" or (options.auth == "auto" and environment.get(auth_token.MODE) == "disabled"):
        return False
    if not auth_token.is_known():
        if options.auth == "token" or environment.get(auth_token.MODE) == "token":
            raise UserError(
                f"Ray {_ray()} has no tokens: start a cell with a newer one, on a private address"
            )
        return False
    if options.join and not auth_token.is_here(environment):
        raise UserError(
            f"the head has a token in its {auth_token.path({'HOME': '~'})} and this machine has none: {auth_token.HOW}"
        )
    return True


def _start(started: list[str], options: argparse.Namespace, with_token: bool) -> int:
    entrypoint = [ENTRYPOINT] if shutil.which(ENTRYPOINT) else []
    output: Any = sys.stderr if options.json else None
    with subprocess.Popen([*entrypoint, *started], stdout=output) as child:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda received, _: child.send_signal(received))
        try:
            if not options.block and (code := child.wait(START_SECONDS)):
                return 1 if code else 0
            _wait(options, child)
        except (UserError, subprocess.TimeoutExpired) as error:
            child.terminate()
            _say(f"error: {error}")
            return 1
        _show(started, options, with_token)
        return child.wait() if options.block else 0


def _wait(options: argparse.Namespace, child: "subprocess.Popen[bytes]") -> None:
    """Until the expected nodes are there; `UserError` if they are not in time, or if Ray ends before."""
    from rlhf_stack.cluster import readiness

    def check() -> None:
        if options.block and child.poll() is not None:
            raise UserError(f"ray start ended with code {child.returncode}")

    if options.expect_nodes is None:
        return
    _say(f"waiting for {options.expect_nodes} nodes, at most {options.timeout:g} s")
    try:
        readiness.wait(options.expect_nodes, options.expect_gpus, options.timeout, options.head, check)
    except readiness.NotReadyError as error:
        raise UserError(
            f"{error}; Ray goes on here: look at the other machines, or end it by ray stop"
        ) from None


def _show(started: list[str], options: argparse.Namespace, with_token: bool) -> None:
    """The nodes that are there, as a table or as JSON."""
    machines = []
    if options.expect_nodes is not None:
        from rlhf_stack.cli.run_options import of_ray

        machines = of_ray("auto", 0.0)
    if options.json:
        values = [
            {"address": one.address, "gpus": one.gpus, "cpus": one.cpus, "memory": one.memory}
            for one in machines
        ]
        show_json("start", 1, ray_start=started, token=with_token, nodes=values)
    elif machines:
        from rich.console import Console

        from rlhf_stack.planning.draw import draw_machines

        draw_machines(Console(highlight=False), machines)
    sys.stdout.flush()


def _ray() -> str:
    try:
        return version("ray")
    except PackageNotFoundError:
        raise UserError("Ray is not installed here: run this in an image") from None


def _say(text: str) -> None:
    print(f"rlhf-stack: {text}", file=sys.stderr, flush=True)
