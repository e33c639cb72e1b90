"""The import rule: stretto → services → protocol → shared, downwards only, and light front doors."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ORDER = ["shared", "protocol", "services", "stretto"]
HEAVY = {"torch", "vllm", "transformers", "datasets", "matplotlib", "safetensors"}


def modules(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def imports(path: Path, *, module_level: bool = False) -> set[str]:
    """Dotted names of what a file imports, those for type checkers alone left out."""
    tree = ast.parse(path.read_text())
    skip = {
        id(node)
        for branch in ast.walk(tree)
        if (isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING")
        or (module_level and isinstance(branch, ast.FunctionDef | ast.AsyncFunctionDef))
        for node in ast.walk(branch)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skip:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", modules(*ORDER), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downwards_only(path):
    package = path.relative_to(ROOT).parts[0]
    above = ORDER[ORDER.index(package) + 1 :]
    wrong = {name for name in imports(path) if name.split(".")[0] in above}
    assert not wrong, f"{path} imports upwards: {wrong}"


@pytest.mark.parametrize("path", modules("services"), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_service_imports_no_other_service(path):
    parts = path.relative_to(ROOT).parts
    own = parts[1]
    folders = {folder.name for folder in (ROOT / "services").iterdir() if folder.is_dir()} - {"compute"}  # theirs all
    used = {name.split(".")[1] for name in imports(path) if name.startswith("services.")}
    assert not (used & folders) - {own}, f"{path} imports another service"


@pytest.mark.parametrize("path", modules("shared", "protocol", "stretto"), ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_heavy_is_imported_at_module_level(path):
    heavy = {name for name in imports(path, module_level=True) if name.split(".")[0] in HEAVY}
    assert not heavy, f"{path} imports {heavy} at module level"


def test_importing_stretto_is_quick_and_light():
    script = (
        "import sys, time; start = time.perf_counter(); import stretto; took = time.perf_counter() - start;"
        "print(took, sorted({'torch', 'vllm', 'transformers', 'zmq'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    took, heavy = done.stdout.split(maxsplit=1)
    assert float(took) < 1.0
    assert heavy.strip() == "[]"


@pytest.mark.parametrize(
    "service", ["services.broker.server", "services.broadcaster.service", "services.reward.service", "stretto.trainer"]
)
def test_services_without_a_model_start_without_torch(service):
    script = f"import sys, {service}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
