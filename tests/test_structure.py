"""Imports point downward; the core stays small."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "jaxpar"


def runtime_imports_of(path: Path) -> set[str]:
    """Without what only the type checker imports."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    return imports_in(tree)


def imports_of(path: Path) -> set[str]:
    """Modules of the project that a file imports, also inside functions."""
    return imports_in(ast.parse(path.read_text()))


def imports_in(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxpar"):
            found.add(node.module)
            found |= {f"{node.module}.{name.name}" for name in node.names}
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names if name.name.startswith("jaxpar")}
    return found


def files(folder: str) -> list[Path]:
    return sorted((PACKAGE / folder).rglob("*.py"))


def offenders(paths: list[Path], forbidden: tuple[str, ...]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in paths
        for name in sorted(imports_of(path))
        if any(name == f"jaxpar.{module}" or name.startswith(f"jaxpar.{module}.") for module in forbidden)
    ]


def test_models_know_no_mesh():
    assert not offenders(files("models"), ("mesh", "pipeline", "optim", "sharding", "build", "step", "state"))


def test_sharding_knows_no_model():
    assert not offenders([PACKAGE / "sharding.py"], ("models", "step", "state", "build"))


def test_step_is_the_bottom_of_the_run():
    above = ("build", "trainer", "loop", "checkpoint", "data", "dryrun", "planner", "runtime", "metrics")
    assert not offenders([PACKAGE / "step.py", PACKAGE / "state.py", PACKAGE / "optim.py"], above)


def test_nobody_imports_the_trainer():
    others = [path for path in PACKAGE.rglob("*.py") if path.name not in ("__init__.py", "trainer.py")]
    assert not offenders(others, ("trainer",))


def modules_of_the_map() -> list[str]:
    """Names of the top level of the package, from the first to the last line of the map in the docs."""
    block = (ROOT / "docs" / "architecture.md").read_text().split("```")[1]
    lines = [line[2:] for line in block.splitlines() if re.match(r"  \w", line)]
    heads = [re.split(r"\s{2,}|(?<=\.py) ", line)[0] for line in lines]
    return [name.strip().removesuffix(".py").removesuffix("/") for head in heads for name in head.split(",")]


def test_the_map_names_every_module_and_imports_follow_it():
    place = {name: i for i, name in enumerate(modules_of_the_map())}
    here = {path.stem for path in PACKAGE.glob("*.py")} | {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(place) == here
    upward = set()
    for path in PACKAGE.rglob("*.py"):
        top = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        wanted = {name.split(".")[1] for name in runtime_imports_of(path) if "." in name} & here - {top}
        upward |= {(top, name) for name in wanted if place[name] > place[top] and top != "__init__"}
    assert upward == {("runtime", "checkpoint"), ("lora", "weights"), ("hf", "weights")}


def test_files_and_functions_stay_readable():
    long = []
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if len(text.splitlines()) > 500:
            long.append(f"{path.relative_to(ROOT)}: {len(text.splitlines())} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno + 1 > 80:
                long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert not long


def test_public_names_are_not_submodules():
    import jaxpar

    modules = {path.stem for path in PACKAGE.glob("*.py")} | {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    assert not modules & set(jaxpar.__all__)
    for name in jaxpar.__all__:
        assert callable(getattr(jaxpar, name)), name
