"""List the processes and files that a dead run left on this node; with --yes, remove them.

These are: Ray workers whose raylet ended, and processes whose Ray worker ended (such as those of an engine);
the servers of a Ray session without a raylet; unused shared-memory segments; and the lock files of killed
builds. Only resources of this user in this container are considered, and only processes that Ray started: a
GPU process is never killed for using a GPU. A running node keeps its workers and all their descendants; a
process that detached itself from a worker (setsid, nohup) counts as stale, because Ray will not end it.

  rlhf-stack reap                    list them
  rlhf-stack reap --yes              end and remove them
  rlhf-stack reap --json | jq '.left[].what'

Exit code: 0 nothing was found, or everything was removed; 1 something remains.

--json prints rlhf-stack/reap/1: `left` (kind: process, session, segment or lock; what; why; removed), and
`segments_unknown`, true if /dev/shm is shared with other containers, so that no segment is listed.
"""

import argparse
import os
import time
from dataclasses import asdict, dataclass

from rlhf_stack.cleanup import process_table, stale_resources, terminate
from rlhf_stack.cleanup.process_table import Process
from rlhf_stack.cli.json_output import print_json
from rlhf_stack.cli.option_types import non_negative_float
from rlhf_stack.compat import deepspeed_ops

LEAST_SECONDS = 60.0


@dataclass(frozen=True)
class StaleResource:
    """A stale resource; ``kind`` is "process", "session" (a server of a session), "segment" or "lock"."""

    kind: str
    what: str
    why: str
    removed: bool = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the removal and the output."""
    parser.add_argument("--yes", action="store_true", help="end and remove everything that is listed")
    parser.add_argument(
        "--older-than",
        type=non_negative_float,
        default=LEAST_SECONDS,
        metavar="SECONDS",
        help="minimum age of what is listed, because a starting node and a build look alike at first (60)",
    )
    parser.add_argument("--json", action="store_true", help="print rlhf-stack/reap/1 (see above)")


def run(options: argparse.Namespace) -> int:
    """List the stale resources, and remove them with --yes."""
    table = process_table.snapshot()
    ages, least = stale_resources.process_ages(table), options.older_than
    orphans = [
        one for one in stale_resources.orphaned_workers(table, os.getuid()) if ages.get(one.pid, 0.0) >= least
    ]
    servers = stale_resources.stale_session_processes(table, os.getuid(), ages, least)
    locks = deepspeed_ops.stale_locks(deepspeed_ops.extensions_directory(), least)
    ended = set(terminate.terminate_processes([*orphans, *servers])) if options.yes else set()
    # After the processes have ended, because their segments are unused then.
    segments, unknown = _segments(least)
    found = [_of_process("process", one, "its worker or raylet has ended", ended) for one in orphans]
    found += [_of_process("session", one, "its session has no raylet", ended) for one in servers]
    found += [
        StaleResource(
            "segment", one.path, "no process uses it", options.yes and stale_resources.remove_segment(one)
        )
        for one in segments
    ]
    found += [
        StaleResource(
            "lock",
            str(lock),
            "its builder was killed",
            options.yes and deepspeed_ops.remove_stale_lock(lock, least),
        )
        for lock in locks
    ]
    if options.json:
        print_json("reap", 1, left=[asdict(one) for one in found], segments_unknown=unknown)
    else:
        _show(found, unknown, options.yes)
    return 1 if any(not one.removed for one in found) else 0


def _segments(least: float) -> tuple[list[stale_resources.Segment], bool]:
    """The unused segments, and whether they cannot be determined on this machine."""
    held = stale_resources.open_segments(process_table.snapshot(everywhere=True))
    if held is None:
        return [], True
    return stale_resources.unused_segments(
        stale_resources.segments(time.time()), held, os.getuid(), least
    ), False


def _of_process(kind: str, process: Process, why: str, ended: set[int]) -> StaleResource:
    return StaleResource(kind, f"{process.pid} {process.line[:100]}", why, process.pid in ended)


def _show(found: list[StaleResource], unknown: bool, removing: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    table = Table("kind", "what", "why", "removed" if removing else "")
    for one in found:
        table.add_row(
            one.kind, escape(one.what), one.why, ("yes" if one.removed else "no") if removing else ""
        )
    console.print(table if found else "no stale resources")
    if unknown:
        console.print(
            "shared memory was skipped: processes that may use it are not visible (other containers, hidepid)"
        )
    if found and not removing:
        console.print("nothing was removed; --yes ends and removes everything listed")
