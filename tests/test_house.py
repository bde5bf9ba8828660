"""The rules of the house that a machine can check: layout, sizes, registries, the command line, what packages hold."""

import ast
import importlib
import importlib.metadata
import itertools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from narrowgauge.cli.main import COMMANDS, GROUPS, make_app
from narrowgauge.quant.formats.read import lookup

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("flows", "quant", "engine", "kernels", "serving")
SOURCES = sorted(
    path
    for folder in (*ROOMS, "src/narrowgauge/cli", "tests", "infra")
    for path in (ROOT / folder).rglob("*.py")
    if not path.is_symlink()
)
PRODUCT = [path for path in SOURCES if path.relative_to(ROOT).parts[0] not in ("tests",)]
REGISTRY_NAME = re.compile(r"^[A-Z_]+$")


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def _is_triton_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_a_folder_at_the_root_reached_through_a_relative_link(room):
    link = ROOT / "src" / "narrowgauge" / room
    assert link.is_symlink()
    assert os.readlink(link) == f"../../{room}"
    assert not (ROOT / room / "__init__.py").exists(), "a bare package of that name would shadow other people's"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_explains_itself_in_at_most_80_lines(room):
    assert 5 <= len((ROOT / room / "README.md").read_text(encoding="utf-8").splitlines()) <= 80


def test_files_and_functions_stay_small():
    too_long = []
    for path in SOURCES:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > 500:
            too_long.append(f"{_relative(path)}: {lines} lines")
        for function in _functions(path):
            size = function.end_lineno - function.lineno + 1
            if size > (150 if _is_triton_kernel(function) else 60):
                too_long.append(f"{_relative(path)}:{function.lineno}: {function.name} has {size} lines")
    assert not too_long, "\n".join(too_long)


def test_no_file_is_a_drawer_or_hides_a_stdlib_module():
    drawers = {"utils", "util", "helpers", "helper", "misc", "common"}
    bad = [
        _relative(p)
        for p in SOURCES
        if p.stem in drawers or (p.stem in sys.stdlib_module_names and p.parent.name in ROOMS)
    ]
    assert not bad


def test_parameters_after_the_third_are_keyword_only():
    wrong = []
    for path in PRODUCT:
        for function in _functions(path):
            positional = [
                a.arg for a in (*function.args.posonlyargs, *function.args.args) if a.arg not in ("self", "cls")
            ]
            # Typer reads a command's parameters from its signature; routes and kernels are decorated.
            dictated = function.name == "forward" or function.decorator_list or path.parent.name == "cli"
            if len(positional) > 3 and not dictated:
                wrong.append(f"{_relative(path)}:{function.lineno}: {function.name}({', '.join(positional)})")
    assert not wrong, "\n".join(wrong)


def test_public_functions_and_classes_are_documented():
    silent = [
        f"{_relative(path)}:{node.lineno}: {node.name}"
        for path in PRODUCT
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and ast.get_docstring(node) is None
    ]
    assert not silent, "\n".join(silent)


def _registries():
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.AnnAssign) and node.value is not None:
                    target, value = node.target, node.value
                elif isinstance(node, ast.Assign):
                    target, value = node.targets[0], node.value
                else:
                    continue
                if not (
                    isinstance(target, ast.Name) and REGISTRY_NAME.match(target.id) and isinstance(value, ast.Dict)
                ):
                    continue
                entries = [v.value for v in value.values if isinstance(v, ast.Constant) and isinstance(v.value, str)]
                if entries and all(re.fullmatch(r"narrowgauge[\w.]+:\w+", entry) for entry in entries):
                    module = "narrowgauge." + path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
                    yield pytest.param(module, target.id, id=f"{path.stem}.{target.id}")


@pytest.mark.parametrize(("module", "name"), list(_registries()))
def test_every_registry_entry_can_be_imported(module, name):
    registry = getattr(importlib.import_module(module), name)
    assert registry
    for key in registry:
        assert lookup(registry, key) is not None


def test_the_registries_of_the_one_room_changes_are_found():
    found = {parameter.values[1] for parameter in _registries()}
    assert {"METHODS", "FORMATS", "GATES"} <= found


def test_help_lists_exactly_the_commands_of_the_table():
    result = CliRunner().invoke(make_app(), ["--help"])
    assert result.exit_code == 0
    section = result.output.split("Commands:", 1)[1]
    listed = re.findall(r"^  ([a-z]+) ", section, flags=re.MULTILINE)
    assert sorted(listed) == sorted((*COMMANDS, *GROUPS))


@pytest.mark.parametrize("command", sorted((*COMMANDS, *GROUPS)))
def test_every_command_explains_itself_without_loading_a_room(command):
    code = (
        "import sys; from typer.testing import CliRunner; from narrowgauge.cli.main import make_app; "
        f"r = CliRunner().invoke(make_app(), ['{command}', '--help']); "
        "heavy = {'torch', 'mlflow', 'prefect', 'transformers'} & set(sys.modules); "
        "print(r.output); sys.exit(r.exit_code or (f'loads {heavy}' if heavy else 0))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(result.stdout.splitlines()) > 3


def test_the_gateway_loads_neither_torch_nor_mlflow():
    code = (
        "import sys; import narrowgauge.serving.gateway.app; "
        "sys.exit(str({'torch', 'mlflow', 'prefect', 'transformers'} & set(sys.modules)).replace('set()', '') or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_every_dependency_is_imported_somewhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    imported = set()
    for path in PRODUCT:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
    # Found by others at run time: uvicorn's parser and loop, transformers' chat templates and GGUF loader.
    indirect = {"httptools", "uvloop", "jinja2", "accelerate", "gguf"}
    modules = {"pyyaml": "yaml", "prometheus-client": "prometheus_client", "huggingface-hub": "huggingface_hub"}
    wanted = itertools.chain(project["dependencies"], project["optional-dependencies"]["gguf"])
    names = {re.match(r"[A-Za-z0-9-]+", requirement).group().lower() for requirement in wanted}
    unused = [n for n in names if modules.get(n, n.replace("-", "_")) not in imported | indirect]
    assert not unused


def test_the_version_stands_in_one_release_everywhere():
    import narrowgauge

    assert importlib.metadata.version("narrowgauge") == narrowgauge.__version__


def test_nothing_committed_names_a_package_index_or_a_path_of_one_machine():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    pattern = re.compile(
        r"https?://(?:pypi|files\.pythonhosted|download\.pytorch)\.\S+|file:///\w+/(?!bucket)\w*pypi|/(?:work|root)/"
    )
    bad = []
    for name in filter(None, listed):
        path = ROOT / name
        if path.is_symlink() or not path.is_file() or path == Path(__file__).resolve():
            continue
        text = path.read_bytes().decode("utf-8", errors="ignore")
        bad += [f"{name}: {match.group()}" for match in pattern.finditer(text)]
    assert not bad
