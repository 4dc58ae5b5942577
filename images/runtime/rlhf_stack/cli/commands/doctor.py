"""Diagnose this node and its cluster: versions, patches, variables, GPUs, /dev/shm, limits, stale resources.

If a Ray node runs on this machine, checks and compares all nodes of its cluster, and names those that it
lost; otherwise checks this machine, also outside the images. Changes nothing. Known-bad combinations come
from a database, with a source for each entry; --log explains a log with it, --freeze checks the packages of
another environment.

  rlhf-stack doctor                          this node and its cluster
  rlhf-stack doctor --local --all            only this node, with notes and passed checks
  rlhf-stack doctor --host                   which images run on this machine, and why the others do not
  ray job logs JOB | rlhf-stack doctor --log -
  rlhf-stack doctor --log job.log --freeze freeze.txt
  ssh NODE pip freeze | rlhf-stack doctor --freeze -

--log reads the last 8 MiB of a log, in UTF-8 or UTF-16, and prints the likeliest cause first. --freeze reads
`pip freeze`, `pip list`, `pip show`, `conda list`, `uv pip tree`, lock files, the collect_env of torch or
vLLM, and `docker inspect`.

Exit code: 0 no finding above a note; 1 a warning; 3 an error; 2 wrong usage; with --log also 4: the log has
an error, and no entry but notes explains it. With --host, 1 if no image runs on this machine:
on its GPUs, or on its CPUs if it has none.

--json prints rlhf-stack/doctor/1: `worst`, and `findings` (node: its address, empty if it concerns no single
node; id; severity: ok, note, warning or error; what, evidence, remedy and sources; line: that of the log,
from 1, or from its end if negative). With --log `last_error` has line, text and origin (its process, if
known) of the last error; `first_error` those of the first failure, and time, frame (where it was raised),
led_to (the last exception raised from it), order (how it is known to be the first: only, time, lines,
unclear), same and later (other processes with this error, later errors of others), passed_on (it only
reports another process) and launcher (what torchrun saw). With --freeze `lines_read` is the number of lines
with a version, `lines_skipped` lists those whose version is invalid, or an address: a warning, or a note if
no entry judges the package. With --host it prints rlhf-stack/host/1: `machine`, and `cells` (id, runs,
reasons).
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from packaging.utils import canonicalize_name

from rlhf_stack import known_bad
from rlhf_stack.cleanup import process_table
from rlhf_stack.cli.json_output import print_json
from rlhf_stack.cli.option_types import path, refuse_without_effect, seconds
from rlhf_stack.diagnostics import host_check, installed_patches
from rlhf_stack.errors import UserError
from rlhf_stack.inputs.files import open_input
from rlhf_stack.inputs.text import first_names, one_line
from rlhf_stack.known_bad.finding import ERROR, NOTE, OK, SEVERITIES, WARNING, Finding, by_severity, worst

CODES = {OK: 0, NOTE: 0, WARNING: 1, ERROR: 3}
WITHOUT_EFFECT = {
    "host": ("log", "freeze", "local", "all", "timeout"),
    "log": ("local", "all", "timeout"),
    "freeze": ("local", "timeout"),
    "local": ("timeout",),
}
UNEXPLAINED = 4
MOST_SKIPPED = 5
NEAR = 1000  # lines, as for the tracebacks of many ranks
TIMEOUT = 30.0
STANDARD_INPUT = Path("-")
ORDERS = {
    "only": "none has an error of its own",
    "time": "by time stamps",
    "lines": "by the order of lines, in which those of other nodes may be late",
}
_Quoted = TypeVar("_Quoted", known_bad.FirstError, known_bad.LastError)
COLOURS = {OK: "green", NOTE: "cyan", WARNING: "yellow", ERROR: "red"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the input and the output."""
    parser.add_argument(
        "--log", type=path, metavar="FILE", help="explain a log or a traceback; - is standard input"
    )
    parser.add_argument(
        "--freeze",
        type=path,
        metavar="FILE",
        help="check a list of packages with versions; - is standard input",
    )
    parser.add_argument("--host", action="store_true", help="report which images run on this machine")
    parser.add_argument(
        "--local", action="store_true", help="check only this node, even if it is part of a cluster"
    )
    parser.add_argument("--all", action="store_true", help="show notes and passed checks too")
    parser.add_argument(
        "--timeout", type=seconds, metavar="SECONDS", help=f"for all nodes to respond ({TIMEOUT:g})"
    )
    parser.add_argument("--json", action="store_true", help="print rlhf-stack/doctor/1 (see above)")


def run(options: argparse.Namespace) -> int:
    """Run the checks and print the findings; the exit code follows the worst severity."""
    for name, others in WITHOUT_EFFECT.items():
        if getattr(options, name):
            refuse_without_effect(options, others, f"with --{name}")
    if options.host:
        return host_check.main(["--json"] if options.json else [])
    extra: dict[str, Any] = {}
    packages = _packages(options.log, options.freeze)
    last: known_bad.LastError | None = None
    first: known_bad.FirstError | None = None
    if options.log is not None:
        found, last, first = _of_log(options.log, packages.versions if packages else None)
        extra = {
            name: asdict(one) if one else None for name, one in (("last_error", last), ("first_error", first))
        }
    elif packages:
        found = _of_freeze(packages.versions)
    else:
        found = _of_this(options.local, options.timeout)
    if packages:
        extra |= {"lines_read": packages.lines, "lines_skipped": packages.skipped}
    unexplained = is_unexplained([finding for _, finding in found], last)
    of_list = [("", finding) for finding in _of_list(packages)]
    findings = [finding for _, finding in found + of_list]
    if options.json:
        entries = [{"node": node} | asdict(finding) for node, finding in found + of_list]
        print_json("doctor", 1, worst=worst(findings), findings=entries, **extra)
    elif options.log is not None:
        _show_log(found, last, first)
        _print_table([(finding, "") for _, finding in of_list], with_sources=True)
    else:
        _show(found + of_list, everything=options.all)
    if packages and not options.json:
        were = "line with a version was" if packages.lines == 1 else "lines with a version were"
        print(f"{packages.lines} {were} read")
    return UNEXPLAINED if unexplained else CODES[worst(findings)]


def is_unexplained(findings: list[Finding], last: known_bad.LastError | None) -> bool:
    """Whether no finding explains the last error.

    An error does in the `NEAR` lines before it, and a warning in its line or later; an error or a crash does
    anywhere if an entry knows the last error as a consequence.
    """
    if last is None:
        return False
    known = any((one.line or 0) >= last.line for one in findings)
    crashes = {row.id for row in known_bad.load() if known and row.kind == "crash"}
    start = {ERROR: float("-inf") if known else last.line - NEAR, WARNING: last.line}
    possible = [one for one in findings if one.severity in start]
    return not any(one.id in crashes or (one.line or 0) >= start[one.severity] for one in possible)


def _of_log(
    log: Path, versions: dict[str, str] | None
) -> tuple[list[tuple[str, Finding]], known_bad.LastError | None, known_bad.FirstError | None]:
    read = _read_log(log)
    found = known_bad.explain(known_bad.load(), read.text, versions, read.complete)
    last = known_bad.last_error(read.text, read.complete)
    return [("", finding) for finding in found], last, known_bad.first_error(read.text, read.complete)


def _packages(log: Path | None, freeze: Path | None) -> known_bad.PackageList | None:
    if freeze is None:
        return None
    if log == freeze == STANDARD_INPUT:
        raise UserError("--log and --freeze cannot both be read from standard input")
    found = known_bad.read_versions(_read_log(freeze).text)
    if not found.versions:
        raise UserError(f"{freeze}: no line has a version; expected {known_bad.FORMAT_NAMES}")
    return found


def _of_list(packages: known_bad.PackageList | None) -> list[Finding]:
    """What a list names without a valid version: a warning if an entry judges it, else a note."""
    if packages is None or not packages.skipped:
        return []
    judged = {name for row in known_bad.load() for name in (*row.packages, *row.absent, *row.differ)}
    of_rows = [
        text
        for text in packages.skipped
        if canonicalize_name(text.partition(" @ ")[0].partition("==")[0]) in judged
    ]
    names = one_line(first_names(of_rows or packages.skipped, MOST_SKIPPED))
    severity = WARNING if of_rows else NOTE
    remedy = "write them as name==version, or leave the lines out"
    return [Finding("versions-skipped", severity, "packages without a valid version", names, remedy)]


def _of_freeze(versions: dict[str, str]) -> list[tuple[str, Finding]]:
    environment = known_bad.Environment(
        versions,
        None,
        known_bad.accelerator_of(versions),
        installed_patches.patches_in_versions(installed_patches.manifests(), versions),
    )
    found = known_bad.judge(known_bad.load(), environment)
    passed = Finding("versions", OK, f"{len(versions)} versions, no known-bad combination")
    return [("", finding) for finding in found or [passed]]


def _of_this(local: bool, timeout: float | None) -> list[tuple[str, Finding]]:
    """Findings of this node, or of every node of its cluster, each with the address of the node."""
    from rlhf_stack.diagnostics.doctor import checks, collect, comparison

    address = None if local else process_table.gcs_address(process_table.snapshot())
    if address is None:
        node = collect.collect_facts()
        return [("", finding) for finding in (*checks.check_node(node), *comparison.compare_processes(node))]
    from rlhf_stack.diagnostics.doctor import cluster

    facts, lost = cluster.collect_from_nodes(address, timeout or TIMEOUT)
    found = [("", finding) for finding in (*comparison.lost_nodes(lost), *comparison.compare_nodes(facts))]
    for answer in facts:
        if answer.node:
            own = [*checks.check_node(answer.node), *comparison.compare_processes(answer.node)]
            found += [(answer.address, finding) for finding in own]
    return found


def _read_log(name: Path) -> known_bad.LogText:
    if name == STANDARD_INPUT:
        if sys.stdin is None:
            raise UserError("standard input is closed")
        return known_bad.read_log(sys.stdin.buffer, "standard input")
    with open_input(name) as file:
        return known_bad.read_log(file, str(name))


def _show_log(
    found: list[tuple[str, Finding]], last: known_bad.LastError | None, first: known_bad.FirstError | None
) -> None:
    """Print what explains a log, the likeliest cause first, its first failure, and an unexplained error."""
    unexplained = last is not None and is_unexplained([finding for _, finding in found], last)
    first, last = first and _plain(first), last and _plain(last)
    if found:
        _print_table([(finding, "") for _, finding in found], with_sources=True)
    if unexplained:
        print("no entry names the cause of the last error of this log")
    elif not found:
        print("this log matches no entry of the known-bad database, and has no error")
    if first and (unexplained or first.frame or first.later):
        print("\n".join(described(first)))
    if unexplained and last and (first is None or first.line != last.line):
        origin = f"{last.origin}\n  " if last.origin else ""
        print(f"last error: {origin}{where(last.line)}: {last.text}")


def _plain(quoted: _Quoted) -> _Quoted:
    """What a log is quoted with, without control characters, which a terminal would obey."""
    values = {one.name: getattr(quoted, one.name) for one in fields(quoted)}
    plain: dict[str, Any] = {name: one_line(text) for name, text in values.items() if isinstance(text, str)}
    return replace(quoted, **plain)


def described(first: known_bad.FirstError) -> Iterator[str]:
    """Lines about the first failure of a log, and about how certain it is that it was the first."""
    origin, time = first.origin or "a process without a name in the log", first.time and f", at {first.time}"
    if first.passed_on:
        yield f"it has no first cause, only what follows from one, first from {origin}{time}"
    else:
        yield f"first failure: {origin}{time}"
    yield f"  {where(first.line)}: {first.text}"
    if first.frame:
        yield f"  raised in {first.frame}"
    if first.led_to:
        yield f"  which led to {first.led_to}"
    if first.launcher:
        yield f"  torchrun observed first: {first.launcher}"
    if first.same:
        yield f"  {first.same} other processes have the same error: look for a cause that they share"
    if first.order == "unclear":
        yield "  the order is unclear: another process has an error at the same moment, or on an earlier line"
    elif first.later:
        yield f"  likely consequences: {first.later} later errors of other processes ({ORDERS[first.order]})"


def where(line: int) -> str:
    """How a line of a log is quoted."""
    return f"line {line}" if line > 0 else f"line {-line} from the end"


def _show(found: list[tuple[str, Finding]], everything: bool) -> None:
    """Print the findings, the worst first; one that several nodes share is printed once."""
    shown = SEVERITIES if everything else (WARNING, ERROR)
    nodes: dict[Finding, list[str]] = {}
    for node, finding in found:
        nodes.setdefault(finding, []).append(node)
    rows = [(one, ", ".join(filter(None, nodes[one]))) for one in by_severity(list(nodes))]
    _print_table([row for row in rows if row[0].severity in shown], with_sources=everything)
    print(_tally(list(nodes)) + ("" if everything else " (--all shows every one)"))


def _print_table(rows: list[tuple[Finding, str]], with_sources: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding, nodes in rows:
        table.add_row(_coloured(finding.severity), _paragraph(finding, nodes, with_sources))
    if rows:
        Console(highlight=False).print(table)


def _paragraph(finding: Finding, nodes: str, with_sources: bool) -> str:
    """The lines of one finding: what, evidence, nodes, remedy and sources."""
    from rich.markup import escape

    place = f"{where(finding.line)}: " if finding.line else ""
    evidence = one_line(finding.evidence) if finding.line else finding.evidence
    lines = [f"[bold]{escape(finding.what)}[/bold] [dim]{finding.id}[/dim]"]
    lines += [f"seen:   {escape(place + evidence)}"] if finding.evidence else []
    lines += [f"nodes:  {nodes}"] if nodes else []
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
