"""The house rules that a linter does not know. `breaches(path, text)` is a pure function of one tracked file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

FILE_LINES, FUNCTION_LINES, RECIPE_LINES = 600, 80, 40
VAGUE_NAMES = {"utils", "helpers", "common", "misc"}
CONFIG_NAMES = {"cfg", "conf", "config"}
# Hosts that a file may name: papers, other people's code, licence and SVG namespaces, this machine.
HOSTS = {"arxiv.org", "github.com", "www.apache.org", "www.w3.org", "localhost", "127.0.0.1"}
# "path" or "path:function" -> why it may be longer than the limit.
LONG: dict[str, str] = {}

# Modules of nn.Module classes load torch, and are imported by the function that builds them.
LOADS_TORCH = "_modules.py"

_HOST = re.compile(r"https?://([\w.-]+)")
_MACHINE_PATH = re.compile(r"(?<![\w.}</-])/(?:work|root|home)\b")
_NOQA = re.compile(r"#\s*noqa(?!: [A-Z0-9, ]+ - \w)")

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)

Breach = tuple[int, str]


def breaches(path: str, text: str) -> list[str]:
    """What `text` at `path` (relative to the repository) breaks, as `path:line: rule`."""
    found = [*_of_any_file(path, text)]
    if path.endswith(".py"):
        found += _of_python(path, text)
    if path.startswith("unirl/recipes/") and text.count("\n") > RECIPE_LINES:
        found.append((1, f"a recipe of more than {RECIPE_LINES} lines"))
    return [f"{path}:{line}: {rule}" for line, rule in sorted(found)]


def _of_any_file(path: str, text: str) -> Iterator[Breach]:
    for number, line in enumerate(text.splitlines(), 1):
        if _MACHINE_PATH.search(line):
            yield number, "a path of one machine"
        for host in set(_HOST.findall(line)) - HOSTS:
            yield number, f"host {host} is not one that a file may name"
    if VAGUE_NAMES & {PurePosixPath(part).stem for part in PurePosixPath(path).parts}:
        yield 1, "a name that says nothing"


def _of_python(path: str, text: str) -> Iterator[Breach]:
    lines, tree = text.splitlines(), ast.parse(text)
    if len(lines) > FILE_LINES and path not in LONG:
        yield 1, f"a file of more than {FILE_LINES} lines"
    for number, line in enumerate(lines, 1):
        if _NOQA.search(line):
            yield number, "noqa without rule and reason: `noqa: RULE - reason`"
    yield from _module_state(tree)
    if path.startswith("unirl/") and not path.endswith(LOADS_TORCH):
        yield from _torch_at_import(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES and f"{path}:{node.name}" not in LONG:
                yield node.lineno, f"{node.name} has {length} lines, more than {FUNCTION_LINES}"
        elif isinstance(node, ast.ExceptHandler) and _is_broad(node) and "noqa: BLE001" not in lines[node.lineno - 1]:
            yield node.lineno, "broad except that does not raise"
        elif isinstance(node, ast.Call) and (rule := _forbidden_call(path, node)):
            yield node.lineno, rule


def _module_state(tree: ast.Module) -> Iterator[Breach]:
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.List | ast.Dict | ast.Set):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and not target.id.strip("_").isupper() for target in targets):
                yield node.lineno, "mutable state of a module (a constant is UPPER_CASE)"


def _torch_at_import(tree: ast.Module) -> Iterator[Breach]:
    for node in _run_at_import(tree):
        if isinstance(node, ast.Name):
            used = [f"{node.id}."]
        elif isinstance(node, ast.ImportFrom):
            used = [f"{node.module}."]
        elif isinstance(node, ast.Import):
            used = [alias.name for alias in node.names]
        else:
            continue
        if any(name.startswith("torch.") for name in used):
            yield node.lineno, "torch is used at import: `unirl check` would load it"


def _run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported: no function bodies, and no annotations (they are strings)."""
    for name, field in ast.iter_fields(node):
        if name == "annotation" or name == "returns" or (name == "body" and isinstance(node, _FUNCTIONS)):
            continue
        for child in field if isinstance(field, list) else [field]:
            if isinstance(child, ast.AST):
                yield child
                yield from _run_at_import(child)


def _is_broad(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    broad = any(kind is None or ast.unparse(kind) in {"Exception", "BaseException"} for kind in caught)
    return broad and not isinstance(handler.body[-1], ast.Raise)


def _forbidden_call(path: str, call: ast.Call) -> str | None:
    name, product = ast.unparse(call.func), path.startswith("unirl/")
    owner, _, method = name.rpartition(".")
    if name == "getattr" and len(call.args) > 2:
        return "getattr with a default"
    if name == "hasattr":
        return "hasattr"
    if method == "get" and owner.rpartition(".")[2] in CONFIG_NAMES:
        return "a config is typed: no `.get`"
    if name == "torch.load" and "weights_only=True" not in (ast.unparse(keyword) for keyword in call.keywords):
        return "torch.load without weights_only=True"
    if product and name in {"pickle.load", "pickle.loads", "pickle.Unpickler"}:
        return "unpickling runs what the file says"
    if product and name == "print" and not path.startswith("unirl/cli"):
        return "print outside the command line"
    return None
