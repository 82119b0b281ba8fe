"""The shape of the code: small files, small functions, few parameters, no hidden state, no catch-all modules.

Every test lists all offenders at once, as ``file:line: what is wrong``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "manager", "base"}
MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def file_violations(where: str, text: str) -> list[str]:
    lines = text.count("\n")
    return [f"{where}:{lines}: {lines} lines, at most {MAX_FILE_LINES}"] if lines > MAX_FILE_LINES else []


def function_violations(where: str, tree: ast.Module) -> list[str]:
    found = []
    for node in functions(tree):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > MAX_FUNCTION_LINES:
            found.append(f"{where}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}")
    return found


def parameter_violations(where: str, tree: ast.Module) -> list[str]:
    found = []
    for node in functions(tree):
        names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len([name for name in names if name not in {"self", "cls"}])
        if count > MAX_PARAMETERS:
            found.append(f"{where}:{node.lineno}: {node.name} takes {count} parameters, at most {MAX_PARAMETERS}")
    return found


def state_violations(where: str, tree: ast.Module) -> list[str]:
    found = []
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if not isinstance(target, ast.Name) or target.id.startswith("__"):
                continue
            if re.match(r"_?(HAVE|HAS)_", target.id):
                found.append(f"{where}:{node.lineno}: {target.id} guards an import; let a plugin's build fail by name")
            if isinstance(getattr(node, "value", None), MUTABLE) and not target.id.isupper():
                found.append(f"{where}:{node.lineno}: {target.id} is mutable state of the module")
    found += [f"{where}:{node.lineno}: global statement" for node in ast.walk(tree) if isinstance(node, ast.Global)]
    return found


def expert_violations(where: str, text: str) -> list[str]:
    word = re.compile(r"\b(ep|etp|edp|ep_size|expert_model_parallel\w*)\b", re.IGNORECASE)
    lines = enumerate(text.splitlines(), start=1)
    return [f"{where}:{i}: names an expert-parallel dim: {line.strip()}" for i, line in lines if word.search(line)]


def shape_violations(where: str, tree: ast.Module) -> list[str]:
    found = []
    for layer in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        if not any(ast.unparse(base) in {"nn.Module", "Module"} for base in layer.bases):
            continue
        for node in layer.body:
            if not isinstance(node, ast.FunctionDef) or node.name != "forward":
                continue
            text = f"{ast.get_docstring(layer)} {ast.get_docstring(node)}"
            if not re.search(r"\[[a-z0-9.][^\]]*\]", text):
                found.append(f"{where}:{node.lineno}: {layer.name}.forward gives no shape such as [s/tp, b, h]")
    return found


def test_files_are_short(sources) -> None:
    assert [v for source in sources for v in file_violations(source.where, source.text)] == []


def test_functions_are_short(sources) -> None:
    assert [v for source in sources for v in function_violations(source.where, source.tree)] == []


def test_functions_take_few_parameters(shipped) -> None:
    assert [v for source in shipped for v in parameter_violations(source.where, source.tree)] == []


def test_modules_hold_no_state_and_no_guards(shipped) -> None:
    assert [v for source in shipped for v in state_violations(source.where, source.tree)] == []


def test_layers_document_their_shapes(shipped) -> None:
    assert [v for source in shipped for v in shape_violations(source.where, source.tree)] == []


def test_no_module_has_a_vague_name(sources) -> None:
    assert [s.where for s in sources if s.path.stem in VAGUE_NAMES or s.path.parent.name in VAGUE_NAMES] == []


def test_package_init_files_are_empty(shipped) -> None:
    """Importing a package costs nothing; only a ``testing`` package, which runs never import, may gather its names."""
    inits = [s for s in shipped if s.path.name == "__init__.py" and s.path.parent.name != "testing"]
    assert [s.where for s in inits if s.text.strip()] == []


def test_shipped_modules_start_with_a_docstring(shipped) -> None:
    modules = [s for s in shipped if s.path.name != "__init__.py"]
    assert [s.where for s in modules if not ast.get_docstring(s.tree)] == []


def test_tests_hold_no_packages(sources) -> None:
    assert [s.where for s in sources if s.where.startswith("tests/") and s.path.name == "__init__.py"] == []


def test_packages_do_not_name_the_expert_dims(root) -> None:
    """Expert parallelism is a plugin: nothing under packages/ may know its dims."""
    paths = [p for end in ("*.py", "*.yaml") for p in sorted((root / "packages").rglob(end))]
    assert [v for path in paths for v in expert_violations(path.relative_to(root).as_posix(), path.read_text())] == []


def test_every_gate_sees_its_offence() -> None:
    """A gate that cannot fail guards nothing."""
    many = ", ".join(f"p{i}" for i in range(9))
    body = "\n".join("    x = 1" for _ in range(60))
    assert file_violations("f", "\n" * 401)
    assert not file_violations("f", "\n" * 400)
    assert function_violations("f", ast.parse(f"def f():\n{body}"))
    assert parameter_violations("f", ast.parse(f"def f({many}): ..."))
    assert not parameter_violations("f", ast.parse("def f(self, a, b, c, d, e, *, g, h, i): ..."))
    assert state_violations("f", ast.parse("cache = {}"))
    assert state_violations("f", ast.parse("HAVE_TORCH = True"))
    assert state_violations("f", ast.parse("def f():\n    global x\n    x = 1"))
    assert not state_violations("f", ast.parse("SIZES = {'a': 1}\n__all__ = ['a']"))
    layer = 'class A(nn.Module):\n    "{}"\n    def forward(self, x): ...'
    assert shape_violations("f", ast.parse(layer.format("A layer.")))
    assert not shape_violations("f", ast.parse(layer.format("[s, b, h] to [s/tp, b, h].")))
    assert expert_violations("f", 'axis("ep")')
    assert not expert_violations("f", "step, sep, deep")
