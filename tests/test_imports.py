"""Architecture rules: imports go down only, no cycles among files or components, no file and no package too large.

A component is a sub-package, or a file directly in a package.
Every import statement counts, also one inside a function and one for type checkers only.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import kvchat
from kvchat.config import modes

PACKAGE = Path(kvchat.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 700
MAX_FILES = 19  # in one package, without its sub-packages
HEAVY = {"torch", "transformers", "tokenizers", "safetensors", "numpy", "numba", "llvmlite", "triton"}
RESTRICTED = HEAVY | {"textual", "rich", "pynvml", "pydantic"}

# package -> what it may import: packages or single modules of kvchat, and libraries that others may not.
# The package itself (``kvchat``) provides ``kvchat.load`` lazily.
LEAVES = {"errors", "files", "foreign_text", "libraries", "paths", "process", "thoughts", "units"}
BELOW_ENGINE = LEAVES | {"nvml", "protocol", "config", "kv"}
ALLOWED = {
    "errors": set(),
    "files": {"errors", "units"},
    "foreign_text": set(),
    "libraries": {"errors"},
    "paths": set(),
    "process": set(),
    "thoughts": {"units"},
    "units": set(),
    "nvml": {*LEAVES, "protocol.figures", "pynvml"},
    "protocol": {*LEAVES, "protocol", "pydantic"},
    "config": {*LEAVES, "config", "pydantic"},
    "config.schema": {"protocol"},
    "config.profiles": {"nvml"},
    "kv": {*LEAVES, "config.modes", "kv", "torch", "numpy", "numba", "llvmlite", "triton"},
    "models": {*BELOW_ENGINE, "models", *HEAVY},
    "remote": {*LEAVES, "protocol", "remote"},
    "engine": {*BELOW_ENGINE, "models", "remote", "engine", *HEAVY},
    "conversations": {*LEAVES, "protocol", "conversations", "pydantic"},
    "replay": {*LEAVES, "protocol", "replay"},
    "tui": {*LEAVES, "config", "protocol", "conversations", "models.catalog", "remote", "tui", "textual", "rich"},
    "serve": {*LEAVES, "config", "protocol", "serve", "pydantic"},
    "serve.answers": {"transformers"},  # the parser of tool calls, imported when there are any
    "doctor": {*LEAVES, "nvml", "config", "kv.memory", "doctor"},
    "bench": {*BELOW_ENGINE, "models", "engine", "bench", "kvchat", *HEAVY},
    "cli": {
        *BELOW_ENGINE,
        "models",
        "conversations",
        "remote",
        "engine",
        "tui",
        "serve",
        "doctor",
        "bench",
        "cli",
        "kvchat",
    },
    "__main__": {"cli", "process"},
    "kvchat": {"engine", "paths", "process"},
}


@cache
def modules() -> dict[str, Path]:
    """Every module by its name without ``kvchat.``; the package itself is ``kvchat``."""
    names = {}
    for path in FILES:
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names[".".join(part for part in parts if part != "__init__") or "kvchat"] = path
    return names


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """What a file imports: the module and the name taken from it, "" for the module itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from ((node.module or "", alias.name) for alias in node.names)


def targets(tree: ast.AST) -> Iterator[str]:
    """The modules of kvchat that a file imports, without ``kvchat.``, and the restricted libraries."""
    for module, name in imported(tree):
        top, _, inner = module.partition(".")
        if top != "kvchat":
            yield from {top} & RESTRICTED
        elif (submodule := f"{inner}.{name}".strip(".")) in modules() and name:
            yield submodule
        else:
            yield inner or "kvchat"


@cache
def facts() -> dict[str, tuple[frozenset[str], set[object], list[str]]]:
    """What each module imports, its constants, and what its classes leave unassigned; each file is parsed once."""
    found = {}
    for name, path in modules().items():
        tree = ast.parse(path.read_text("utf-8"))
        constants = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        found[name] = frozenset(targets(tree)), constants, list(unassigned(tree))
    return found


def graph() -> dict[str, frozenset[str]]:
    return {name: imports for name, (imports, _, _) in facts().items()}


def allowed(name: str) -> set[str]:
    """What the module may import, by its package and by its own name."""
    return ALLOWED.get(name.split(".")[0], set()) | ALLOWED.get(name, set())


def is_allowed(name: str, target: str) -> bool:
    return any(target == prefix or target.startswith(f"{prefix}.") for prefix in allowed(name))


def components(graph: dict[str, frozenset[str]], folder: str) -> dict[str, frozenset[str]]:
    """The imports among the sub-packages and files directly in a folder; "" is the whole package."""
    prefix = f"{folder}." if folder else ""
    component = {name: name.removeprefix(prefix).split(".")[0] for name in graph if name.startswith(prefix)}
    found: dict[str, set[str]] = {one: set() for one in component.values()}
    for name, one in component.items():
        found[one] |= {component[target] for target in graph[name] if target in component} - {one}
    return {one: frozenset(others) for one, others in found.items()}


def cycles(graph: dict[str, frozenset[str]]) -> list[set[str]]:
    """The sets of modules that reach each other."""

    def reached(start: str) -> set[str]:
        found, todo = set(), [start]
        while todo:
            new = graph.get(todo.pop(), frozenset()) - found
            found |= new
            todo += new
        return found

    reach = {name: reached(name) for name in graph}
    found = {frozenset(n for n in graph if n in reach[name] and name in reach[n]) for name in graph}
    return [set(names) for names in sorted(found, key=sorted) if names]


def test_imports_go_down_only():
    assert not {name for name in modules() if name.split(".")[0] not in ALLOWED}, "not in the table"
    wrong = {name: [one for one in found if not is_allowed(name, one)] for name, found in graph().items()}
    assert not {name: targets for name, targets in wrong.items() if targets}


@pytest.mark.parametrize(
    "folder", [None, "", *(name for name, path in modules().items() if path.name == "__init__.py")]
)
def test_there_are_no_import_cycles(folder):
    found = cycles(graph() if folder is None else components(graph(), folder))
    assert not found, "\n".join(" <-> ".join(sorted(names)) for names in found)


def test_no_file_is_too_long():
    files = [*FILES, *Path(__file__).parent.rglob("*.py")]
    assert len(files) > 500
    lines = {path: len(path.read_text("utf-8").splitlines()) for path in files}
    assert not {path: number for path, number in lines.items() if number > MAX_LINES}


def test_no_package_has_too_many_files():
    files = Counter(path.parent.relative_to(PACKAGE).as_posix() for path in FILES if path.name != "__init__.py")
    assert not {component: number for component, number in files.items() if number > MAX_FILES}


# Files that name modes: the registry, the benchmarks, and the mode that a session starts in.
NAMING_MODES = re.compile(r"config/modes\.py|bench/.*|cli/bench.*|protocol/messages\.py")


def test_only_the_registry_names_modes():
    built_in = {cls.name for cls in modes.BUILT_IN}
    naming = [modules()[name] for name, (_, constants, _) in facts().items() if constants & built_in]
    named = {path.relative_to(PACKAGE).as_posix() for path in naming}
    assert "config/modes.py" in named
    assert not sorted(name for name in named if not NAMING_MODES.fullmatch(name))


def unassigned(tree: ast.AST) -> Iterator[str]:
    """The private attributes that a class declares without a value, as one half of a split class does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not node.decorator_list:
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.value is None:
                    name = line.target.id
                    if name.startswith("_") and not name.startswith("__"):
                        yield f"{node.name}.{name}"


def test_no_class_is_split_across_files():
    assert not {name: names for name, (_, _, names) in facts().items() if names}


def test_a_split_class_is_detected():
    assert list(unassigned(ast.parse("class Tokens:\n    _kv: KVManager\n    size: int = 0"))) == ["Tokens._kv"]
    assert not list(unassigned(ast.parse("@dataclass\nclass Plain:\n    _x: int")))


def test_every_kind_of_import_is_found():
    text = """
import torch.nn as nn
from kvchat import paths
from kvchat.config import schema
from kvchat.kv.modes import build
if TYPE_CHECKING:
    from kvchat.tui.app import run
def f():
    import kvchat
    from kvchat import load
    from kvchat.errors import UsageError
"""
    expected = ["config.schema", "errors", "kv.modes", "kvchat", "kvchat", "paths", "torch", "tui.app"]
    assert sorted(targets(ast.parse(text))) == expected


def test_cycles_and_upward_imports_are_detected():
    nothing: frozenset[str] = frozenset()
    tree = {"a": frozenset({"b"}), "b": frozenset({"c", "torch"}), "c": frozenset({"a"}), "d": frozenset({"a"})}
    assert cycles({**tree, "e": nothing}) == [{"a", "b", "c"}]
    assert cycles({"a": frozenset({"b"}), "b": nothing}) == []
    tree = {"a.x.1": frozenset({"a.y"}), "a.y": frozenset({"a.x.2"}), "a.x.2": nothing, "b": frozenset({"a.y"})}
    assert cycles(components(tree, "a")) == [{"x", "y"}]
    assert cycles(tree) == cycles(components(tree, "")) == cycles(components(tree, "a.x")) == []
    assert is_allowed("kv.modes.sync", "config.modes")
    assert not is_allowed("kv.modes.sync", "config.schema")
    assert not is_allowed("config.modes", "protocol.messages")
    assert is_allowed("config.schema", "protocol.messages")
    assert not is_allowed("tui.app", "engine.session")
    assert not is_allowed("doctor.report", "kv.modes")


# Imported in one process, in this order: what one imports is also loaded for those after it.
LIGHT = {
    "kvchat": HEAVY | {"textual", "pydantic"},
    "kvchat.nvml": {"torch", "pynvml"},
    "kvchat.cli.main": HEAVY | {"textual", "tomlkit"},
    "kvchat.engine.worker": HEAVY | {"textual"},
    "kvchat.replay.engine": HEAVY | {"textual"},
    "kvchat.models.catalog": HEAVY | {"textual"},
}
LIGHTER = {
    "kvchat.serve.server": HEAVY | {"textual", "rich"},
    "kvchat.tui.controller": HEAVY | {"textual", "rich"},
    "kvchat.tui.commands.chat": HEAVY | {"textual", "rich"},
    "kvchat.tui.app": HEAVY,
}


@pytest.mark.parametrize("never", [LIGHT, LIGHTER], ids=["commands and engines", "servers and the application"])
def test_starting_imports_nothing_heavy(never):
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    code += "    print(*{name.split('.')[0] for name in sys.modules})"
    command = [sys.executable, "-c", code, *never]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout.splitlines()
    found = {name: never[name].intersection(seen.split()) for name, seen in zip(never, loaded, strict=True)}
    assert not {name: heavy for name, heavy in found.items() if heavy}
