"""The table in kvchat/README.md lists exactly the private parts of other libraries that kvchat uses."""

import ast
import re
from collections.abc import Sequence

from kvchat.paths import PACKAGE

PUBLIC = {"_asdict", "_replace", "_fields", "_exit"}  # of named tuples and of os, which are documented
# Also defined in kvchat: it overrides them, or has the same name by chance.
ALSO_OURS = {
    "_get_renders",
    "_gather_commands",
    "_refresh_command_list",
    "_handle_exception",
    "_print_error_renderables",
}
LISTED = re.compile(r"^\| (`_.*?) \|", re.MULTILINE)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined_here(nodes: Sequence[ast.AST]) -> set[str]:
    """The names that kvchat's own code defines."""
    names = set()
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def private_names(nodes: Sequence[ast.AST]) -> set[str]:
    """The private names of other libraries that the code uses."""
    here, names = defined_here(nodes) - ALSO_OURS, set()
    for node in nodes:
        match node:
            case ast.Attribute(attr=name) if is_private(name) and name not in here:
                names.add(name)
            case ast.ImportFrom(module=str(module)) if not module.startswith("kvchat"):
                names |= {part for part in module.split(".") if is_private(part)}
                names |= {alias.name for alias in node.names if is_private(alias.name)}
    return names - PUBLIC


def test_the_readme_lists_exactly_the_private_names_of_libraries():
    text = (PACKAGE / "README.md").read_text(encoding="utf-8")
    listed = {name for row in LISTED.findall(text) for name in re.findall(r"`(\w+)`", row)}
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in PACKAGE.rglob("*.py"))
    assert private_names([node for tree in trees for node in ast.walk(tree)]) == listed
