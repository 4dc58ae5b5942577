"""Look for what is wrong here: versions, patches, variables, GPUs, shared memory, limits, leftovers.

Where a Ray node runs, all nodes of its cluster are asked, and compared; without one, and outside of our
images, what is here is looked at. Nothing is changed. What it knows to be bad is in a database, each row with
its source; --log explains a log by it, --freeze judges an environment that is not here.

  rlhf-stack doctor                          this node, and its cluster
  rlhf-stack doctor --local --all            this node alone, with notes and what is well
  ray job logs JOB | rlhf-stack doctor --log -
  rlhf-stack doctor --log job.log --freeze freeze.txt
  ssh NODE pip freeze | rlhf-stack doctor --freeze -

Exit code: 0 all is well, or there are notes alone; 1 a warning; 3 an error; 2 a mistake in the question. With
--log it is 1 if something is explained.

--json prints rlhf-stack/doctor/1: `worst`, and `findings` (node: its address, empty for what is of no single
one; id; severity: ok, note, warning or error; what, evidence, remedy and sources).
"""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from rlhf_stack import known_bad
from rlhf_stack.cleanup import process_table
from rlhf_stack.cli import option_types
from rlhf_stack.cli.json_output import show_json
from rlhf_stack.diagnostics import installed_patches
from rlhf_stack.errors import UserError
from rlhf_stack.known_bad.finding import ERROR, NOTE, OK, SEVERITIES, WARNING, Finding, by_severity, worst

CODES = {OK: 0, NOTE: 0, WARNING: 1, ERROR: 3}
TIMEOUT = 30.0
STANDARD_INPUT = "-"
COLOURS = {OK: "green", NOTE: "cyan", WARNING: "yellow", ERROR: "red"}


def arguments(parser: argparse.ArgumentParser) -> None:
    """What to look at, and how to show it."""
    parser.add_argument(
        "--log", metavar="FILE", help="explain a log or a traceback instead; - is standard input"
    )
    parser.add_argument(
        "--freeze", metavar="FILE", help="judge what `pip freeze` wrote instead; - is standard input"
    )
    parser.add_argument(
        "--local", action="store_true", help="this node alone, though it is part of a cluster"
    )
    parser.add_argument("--all", action="store_true", help="show notes too, and what is well")
    parser.add_argument(
        "--timeout",
        type=option_types.positive,
        default=TIMEOUT,
        metavar="SECONDS",
        help="for the whole cluster (30)",
    )
    parser.add_argument("--json", action="store_true", help="print rlhf-stack/doctor/1 (see above)")


def run(options: argparse.Namespace) -> int:
    """Look, show, and say the worst by the exit code."""
    if options.log:
        found = _of_log(options.log, options.freeze)
    elif options.freeze:
        found = _of_freeze(options.freeze)
    else:
        found = _of_this(options.local, options.timeout)
    findings = [finding for _, finding in found]
    if options.json:
        entries = [{"node": node} | asdict(finding) for node, finding in found]
        show_json("doctor", 1, worst=worst(findings), findings=entries)
    else:
        _show(found, everything=options.all, asked="log" if options.log else "")
    return min(1, len(findings)) if options.log else CODES[worst(findings)]


def _of_log(log: str, freeze: str | None) -> list[tuple[str, Finding]]:
    if log == freeze:
        raise UserError("--log and --freeze cannot both be read from standard input")
    versions = known_bad.freeze(_read(freeze)) if freeze else None
    return [("", finding) for finding in known_bad.explain(known_bad.load(), _read(log), versions)]


def _of_freeze(freeze: str) -> list[tuple[str, Finding]]:
    versions = known_bad.freeze(_read(freeze))
    if not versions:
        raise UserError(f"{freeze}: no line names a version, as `pip freeze` writes them (name==version)")
    judged = known_bad.Environment(
        versions,
        None,
        known_bad.accelerator_of(versions),
        installed_patches.known(installed_patches.expected(), versions),
    )
    found = known_bad.judge(known_bad.load(), judged)
    well = Finding("versions", OK, f"{len(versions)} versions, no combination that is known to be bad")
    return [("", finding) for finding in found or [well]]


def _of_this(local: bool, timeout: float) -> list[tuple[str, Finding]]:
    """What the checks say of this node, or of every node of its cluster, each with the node's address."""
    from rlhf_stack.diagnostics.doctor import checks, collect, comparison

    address = None if local else process_table.gcs_address(process_table.table())
    if address is None:
        node = collect.node()
        return [("", finding) for finding in (*checks.of_node(node), *comparison.roles(node))]
    from rlhf_stack.diagnostics.doctor import cluster

    answers = cluster.ask(address, timeout)
    found = [("", finding) for finding in comparison.of_cluster(answers)]
    for answer in answers:
        if answer.node:
            own = [*checks.of_node(answer.node), *comparison.roles(answer.node)]
            found += [(answer.address, finding) for finding in own]
    return found


def _read(name: str) -> str:
    if name == STANDARD_INPUT:
        return sys.stdin.read()
    try:
        return Path(name).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{name}: {error.strerror}") from error


def _show(found: list[tuple[str, Finding]], everything: bool, asked: str) -> None:
    """A paragraph for each finding, the worst first; what several nodes have alike is said once."""
    from rich.console import Console
    from rich.table import Table

    shown = SEVERITIES if everything or asked else (WARNING, ERROR)
    nodes: dict[Finding, list[str]] = {}
    for node, finding in found:
        nodes.setdefault(finding, []).append(node)
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in by_severity(list(nodes)):
        if finding.severity in shown:
            where = ", ".join(filter(None, nodes[finding]))
            table.add_row(_coloured(finding.severity), _paragraph(finding, where, bool(asked) or everything))
    console = Console(highlight=False)
    if table.row_count:
        console.print(table)
    if asked and not found:
        console.print("nothing in this log is in the database of what is known to be bad")
    if not asked:
        console.print(_tally(list(nodes)) + ("" if everything else " (--all shows every one)"))


def _paragraph(finding: Finding, where: str, with_sources: bool) -> str:
    """What, seen where, the remedy, and by whom it is known."""
    from rich.markup import escape

    lines = [f"[bold]{escape(finding.what)}[/bold] [dim]{finding.id}[/dim]"]
    lines += [f"seen: {escape(finding.evidence)}"] if finding.evidence else []
    lines += [f"on:   {where}"] if where else []
    lines += [f"do:   {escape(finding.remedy)}"] if finding.remedy else []
    lines += (
        [f"[dim]see:  {escape(', '.join(finding.sources))}[/dim]"] if finding.sources and with_sources else []
    )
    return "\n".join(lines)


def _coloured(severity: str) -> str:
    return f"[{COLOURS[severity]}]{severity}[/{COLOURS[severity]}]"


def _tally(findings: list[Finding]) -> str:
    counts = {severity: sum(one.severity == severity for one in findings) for severity in SEVERITIES}
    return ", ".join(f"{number} {severity}" for severity, number in reversed(counts.items()) if number)
