"""Say of each patch of this distribution whether it is present, missing or altered in this environment.

Missing: the package was reinstalled over ours. Altered: somebody edited its files. Exit code 1 if one patch
is not present, or if this rlhf_stack came without any.

  rlhf-stack patches
  rlhf-stack patches --json | jq '.patches[] | select(.state != "present")'

--json prints rlhf-stack/patches/1: `patches` (package, patch, title; state: present, missing or altered; why,
which is empty if it is present).
"""

import argparse
from dataclasses import asdict
from typing import Any

from rlhf_stack.cli.json_output import show_json
from rlhf_stack.diagnostics import installed_patches


def arguments(parser: argparse.ArgumentParser) -> None:
    """``--json`` and ``--changes``."""
    parser.add_argument("--json", action="store_true", help="print rlhf-stack/patches/1 (see above)")
    parser.add_argument(
        "--changes", action="store_true", help="a line for each package that was replaced or edited, if any"
    )


def run(options: argparse.Namespace) -> int:
    """Show each patch; 1 if one is not present."""
    if options.changes:
        lines = installed_patches.changes()
        print("".join(f"rlhf-stack: {line}\n" for line in lines), end="")
        return 1 if lines else 0
    manifests = installed_patches.expected()
    reports = installed_patches.examine(manifests, installed_patches.installed_checksum)
    if options.json:
        show_json("patches", 1, patches=[asdict(report) for report in reports])
    else:
        _show(manifests, reports)
    return 0 if reports and all(report.state == installed_patches.PRESENT for report in reports) else 1


def _show(manifests: list[dict[str, Any]], reports: list[installed_patches.Report]) -> None:
    if not manifests:
        print("this rlhf_stack was not built with patched wheels: nothing to compare with")
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
        print(f"mend it: {installed_patches.MEND}")
