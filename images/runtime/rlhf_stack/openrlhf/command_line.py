"""The arguments of a run of OpenRLHF, read by the parser of the OpenRLHF that is installed.

Upstream builds its parser under ``if __name__ == "__main__"``. That block is run here as it stands, checks
and defaults included, with a function in the place of ``train`` that keeps what it is given: no option is
written down twice, and nothing starts.
"""

import ast
import contextlib
import importlib.util
import io
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeGuard

from rlhf_stack.errors import UserError

MODULE = "openrlhf.cli.train_ppo_ray"
NAME = "train_ppo_ray"
CHECKS = "_validate_args"  # of OpenRLHF 0.5


class ArgumentsError(UserError):
    """A command line that this OpenRLHF does not take, or no OpenRLHF to ask; one line says which."""


@dataclass(frozen=True)
class Parsed:
    """What ``train`` would be given: nested from OpenRLHF 0.9 on, flat before. ``notes`` it printed."""

    release: str
    values: Any
    notes: tuple[str, ...]


def extract_arguments(command: Sequence[str]) -> list[str]:
    """The arguments of ``train_ppo_ray`` in a command that starts it, or ``command`` if it is only these."""
    for index in range(len(command) - 1, -1, -1):
        if command[index].removesuffix(".py").replace("/", ".").split(".")[-1] == NAME:
            return list(command[index + 1 :])
    if command and not command[0].startswith("-"):
        raise ArgumentsError(
            f"{command[0]!r} does not start a run that can be planned: give the command line of {NAME}, "
            f"such as "
            f"-- python -m {MODULE} ARGUMENTS"
        )
    return list(command)


def parse(arguments: Sequence[str]) -> Parsed:
    """``arguments`` as the installed OpenRLHF reads them; `ArgumentsError` if it does not take them."""
    release, source = _installed()
    kept: list[Any] = []
    code, scope = _main(source, kept.append)
    printed, errors = io.StringIO(), io.StringIO()
    try:
        with (
            _argv([NAME, *arguments]),
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(errors),
        ):
            exec(code, scope)  # noqa: S102  (the installed OpenRLHF's own code)
    except SystemExit:
        said = (errors.getvalue() or printed.getvalue()).strip().splitlines() or ["no reason"]
        raise ArgumentsError(f"OpenRLHF {release}: {said[-1].split('error: ')[-1]}") from None
    except Exception as error:  # its checks are assertions, and what it forgot to check raises anything
        raise ArgumentsError(f"OpenRLHF {release} does not take these arguments: {_said(error)}") from error
    notes = [line.strip() for line in printed.getvalue().splitlines() if line.strip()]
    return Parsed(release, kept[0], tuple(notes))


def _installed() -> tuple[str, Path]:
    """The version of OpenRLHF, and the file with its parser."""
    try:
        release = version("openrlhf")
    except PackageNotFoundError:
        raise ArgumentsError(
            "OpenRLHF is not installed here, and its own parser reads the command line: run this in an image "
            "or in the environment of the run"
        ) from None
    spec = importlib.util.find_spec(MODULE)
    if spec is None or spec.origin is None:
        raise ArgumentsError(f"OpenRLHF {release} has no {MODULE}")
    return release, Path(spec.origin)


def _main(source: Path, train: Any) -> tuple[Any, dict[str, Any]]:
    """The main block of a module, compiled, and a scope with ``train`` and the imports that it uses."""
    tree = ast.parse(source.read_text(encoding="utf-8"), str(source))
    block = next((node for node in tree.body if _is_main(node)), None)
    if block is None:
        raise ArgumentsError(f"{source}: no main block in which a parser could be")
    used = {node.id for node in ast.walk(block) if isinstance(node, ast.Name)}
    imports = [
        node
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        and used & {(name.asname or name.name).split(".")[0] for name in node.names}
    ]
    checks = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == CHECKS]
    if checks:  # upstream's `train` begins with them
        block.body.append(ast.parse(f"{CHECKS}(args)").body[0])
    wanted: list[ast.stmt] = [*imports, *checks, *block.body]
    scope = {"__name__": MODULE, "__file__": str(source), "train": train}
    return compile(ast.Module(wanted, []), str(source), "exec"), scope


def _is_main(node: ast.stmt) -> TypeGuard[ast.If]:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


@contextlib.contextmanager
def _argv(arguments: list[str]) -> Iterator[None]:
    """Another ``sys.argv``."""
    before = sys.argv
    sys.argv = arguments
    try:
        yield
    finally:
        sys.argv = before


def _said(error: Exception) -> str:
    """An error's first line; of one that was not raised for users its kind and the statement too."""
    text = str(error).split("\n")[0]
    if isinstance(error, AssertionError) and text:
        return text
    raised = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text}, in `{raised.line}` ({raised.filename}:{raised.lineno})"
