"""Show what a dead run left on this node, and with --yes end and remove it.

That are workers of Ray, and what they started, whose worker or raylet is gone (an engine's processes, say);
the servers of a session of which no raylet lives; shared memory that nobody has open; and locks of builds
that were killed. Only what is of this user and in this container, and never a process that Ray did not start:
no GPU process is killed for being one. A node that runs is left as it is, with its workers and all that
descends from them; what detached itself from a worker (setsid, nohup) has nobody who would end it, and counts
as left.

  rlhf-stack reap                    show it
  rlhf-stack reap --yes              end and remove it
  rlhf-stack reap --json | jq '.left[].what'

Exit code: 0 nothing is left, or all of it was removed; 1 something is.

--json prints rlhf-stack/reap/1: `left` (kind: process, session, segment or lock; what; why; removed), and
`segments_unknown`, true where shared memory is that of other containers too, and was left alone.
"""

import argparse
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhf_stack.cleanup import process_table, stale_resources, terminate
from rlhf_stack.cleanup.process_table import Process
from rlhf_stack.cli import option_types
from rlhf_stack.cli.json_output import show_json
from rlhf_stack.compat import deepspeed_ops

LEAST_SECONDS = 60.0


@dataclass(frozen=True)
class Left:
    """One thing that is left: a "process", a "session" process, a "segment" or a "lock"."""

    kind: str
    what: str
    why: str
    removed: bool = False


def arguments(parser: argparse.ArgumentParser) -> None:
    """Whether to act, and on what age."""
    parser.add_argument("--yes", action="store_true", help="end and remove what is shown")
    parser.add_argument(
        "--older-than",
        type=option_types.amount,
        default=LEAST_SECONDS,
        metavar="SECONDS",
        help="for servers without a raylet and for segments, which a node that starts has too (60)",
    )
    parser.add_argument("--json", action="store_true", help="print rlhf-stack/reap/1 (see above)")


def run(options: argparse.Namespace) -> int:
    """Show it, and remove it if that was asked for."""
    table = process_table.table()
    lost = stale_resources.orphans(table, os.getuid())
    servers = stale_resources.headless(table, os.getuid(), stale_resources.ages(table), options.older_than)
    locks = deepspeed_ops.left_locks(deepspeed_ops.extensions_folder())
    ended = set(terminate.end([*lost, *servers])) if options.yes else set()
    # Asked after the processes have ended: what they held is left then.
    segments, unknown = _segments(options.older_than)
    found = [_of_process("process", one, "its worker or raylet is gone", ended) for one in lost]
    found += [_of_process("session", one, "no raylet of its session lives here", ended) for one in servers]
    found += [_of_file("segment", Path(one.path), "nobody has it open", options.yes) for one in segments]
    found += [_of_file("lock", lock, "its builder was killed", options.yes) for lock in locks]
    if options.json:
        show_json("reap", 1, left=[asdict(one) for one in found], segments_unknown=unknown)
    else:
        _show(found, unknown, options.yes)
    return 1 if any(not one.removed for one in found) else 0


def _segments(least: float) -> tuple[list[stale_resources.Segment], bool]:
    """The segments that are left, and whether that cannot be known here."""
    held = stale_resources.held_segments(process_table.table())
    if held is None:
        return [], True
    return stale_resources.unheld(stale_resources.segments(time.time()), held, os.getuid(), least), False


def _of_process(kind: str, process: Process, why: str, ended: set[int]) -> Left:
    return Left(kind, f"{process.pid} {process.line[:100]}", why, process.pid in ended)


def _of_file(kind: str, path: Path, why: str, remove: bool) -> Left:
    if remove:
        path.unlink(missing_ok=True)
    return Left(kind, str(path), why, remove)


def _show(found: list[Left], unknown: bool, acted: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    table = Table("kind", "what", "why", "removed" if acted else "")
    for one in found:
        table.add_row(one.kind, escape(one.what), one.why, ("yes" if one.removed else "no") if acted else "")
    console.print(table if found else "nothing is left of a dead run")
    if unknown:
        console.print(
            "shared memory was left alone: it is shared with other containers, whose processes are not seen"
        )
    if found and not acted:
        console.print("nothing was touched; --yes ends and removes it")
