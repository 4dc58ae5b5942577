"""A probe declares what it replaces of upstream's by `replace`, `replace_module` or `stub` of preamble.py.

Only so the catalogue can show it: a stub may decide how a probe ends.
"""

import ast
import sys
from collections.abc import Iterator

import pytest

from scripts.paths import ROOT

PROBES = ROOT / "tests" / "patches"
SHARED = ("flat.py", "stage.py")  # parts of probes
OWN = {"rlhf_stack", *sys.stdlib_module_names}


def probes() -> Iterator[tuple[str, ast.Module]]:
    """The Python code in the tests' strings, and the parts that they share, by file and line."""
    for file in sorted(PROBES.glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if file.name in SHARED:
            yield file.name, tree
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "import" in node.value:
                try:
                    yield f"{file.name}:{node.lineno}", ast.parse(node.value)
                except SyntaxError:
                    continue  # prose


def root_of(node: ast.expr) -> str:
    """The name at the start of ``a.b.c``."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def of_upstream(tree: ast.Module) -> set[str]:
    """The names that are imported from upstream's packages."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] not in OWN:
            names |= {alias.asname or alias.name for alias in node.names}
    return names - OWN


def is_stub(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "stub"


def is_no_stub(kind: ast.ClassDef, tree: ast.Module) -> bool:
    """Whether a class needs no declaration: an exception, one of upstream's, a process."""
    bases = {root_of(base) for base in kind.bases}
    code = ast.unparse(tree)
    remote = [f"ray.remote({kind.name})", f"ray.remote(num_cpus=0)({kind.name})"]
    return (
        any(ast.unparse(one).startswith("ray.remote") for one in kind.decorator_list)
        or any(call in code for call in remote)
        or "Exception" in bases
        or bool(bases & of_upstream(tree))
    )


def undeclared(tree: ast.Module) -> list[str]:
    """The statements of a probe that replace something of upstream's and do not declare it."""
    found, upstream = [], of_upstream(tree)
    stubs = [one for one in ast.walk(tree) if is_stub(one)]
    stubs += [one for one in ast.walk(tree) if any(map(is_stub, getattr(one, "decorator_list", [])))]
    declared = {id(inner) for one in stubs for inner in ast.walk(one)}
    for node in (one for one in ast.walk(tree) if id(one) not in declared):
        targets = node.targets if isinstance(node, ast.Assign) else []
        replaced = [one for one in targets if isinstance(one, ast.Attribute | ast.Subscript)]
        found += [ast.unparse(one) for one in replaced if root_of(one) in upstream]
        found += [ast.unparse(one) for one in replaced if ast.unparse(one).startswith("sys.modules")]
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            found.append(ast.unparse(node))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("some", "types.SimpleNamespace"):
            given = [keyword.value for keyword in node.keywords]
            found += [ast.unparse(one) for one in given if isinstance(one, ast.Lambda)]
        if isinstance(node, ast.ClassDef) and not is_no_stub(node, tree):
            found.append(f"class {node.name}")
    return found


@pytest.mark.parametrize(("where", "tree"), [pytest.param(*probe, id=probe[0]) for probe in probes()])
def test_a_probe_declares_its_stubs(where: str, tree: ast.Module) -> None:
    assert undeclared(tree) == [], f"{where}: use replace(), replace_module() or stub() of preamble.py"


@pytest.mark.parametrize(
    "code",
    [
        "import ray\nray.get = print",
        "import torch.cuda\ntorch.cuda.synchronize = print",
        "from openrlhf.trainer import ppo_trainer as module\nmodule.Loader.x = 1",
        "sys.modules['vllm'] = 1",
        "setattr(module, 'get', 1)",
        "engine = some(get=lambda: 1)",
        "class Engine:\n    pass",
    ],
)
def test_what_is_not_declared_is_found(code: str) -> None:
    assert len(undeclared(ast.parse(code))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nsys.argv = []",
        "class Ended(Exception):\n    pass",
        "@stub('an engine')\nclass Engine:\n    pass",
        "engine = stub('an engine', get=lambda: 1)",
        "self.number = 1",
    ],
)
def test_a_declared_stub_and_the_probes_own_names_are_allowed(code: str) -> None:
    assert undeclared(ast.parse(code)) == []
