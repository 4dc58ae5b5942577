"""Diagnose this node and its cluster: versions, patches, variables, GPUs, /dev/shm, limits, stale resources.

If a Ray node runs on this machine, checks and compares all nodes of its cluster; otherwise checks this
machine, also outside the images. Changes nothing. Known-bad combinations come from a database, with a source
for each entry; --log explains a log with it, --freeze checks the packages of another environment.

  rlhf-stack doctor                          this node and its cluster
  rlhf-stack doctor --local --all            only this node, with notes and passed checks
  rlhf-stack doctor --host                   which images run on this machine, and why the others do not
  ray job logs JOB | rlhf-stack doctor --log -
  rlhf-stack doctor --log job.log --freeze freeze.txt
  ssh NODE pip freeze | rlhf-stack doctor --freeze -

Exit code: 0 no finding above a note; 1 a warning; 3 an error; 2 wrong usage. With --log, 1 if the log matches
an entry. With --host, 1 if no image runs on the GPUs of this machine.

--json prints rlhf-stack/doctor/1: `worst`, and `findings` (node: its address, empty if it concerns no single
node; id; severity: ok, note, warning or error; what, evidence, remedy and sources). With --host it prints
rlhf-stack/host/1: `machine`, and `cells` (id, runs, reasons).
"""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from rlhf_stack import known_bad
from rlhf_stack.cleanup import process_table
from rlhf_stack.cli.json_output import print_json
from rlhf_stack.cli.option_types import positive_float
from rlhf_stack.diagnostics import host_check, installed_patches
from rlhf_stack.errors import UserError
from rlhf_stack.known_bad.finding import ERROR, NOTE, OK, SEVERITIES, WARNING, Finding, by_severity, worst

CODES = {OK: 0, NOTE: 0, WARNING: 1, ERROR: 3}
TIMEOUT = 30.0
STANDARD_INPUT = "-"
COLOURS = {OK: "green", NOTE: "cyan", WARNING: "yellow", ERROR: "red"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the input and the output."""
    parser.add_argument("--log", metavar="FILE", help="explain a log or a traceback; - is standard input")
    parser.add_argument(
        "--freeze", metavar="FILE", help="check the output of `pip freeze`; - is standard input"
    )
    parser.add_argument("--host", action="store_true", help="report which images run on this machine")
    parser.add_argument(
        "--local", action="store_true", help="check only this node, even if it is part of a cluster"
    )
    parser.add_argument("--all", action="store_true", help="show notes and passed checks too")
    parser.add_argument(
        "--timeout",
        type=positive_float,
        default=TIMEOUT,
        metavar="SECONDS",
        help="for all nodes to respond (30)",
    )
    parser.add_argument("--json", action="store_true", help="print rlhf-stack/doctor/1 (see above)")


def run(options: argparse.Namespace) -> int:
    """Run the checks and print the findings; the exit code follows the worst severity."""
    if options.host:
        return host_check.main(["--json"] if options.json else [])
    if options.log:
        found = _of_log(options.log, options.freeze)
    elif options.freeze:
        found = _of_freeze(options.freeze)
    else:
        found = _of_this(options.local, options.timeout)
    findings = [finding for _, finding in found]
    if options.json:
        entries = [{"node": node} | asdict(finding) for node, finding in found]
        print_json("doctor", 1, worst=worst(findings), findings=entries)
    else:
        _show(found, everything=options.all, is_log=bool(options.log))
    return min(1, len(findings)) if options.log else CODES[worst(findings)]


def _of_log(log: str, freeze: str | None) -> list[tuple[str, Finding]]:
    if log == freeze:
        raise UserError("--log and --freeze cannot both be read from standard input")
    versions = known_bad.freeze(_read(freeze)) if freeze else None
    return [("", finding) for finding in known_bad.explain(known_bad.load(), _read(log), versions)]


def _of_freeze(freeze: str) -> list[tuple[str, Finding]]:
    versions = known_bad.freeze(_read(freeze))
    if not versions:
        raise UserError(f"{freeze}: no line has a version in the format of `pip freeze` (name==version)")
    environment = known_bad.Environment(
        versions,
        None,
        known_bad.accelerator_of(versions),
        installed_patches.patches_in_versions(installed_patches.manifests(), versions),
    )
    found = known_bad.judge(known_bad.load(), environment)
    passed = Finding("versions", OK, f"{len(versions)} versions, no known-bad combination")
    return [("", finding) for finding in found or [passed]]


def _of_this(local: bool, timeout: float) -> list[tuple[str, Finding]]:
    """Findings of this node, or of every node of its cluster, each with the address of the node."""
    from rlhf_stack.diagnostics.doctor import checks, collect, comparison

    address = None if local else process_table.gcs_address(process_table.snapshot())
    if address is None:
        node = collect.collect_facts()
        return [("", finding) for finding in (*checks.check_node(node), *comparison.compare_processes(node))]
    from rlhf_stack.diagnostics.doctor import cluster

    facts = cluster.collect_from_nodes(address, timeout)
    found = [("", finding) for finding in comparison.compare_nodes(facts)]
    for answer in facts:
        if answer.node:
            own = [*checks.check_node(answer.node), *comparison.compare_processes(answer.node)]
            found += [(answer.address, finding) for finding in own]
    return found


def _read(name: str) -> str:
    if name == STANDARD_INPUT:
        return sys.stdin.read()
    try:
        return Path(name).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{name}: {error.strerror}") from error


def _show(found: list[tuple[str, Finding]], everything: bool, is_log: bool) -> None:
    """Print the findings, the worst first; one that several nodes share is printed once."""
    from rich.console import Console
    from rich.table import Table

    shown = SEVERITIES if everything or is_log else (WARNING, ERROR)
    nodes: dict[Finding, list[str]] = {}
    for node, finding in found:
        nodes.setdefault(finding, []).append(node)
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in by_severity(list(nodes)):
        if finding.severity in shown:
            where = ", ".join(filter(None, nodes[finding]))
            table.add_row(_coloured(finding.severity), _paragraph(finding, where, is_log or everything))
    console = Console(highlight=False)
    if table.row_count:
        console.print(table)
    if is_log and not found:
        console.print("this log matches no entry of the known-bad database")
    if not is_log:
        console.print(_tally(list(nodes)) + ("" if everything else " (--all shows every one)"))


def _paragraph(finding: Finding, where: str, with_sources: bool) -> str:
    """The lines of one finding: what, evidence, nodes, remedy and sources."""
    from rich.markup import escape

    lines = [f"[bold]{escape(finding.what)}[/bold] [dim]{finding.id}[/dim]"]
    lines += [f"seen:   {escape(finding.evidence)}"] if finding.evidence else []
    lines += [f"nodes:  {where}"] if where else []
    lines += [f"remedy: {escape(finding.remedy)}"] if finding.remedy else []
    lines += (
        [f"[dim]source: {escape(', '.join(finding.sources))}[/dim]"]
        if finding.sources and with_sources
        else []
    )
    return "\n".join(lines)


def _coloured(severity: str) -> str:
    return f"[{COLOURS[severity]}]{severity}[/{COLOURS[severity]}]"


def _tally(findings: list[Finding]) -> str:
    counts = {severity: sum(one.severity == severity for one in findings) for severity in SEVERITIES}
    return ", ".join(f"{number} {severity}" for severity, number in reversed(counts.items()) if number)
