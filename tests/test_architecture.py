"""Who imports whom: the arrows of docs/design.md, read from the source with ast."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import ring_flash_attn

PACKAGE = Path(ring_flash_attn.__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
HEAVY = (
    "triton",
    "cutlass",
    "cuda",
    "flash_attn",
    "flash_attn_interface",
    "transformers",
    "typer",
    "rich",
    "plotly",
    "playwright",
    "pytest",
    "hypothesis",
)

# What each folder may import of the package, besides itself. Nothing imports upwards.
CORE = {"trace", "cache", "plan", "kernels", "comm", "engine", "api", "adapters"}
ALLOWED: dict[str, set[str]] = {
    "trace": set(),
    "cache": set(),
    "plan": set(),
    "kernels": {"plan", "trace", "cache"},
    "comm": {"trace", "cache"},
    "engine": {"plan", "kernels", "comm", "trace", "cache"},
    "api": {"plan", "kernels", "comm", "engine"},
    "ops": {"api"},
    "adapters": {"plan", "kernels", "comm", "engine", "api"},
    "bench": CORE - {"adapters"},
    "simulate": {*CORE - {"adapters"}, "bench"},
    "verify": {*CORE - {"adapters"}, "bench"},
    "draw": {*CORE - {"adapters"}, "bench"},
    "report": {*CORE - {"adapters"}, "bench", "draw"},
    "lab": {*CORE - {"adapters"}, "bench", "draw"},
    "cli": {*CORE, "bench", "verify", "draw", "report", "lab", "simulate"},
    "__init__": {"api", "adapters", "simulate"},
}


def part_of(module: str) -> str:
    """Return the top-level part of the package in which a module lies."""
    return module.split(".", 1)[0] or "__init__"


def imports(module: str, in_functions: bool = True) -> Iterator[tuple[str, int]]:
    """Yield the full names that a module imports when it runs, with the line.

    Imports under TYPE_CHECKING do not count; those inside of functions only if asked for.
    """
    tree = ast.parse(MODULES[module].read_text())
    functions = () if in_functions else (ast.FunctionDef, ast.AsyncFunctionDef)
    hidden = {
        child
        for node in ast.walk(tree)
        if isinstance(node, functions)
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for statement in node.body
        for child in ast.walk(statement)
    }
    is_package = MODULES[module].name == "__init__.py"
    where = ["ring_flash_attn", *(module.split(".") if module != "__init__" else [])]
    if not is_package:
        where.pop()
    for node in ast.walk(tree):
        if node in hidden:
            continue
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = where[: len(where) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for name in node.names:
                yield f"{source}.{name.name}", node.lineno


def outside(module: str) -> set[str]:
    """Return the top-level packages that a module imports, other than this one."""
    return {name.split(".")[0] for name, _ in imports(module)} - {"ring_flash_attn", "__future__"}


def inside(module: str, in_functions: bool = True) -> set[str]:
    """Return the modules of this package that a module imports, as keys of MODULES."""
    found = set()
    for name, _ in imports(module, in_functions):
        if name.split(".")[0] != "ring_flash_attn":
            continue
        rest = name.split(".")[1:]
        while rest and ".".join(rest) not in MODULES:
            rest.pop()  # the name of something in a module
        found.add(".".join(rest) or "__init__")
    return found


def test_the_modules_are_found() -> None:
    """Else everything below would pass for nothing."""
    assert {"plan.layout", "plan.routes.ring", "kernels.reference", "comm.distributed"} <= set(
        MODULES
    )
    assert inside("engine.attention") >= {"comm", "kernels.base", "plan.steps", "engine.executor"}
    assert "torch" in outside("comm.distributed")
    assert {part_of(module) for module in MODULES} <= set(ALLOWED), "a new part needs its arrows"


@pytest.mark.parametrize("module", [m for m in MODULES if part_of(m) == "plan"])
def test_plain_data_imports_the_standard_library_only(module: str) -> None:
    """And arrays: of numpy, or of torch, which comes when the first is made."""
    arrays = {"numpy", "torch"} if module == "plan.arrays" else set()
    assert outside(module) <= set(sys.stdlib_module_names) | arrays
    assert {part_of(name) for name in inside(module)} <= {"plan"}


@pytest.mark.parametrize("module", MODULES)
def test_nothing_imports_upwards(module: str) -> None:
    part = part_of(module)
    above = {part_of(name) for name in inside(module)} - ALLOWED[part] - {part}
    assert not above, f"{module} imports {above}"


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Return the modules that import each other, directly or through others; Tarjan's algorithm."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for other in arrows[module]:
            if other not in number:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], number[other])
        if lowest[module] == number[module]:
            first = stack.index(module)
            if len(stack) - first > 1:
                found.append(sorted(stack[first:]))
            del stack[first:]

    for module in arrows:
        if module not in number:
            visit(module)
    return found


def test_circles_are_found() -> None:
    arrows = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": set()}
    assert circles(arrows) == [["a", "b", "c"]]
    assert circles({**arrows, "c": set()}) == []


def test_no_module_imports_one_that_imports_it() -> None:
    arrows = {module: inside(module, in_functions=False) - {module} for module in MODULES}
    assert circles(arrows) == []


@pytest.mark.parametrize("part", sorted({part_of(module) for module in MODULES}))
def test_no_circle_within_a_part_even_inside_of_functions(part: str) -> None:
    modules = {module for module in MODULES if part_of(module) == part}
    arrows = {module: inside(module) & modules - {module} for module in modules}
    assert circles(arrows) == []


@pytest.mark.parametrize("module", [m for m in MODULES if part_of(m) != "comm"])
def test_comm_alone_knows_torch_distributed(module: str) -> None:
    found = [
        (name, line)
        for name, line in imports(module)
        if name == "torch.distributed"
        or name.startswith(("torch.distributed.", "torch.distributed"))
    ]
    text = MODULES[module].read_text()
    used = [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed"
    ]
    assert (found, used) == ([], [])


_ROWS = {"merge", "fused_merge", "rows", "fused_rows"}
_HOST = {"tables", "scheduler", "tma", "launches", "flat_launch", "row_stats", "grad_parts"}


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("kernels.")])
def test_one_kernel_does_not_import_another(module: str) -> None:
    """Kernels share some files; a kernel in a folder has its own, too."""
    ours = module.split(".")[1]
    shared = {"base", "costs", "device_cache", "dropout", *_ROWS, *_HOST}
    others = {m.split(".")[1] for m in inside(module) if m.startswith("kernels.")}
    assert others <= (shared if ours in shared else {*shared, ours})


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("plan.routes.")])
def test_a_route_knows_neither_layouts_nor_kernels(module: str) -> None:
    allowed = {
        "plan.build",
        "plan.groups",
        "plan.problem",
        "plan.shares",
        "plan.steps",
        "plan.tiles",
    }
    assert {m for m in inside(module) if not m.startswith("plan.routes")} <= allowed
    names = ("contiguous", "zigzag", "stripe")
    tree = ast.parse(MODULES[module].read_text())
    constants = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    assert not constants & {*names, *(f"flat_{name}" for name in names)}


def test_the_oracle_shares_no_code() -> None:
    assert inside("verify.oracle") == set()


def loaded_by(statement: str) -> set[str]:
    """Return the top-level packages in sys.modules of a fresh process."""
    script = f"{statement}\nimport sys\nprint(*sorted({{n.split('.')[0] for n in sys.modules}}))"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=600
    )
    return set(result.stdout.split())


def test_import_loads_torch_and_nothing_heavy() -> None:
    """Nothing but what `import torch, torch.distributed` loads, and the package itself."""
    ours = loaded_by("import ring_flash_attn")
    assert not ours & set(HEAVY)
    torch_alone = loaded_by("import torch, torch.distributed")
    extra = ours - torch_alone - set(sys.stdlib_module_names)
    assert extra == {"ring_flash_attn"}


@pytest.mark.parametrize("module", [m for m in MODULES if part_of(m) == "plan"])
def test_plain_data_runs_without_torch(module: str) -> None:
    """As files of an empty package, in a process that cannot import torch."""
    statement = (
        "import sys, types\n"
        "sys.modules['torch'] = None\n"
        "package = types.ModuleType('ring_flash_attn')\n"
        f"package.__path__ = [{str(PACKAGE)!r}]\n"
        "sys.modules['ring_flash_attn'] = package\n"
        f"import ring_flash_attn.{module}"
    )
    assert "ring_flash_attn" in loaded_by(statement)


def test_no_class_has_the_name_of_another() -> None:
    """But for exercises and solutions: they have the names of their step."""
    again = ("lab.exercises.", "lab.solutions.")
    names = Counter(
        node.name
        for module, path in MODULES.items()
        if not module.startswith(again)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, times in names.items() if times > 1] == []


def test_routes_are_there_with_the_plans() -> None:
    """In a process that has imported nothing else."""
    code = "from ring_flash_attn.plan import route_names; print(*route_names())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    routes = {path.stem for path in (PACKAGE / "plan" / "routes").glob("*.py")} - {"__init__"}
    assert set(found.stdout.split()) == routes


def test_every_file_opens_with_a_sentence() -> None:
    for module, path in MODULES.items():
        doc = ast.get_docstring(ast.parse(path.read_text()))
        assert doc, module
        assert doc.split("\n\n")[0].rstrip().endswith((".", ":", "`", "?")), module
