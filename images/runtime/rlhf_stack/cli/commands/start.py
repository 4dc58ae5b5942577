"""Start Ray on this machine, as the head of a cluster or as a node that joins one.

Declares the visible GPUs and an object store that fits in /dev/shm, applies the environment of the image, and
binds the dashboard to this machine only. Requires an authentication token if Ray supports it (2.52 and
later), and refuses a public address if Ray does not. With --expect-nodes, waits until the other nodes have
joined and lists them. For any other option use `ray start` itself, which works in the image as usual.

  rlhf-stack start --head --expect-nodes 2 --block        # on the first machine
  rlhf-stack start --join 10.0.0.1 --block                # on each of the others
  rlhf-stack start --head --dry-run                       # print the `ray start` command only

The head creates a token if none exists (~/.ray/auth_token, readable by its owner only; RAY_AUTH_TOKEN and
RAY_AUTH_TOKEN_PATH take precedence); all other machines need the same token. Other clients of the cluster,
such as `ray job submit`, need RAY_AUTH_MODE=token; `rlhf-stack submit` sets it. Exit code 1 if Ray does not
start or the other nodes do not join in time.

--json prints rlhf-stack/start/1 when the nodes are ready: `ray_start`, `token` (whether one is required), and
`nodes` (address, gpus, cpus, memory in bytes), which is empty without --expect-nodes and with --dry-run.
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
from types import FrameType
from typing import Any

from rlhf_stack.cli.json_output import print_json
from rlhf_stack.cli.option_types import (
    byte_count,
    node_count,
    non_negative_float,
    non_negative_int,
    port,
    refuse_without_effect,
    seconds,
)
from rlhf_stack.cluster import auth_token
from rlhf_stack.cluster.host import inspect_host, is_ipv6, require_free_port, wait_for_name, wait_for_port
from rlhf_stack.cluster.start_command import LOOPBACK, PORT, StartOptions, ray_start_command, with_port
from rlhf_stack.compat import ray_private
from rlhf_stack.config import env_vars
from rlhf_stack.errors import UserError
from rlhf_stack.telemetry import run_log
from rlhf_stack.telemetry.run_log import messages

ENTRYPOINT = "rlhf-entrypoint"  # applies the image's environment, then replaces itself with the command
START_SECONDS = 180.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for ``ray start`` and for the nodes to wait for."""
    role = parser.add_mutually_exclusive_group(required=True)
    role.add_argument("--head", action="store_true", help="start the head node")
    role.add_argument("--join", metavar="ADDRESS", help=f"join the head at ADDRESS[:{PORT}]")
    parser.add_argument(
        "--num-gpus",
        type=non_negative_int,
        metavar="N",
        help="GPUs to declare (default: the visible ones); without GPUs, a number of slots",
    )
    parser.add_argument(
        "--num-cpus", type=non_negative_int, metavar="N", help="CPUs to declare (default: all)"
    )
    parser.add_argument(
        "--object-store-memory",
        type=byte_count,
        metavar="BYTES",
        help="in bytes or as 20GiB; default: what fits in /dev/shm",
    )
    parser.add_argument(
        "--node-ip-address", metavar="ADDRESS", help="address of this machine for the other nodes"
    )
    parser.add_argument("--port", type=port, help=f"with --head: its port ({PORT})")
    parser.add_argument(
        "--dashboard-host", metavar="ADDRESS", help=f"with --head: address of the dashboard ({LOOPBACK})"
    )
    parser.add_argument(
        "--auth", choices=("auto", "token", "none"), default="auto", help="auto: a token if Ray supports it"
    )
    parser.add_argument(
        "--expect-nodes", type=node_count, metavar="N", help="wait for N nodes, including this one"
    )
    parser.add_argument(
        "--expect-gpus",
        type=non_negative_float,
        metavar="N",
        help="also wait for N GPUs in total",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=300.0,
        metavar="SECONDS",
        help="for the nodes to join, and for the head to respond (300)",
    )
    parser.add_argument("--block", action="store_true", help="run in the foreground until Ray ends")
    parser.add_argument("--dry-run", action="store_true", help="print the `ray start` command only")
    parser.add_argument("--json", action="store_true", help="print rlhf-stack/start/1 (see above)")


def run(options: argparse.Namespace) -> int:
    """Start Ray, wait for the nodes and list them; with --block, wait until Ray ends."""
    if options.join is not None:
        refuse_without_effect(options, ("port", "dashboard_host"), "with --join ADDRESS[:PORT]")
    if options.expect_nodes is None:
        refuse_without_effect(options, ("expect_gpus",), "without --expect-nodes")
    env_vars.check()  # Ray's workers inherit the variables
    run_log.configure_messages()
    environment = dict(os.environ)
    if with_token := _token(options, environment):
        environment[auth_token.MODE] = "token"
    else:
        environment.pop(auth_token.MODE, None)
        os.environ.pop(auth_token.MODE, None)  # set where a token exists, also with --auth none
    start_options = StartOptions(
        join=options.join,
        gpus=options.num_gpus,
        cpus=options.num_cpus,
        object_store=options.object_store_memory,
        address=options.node_ip_address,
        port=options.port or PORT,
        dashboard=LOOPBACK if options.dashboard_host is None else options.dashboard_host,
        block=options.block,
    )
    head = _head(options.join)
    if head and not (options.dry_run and options.node_ip_address):
        wait_for_name(head, 0.0 if options.dry_run else options.timeout)
    here = inspect_host(environment, None if options.node_ip_address else head)
    started = ray_start_command(start_options, here, with_token)
    if any(is_ipv6(word) or word.startswith("[") for word in started) and not ray_private.has_ipv6():
        raise UserError(
            f"Ray {_ray()} accepts no IPv6 addresses (github.com/ray-project/ray/pull/56147): give IPv4 "
            "addresses by --node-ip-address and --join, or use a cell with a newer Ray"
        )
    if options.dry_run:
        if options.json:
            print_json("start", 1, ray_start=started, token=with_token, nodes=[])
        else:
            print(shlex.join(started))
        return 0
    if shutil.which(started[0]) is None:
        raise UserError("`ray` is not on the PATH: run this in an image, or activate the environment of Ray")
    if options.head:
        _prepare_head(start_options.dashboard, environment, with_token)
    if options.join:
        wait_for_port(with_port(options.join), options.timeout)
    os.environ.update(environment)  # Ray reads the mode when it is imported
    return _start(started, options, with_token)


def _head(join: str | None) -> str | None:
    """The host in --join ADDRESS[:PORT]; None on the head."""
    return with_port(join).rpartition(":")[0] if join else None


def _token(options: argparse.Namespace, environment: Mapping[str, str]) -> bool:
    """Whether the cluster requires a token; `UserError` if Ray supports none or this machine has none."""
    if options.auth == "none" or (options.auth == "auto" and environment.get(auth_token.MODE) == "disabled"):
        return False
    if not auth_token.is_supported():
        if options.auth == "token" or environment.get(auth_token.MODE) == "token":
            raise UserError(
                f"Ray {_ray()} does not support tokens: use a cell with a newer Ray, or a private address "
                "and --auth none"
            )
        if ignored := next(filter(environment.get, (auth_token.TOKEN, auth_token.TOKEN_PATH)), ""):
            messages.warning(
                f"Ray {_ray()} has no tokens and ignores {ignored}: whoever reaches this machine can run "
                "code on the cluster"
            )
        return False
    available = auth_token.is_available(environment)  # `UserError` for an unusable one, on the head too
    if options.join and not available:
        raise UserError(
            f"this machine has no token; a head has one in its {auth_token.path({'HOME': '~'})}: "
            f"{auth_token.REMEDY}; for a head without one (--auth none) give --auth none here too"
        )
    return True


def _prepare_head(dashboard: str, environment: Mapping[str, str], with_token: bool) -> None:
    """Require that the port of the job server is free; create a token if one is required and none exists.

    A second head of a machine would otherwise run without a job server, and use that of the first one.
    """
    from rlhf_stack.cluster.readiness import DASHBOARD_PORT

    require_free_port(dashboard, DASHBOARD_PORT)
    if with_token and auth_token.ensure(environment):
        messages.info(
            f"created a token in {auth_token.path(environment)}: the other machines need the same token"
        )


def _start(started: list[str], options: argparse.Namespace, with_token: bool) -> int:
    entrypoint = [ENTRYPOINT] if shutil.which(ENTRYPOINT) else []
    output: Any = sys.stderr if options.json else None
    with subprocess.Popen([*entrypoint, *started], stdout=output) as child:
        _forward_signals(child)
        try:
            if not options.block and (code := child.wait(START_SECONDS)):
                raise UserError(f"ray start ended with code {code}")
            _wait_for_nodes(options, child)
        except (UserError, subprocess.TimeoutExpired) as error:
            child.terminate()
            raise UserError(str(error), 1) from None
        _show(started, options, with_token)
        return child.wait() if options.block else 0


def _forward_signals(child: "subprocess.Popen[bytes]") -> None:
    """Let SIGTERM and SIGINT end ``child``, or, when it has ended, this process's wait for the nodes."""

    def forward(number: int, frame: FrameType | None) -> None:
        if child.poll() is None:
            child.send_signal(number)
        else:
            signal.default_int_handler(number, frame)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)


def _wait_for_nodes(options: argparse.Namespace, child: "subprocess.Popen[bytes]") -> None:
    """Wait until the expected nodes have joined; `UserError` at the deadline, or if Ray ends first."""
    from rlhf_stack.cluster import readiness

    def check() -> None:
        if options.block and child.poll() is not None:
            raise UserError(f"ray start ended with code {child.returncode}")

    if options.expect_nodes is None:
        return
    messages.info(f"waiting up to {options.timeout:g} s for {options.expect_nodes} nodes")
    server = readiness.job_server(options.dashboard_host or LOOPBACK) if options.head else None
    try:
        readiness.wait_for_nodes(
            options.expect_nodes, options.expect_gpus or 0.0, options.timeout, server, check
        )
    except readiness.NotReadyError as error:
        kept = "" if options.block else "; Ray is still running on this machine, until ray stop ends it"
        raise UserError(f"{error}: check the other machines{kept}") from None


def _show(started: list[str], options: argparse.Namespace, with_token: bool) -> None:
    """Print the nodes of the cluster, as a table or as JSON."""
    machines = []
    if options.expect_nodes is not None:
        from rlhf_stack.cli.run_options import ray_machines

        machines = ray_machines("auto", 0.0)
    if options.json:
        values = [
            {"address": one.address, "gpus": one.gpus, "cpus": one.cpus, "memory": one.memory}
            for one in machines
        ]
        print_json("start", 1, ray_start=started, token=with_token, nodes=values)
    elif machines:
        from rich.console import Console

        from rlhf_stack.planning.display import print_machines

        print_machines(Console(highlight=False), machines)
    sys.stdout.flush()


def _ray() -> str:
    try:
        return version("ray")
    except PackageNotFoundError:
        raise UserError("Ray is not installed: run this in an image") from None
