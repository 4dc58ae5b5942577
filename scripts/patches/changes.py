"""Which changes of a patch a probe executes: in its files, a mark before each changed statement notes a run.

A change is a run of lines that differ between a file without the patch and with it. Its statements are the
innermost ones that have one of these lines. A header of a function or an ``except`` runs when its body does,
so its mark is there; other statements are marked before them. A change was executed if all its marks ran, in
whichever process.
"""

import ast
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher

EXECUTED = "RLHF_STACK_EXECUTED"  # names the file; tests/conftest.py sets it
NOTE = (  # an expression of its own: `rlhf_stack.openrlhf.command_line` runs some blocks without their module
    "(lambda file: file and open(file, 'a').write({line!r}))(__import__('os').environ.get({variable!r}))"
)
Body = ast.FunctionDef | ast.AsyncFunctionDef | ast.ExceptHandler
Statement = ast.stmt | ast.ExceptHandler


def mark(source: str, before: Mapping[str, str], name: str) -> tuple[str, dict[str, dict[str, list[str]]]]:
    """Return ``source`` with marks, and by patch the marks of each of its changes.

    ``before`` is the file without each patch. A change is named by ``name``, the path of the file, and its
    first line in ``source``. A mark that runs is noted in the file that ``RLHF_STACK_EXECUTED`` names.
    """
    tree = ast.parse(source)
    statements = [one for one in ast.walk(tree) if isinstance(one, Statement) and not _is_first(one)]
    marks: dict[int, str] = {}  # by the id of the statement that is marked
    changes: dict[str, dict[str, list[str]]] = {}
    for patch, text in before.items():
        changes[patch] = {}
        for first, last in _changed(text.splitlines(), source.splitlines()):
            lines = range(first, last + 1)
            touched = [one for one in statements if set(lines).intersection(_own_lines(one))]
            for one in touched:
                marks.setdefault(id(one), f"{name}:{_first_line(one)}")
            if touched:
                changes[patch][f"{name}:{first}"] = sorted({marks[id(one)] for one in touched})
    _insert(tree, marks)
    return ast.unparse(ast.fix_missing_locations(tree)), changes


def _changed(before: list[str], after: list[str]) -> Iterator[tuple[int, int]]:
    """The first and last line of each change in ``after``; of removed lines, the line that follows."""
    for tag, _, _, first, last in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag != "equal":
            yield first + 1, max(last, first + 1)


def _first_line(node: Statement) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min(one.lineno for one in (node, *decorators))


def _own_lines(node: Statement) -> range:
    """The lines of a statement, up to the first statement in it."""
    inner = [_first_line(one) for one in ast.walk(node) if one is not node and isinstance(one, Statement)]
    return range(_first_line(node), min([(node.end_lineno or node.lineno) + 1, *inner]))


def _insert(tree: ast.Module, marks: dict[int, str]) -> None:
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if not isinstance(body, list):
                continue
            marked: list[ast.stmt] = []
            for statement in body:
                if id(statement) in marks and not isinstance(statement, Body):
                    marked.append(_note(marks[id(statement)]))
                marked.append(statement)
            setattr(node, field, marked)
        if isinstance(node, Body) and id(node) in marks:
            node.body.insert(_is_first(node.body[0]), _note(marks[id(node)]))


def _note(made: str) -> ast.stmt:
    return ast.parse(NOTE.format(variable=EXECUTED, line=f"{made}\n")).body[0]


def _is_first(node: ast.AST) -> bool:
    """Whether Python wants the statement at the start of a file: a docstring or an import of the future."""
    return (isinstance(node, ast.ImportFrom) and node.module == "__future__") or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )
