"""Report whether each patch of this distribution is present, missing or altered in this environment.

Missing: the patched package was replaced by another build. Altered: its files were edited. Exit code 1 if a
patch is not present, or if this rlhf_stack was built without patches.

  rlhf-stack patches
  rlhf-stack patches --json | jq '.patches[] | select(.state != "present")'

--json prints rlhf-stack/patches/1: `patches` (package, patch, title; state: present, missing or altered; why:
the files concerned, empty if it is present).
"""

import argparse
from dataclasses import asdict
from typing import Any

from rlhf_stack.cli.json_output import print_json
from rlhf_stack.cli.option_types import refuse_without_effect
from rlhf_stack.diagnostics import installed_patches


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the output."""
    parser.add_argument("--json", action="store_true", help="print rlhf-stack/patches/1 (see above)")
    parser.add_argument(
        "--changes", action="store_true", help="print only a line for each replaced or edited package"
    )


def run(options: argparse.Namespace) -> int:
    """Print the state of each patch; return 1 if one is not present."""
    if options.changes:
        refuse_without_effect(options, ("json",), "with --changes")
        lines = installed_patches.changed_packages()
        print("".join(f"rlhf-stack: {line}\n" for line in lines), end="")
        return 1 if lines else 0
    manifests = installed_patches.manifests()
    reports = installed_patches.patch_statuses(manifests, installed_patches.installed_checksum)
    if options.json:
        print_json("patches", 1, patches=[asdict(report) for report in reports])
    else:
        _show(manifests, reports)
    return 0 if reports and all(report.state == installed_patches.PRESENT for report in reports) else 1


def _show(manifests: list[dict[str, Any]], reports: list[installed_patches.PatchStatus]) -> None:
    if not manifests:
        print("this rlhf_stack was built without patched wheels: nothing to compare")
    for manifest in manifests:
        package = str(manifest["package"])
        installed = installed_patches.installed_version(package)
        print(f"{package} {manifest['version']}+{manifest['label']}, installed {installed}")
        for report in reports:
            if report.package == package:
                print(f"  {report.state:8} {report.patch}: {report.title}")
                if report.why:
                    print(f"           in {report.why}")
    if any(report.state != installed_patches.PRESENT for report in reports):
        print(f"remedy: {installed_patches.REMEDY}")
