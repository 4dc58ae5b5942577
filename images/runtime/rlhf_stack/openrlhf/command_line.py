"""The arguments of an OpenRLHF run, read by the parser of the installed OpenRLHF.

Upstream builds its parser under ``if __name__ == "__main__"``. That block is executed unchanged, with its
checks and defaults, but with a replacement of ``train`` that records the parsed arguments. No option is
declared twice, and nothing starts. A patch that moves the block into a function would take hunks in eight
files (four programs of two releases), would not read an OpenRLHF outside the images, and its caller would
import the whole module: 15 to 18 s with Ray, vLLM and DeepSpeed, instead of 10 s.
"""

import argparse
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
from rlhf_stack.inputs.text import shortened
from rlhf_stack.openrlhf import renamed_flags
from rlhf_stack.openrlhf.run_limits import check_digits, check_values, check_words
from rlhf_stack.openrlhf.run_spec import is_flat
from rlhf_stack.openrlhf.trainer_command import (
    LAUNCHERS,
    TRAINERS,
    UNREAD_LAUNCHERS,
    commands_in,
    program_of,
)

MODULE = "openrlhf.cli.train_ppo_ray"
NAME = "train_ppo_ray"
CHECKS = "_validate_args"  # of OpenRLHF 0.5
CHECKED = "_rlhf_stack_checked"


class ArgumentsError(UserError):
    """The installed OpenRLHF rejects a command line, or is not installed; the message is one line."""


@dataclass(frozen=True)
class Parsed:
    """Arguments of ``train``, nested from OpenRLHF 0.9 on, flat before; ``notes`` are the lines printed."""

    release: str
    values: Any
    notes: tuple[str, ...]


def extract_arguments(command: Sequence[str]) -> list[str]:
    """Return the arguments of ``train_ppo_ray`` in ``command``, which may consist of them only.

    `ArgumentsError` if the program is another one, or if there is none; a value may end as a program does.
    """
    if not command or command[0].startswith("-"):
        return list(command)
    found = program_of(command)
    if found is None or found.name != NAME:
        raise _not_a_run((found and found.word) or command[0])
    _refuse_launcher(found.launcher)
    return list(found.arguments)


def _refuse_launcher(words: Sequence[str]) -> None:
    """Raise `UserError` if ``words`` before the program start it once for each GPU."""
    for name in commands_in(words):
        if name in (*LAUNCHERS, *UNREAD_LAUNCHERS):
            raise UserError(
                f"{name} starts {NAME} once for each GPU, and each would start all ranks on Ray: start it "
                f"with python -m {MODULE}"
            )


def _not_a_run(word: str) -> ArgumentsError:
    return ArgumentsError(
        f"{shortened(word)!r} does not start a run that can be planned: give the command line of {NAME}, "
        f"{', '.join(TRAINERS[:-1])} or {TRAINERS[-1]}, such as -- python -m {MODULE} ARGUMENTS"
    )


def parse(arguments: Sequence[str], program: str = NAME) -> Parsed:
    """Parse ``arguments`` of ``program`` with the installed OpenRLHF; `ArgumentsError` if it rejects them."""
    check_words(arguments)
    release, source = _installed(program)
    recorded: list[Any] = []

    def checked(values: Any) -> Any:
        check_digits(arguments, values)
        check_values(values, is_flat(release))
        return values

    code, scope = _main_block(source, recorded.append, checked)
    printed, errors = io.StringIO(), io.StringIO()
    try:
        with (
            _argv([program, *arguments]),
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(errors),
        ):
            exec(code, scope)  # noqa: S102  (the installed OpenRLHF's own code)
    except SystemExit as ended:
        if not ended.code:
            raise ArgumentsError(f"--help among the arguments of {program}: it starts no run") from None
        lines = (errors.getvalue() or printed.getvalue()).strip().splitlines() or ["no reason"]
        message = lines[-1].split("error: ")[-1]
        hints = renamed_flags.hints(message, _options(scope.get("parser")))
        raise ArgumentsError(
            f"OpenRLHF {release}: {': '.join(filter(None, [message, '; '.join(hints)]))}"
        ) from None
    except UserError:  # of `checked`
        raise
    except ModuleNotFoundError as error:
        raise ArgumentsError(
            f"OpenRLHF {release} needs {error.name}, which is not installed: run this in an image or in the "
            "environment of the run"
        ) from None
    except Exception as error:  # its checks are assertions, and an unchecked mistake raises anything
        raise ArgumentsError(f"OpenRLHF {release} rejects these arguments: {_summary(error)}") from error
    notes = [line.strip() for line in printed.getvalue().splitlines() if line.strip()]
    return Parsed(release, recorded[0], tuple(notes))


def _options(parser: Any) -> frozenset[str]:
    """The options of upstream's parser, if its main block got as far as making one."""
    known = parser._actions if isinstance(parser, argparse.ArgumentParser) else ()
    return frozenset(name for action in known for name in action.option_strings if name.startswith("--"))


def installed_file(program: str) -> Path | None:
    """Return the file of ``program`` in the installed OpenRLHF, None if there is none."""
    try:
        return _installed(program)[1].resolve()
    except ArgumentsError:
        return None


def _installed(program: str) -> tuple[str, Path]:
    """Return the version of OpenRLHF and the file with the parser of ``program``."""
    try:
        release = version("openrlhf")
    except PackageNotFoundError:
        raise ArgumentsError(
            "OpenRLHF is not installed, and its parser reads the command line: run this in an image "
            "or in the environment of the run"
        ) from None
    module = f"openrlhf.cli.{program}"
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ArgumentsError(f"OpenRLHF {release} has no {module}")
    return release, Path(spec.origin)


class _CheckedArguments(ast.NodeTransformer):
    """Wraps the parser's result in `CHECKED`, before upstream's checks, which divide by some numbers."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not (isinstance(node.func, ast.Attribute) and node.func.attr == "parse_args"):
            return node
        return ast.copy_location(ast.Call(ast.Name(CHECKED, ast.Load()), [node], []), node)


def _main_block(source: Path, train: Any, checked: Any) -> tuple[Any, dict[str, Any]]:
    """Compile the main block of a module and the imports it uses; return it and a scope with ``train``.

    ``checked`` is called with what the parser returns, and returns it.
    """
    tree = ast.parse(source.read_text(encoding="utf-8"), str(source))
    block = next((node for node in tree.body if _is_main(node)), None)
    if block is None:
        raise ArgumentsError(f"{source} has no main block with a parser")
    used = {node.id for node in ast.walk(block) if isinstance(node, ast.Name)}
    imports = [
        node
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        and used & {(name.asname or name.name).split(".")[0] for name in node.names}
    ]
    checks = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == CHECKS]
    if checks:  # upstream's `train` calls them first
        block.body.append(ast.parse(f"{CHECKS}(args)").body[0])
    program = _CheckedArguments().visit(ast.Module([*imports, *checks, *block.body], []))
    scope = {"__name__": MODULE, "__file__": str(source), "train": train, CHECKED: checked}
    return compile(ast.fix_missing_locations(program), str(source), "exec"), scope


def _is_main(node: ast.stmt) -> TypeGuard[ast.If]:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


@contextlib.contextmanager
def _argv(arguments: list[str]) -> Iterator[None]:
    """Replace ``sys.argv`` for the duration of the context."""
    before = sys.argv
    sys.argv = arguments
    try:
        yield
    finally:
        sys.argv = before


def _summary(error: Exception) -> str:
    """Return the first line of an assertion; of any other error the type and the statement too."""
    text = str(error).split("\n")[0]
    if isinstance(error, AssertionError) and text:
        return text
    raised = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text}, in `{raised.line}` ({raised.filename}:{raised.lineno})"
