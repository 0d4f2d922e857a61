"""The rules of CONTRIBUTING.md that a machine can check."""

import ast
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "twinkle_research"
SKIPPED_FOLDERS = {
    ".git",
    ".venv",
    ".cache",
    ".pytest_cache",
    ".ruff_cache",
    ".hypothesis",
    "build",
    "dist",
    "htmlcov",
    "runs",
    "sweeps",
    "wandb",
}

MAX_FILE_LINES = 420
MAX_FUNCTION_LINES = 70


@cache
def files(*suffixes: str) -> list[Path]:
    """All files of the checkout with these suffixes, without what git ignores."""
    found = []
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        ignored = SKIPPED_FOLDERS.intersection(parts) or any(
            p.endswith((".egg-info", "__pycache__")) or p.startswith(".coverage") for p in parts
        )
        if path.is_file() and path.suffix in suffixes and not ignored:
            found.append(path)
    return sorted(found)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in files(".py") if PACKAGE in path.parents}


# --- size ---------------------------------------------------------------------------------------------------------


def test_files_are_short():
    lengths = {short(path): len(path.read_text(encoding="utf-8").splitlines()) for path in files(".py")}
    assert {name: n for name, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_functions_are_short():
    long = {}
    for path in files(".py"):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long[f"{short(path)}:{node.lineno} {node.name}"] = lines
    assert long == {}


# --- what is never called ------------------------------------------------------------------------------------------

FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "os.system", "os.popen", "torch.load", "yaml.load", "yaml.unsafe_load", "joblib.load"}


def dotted(node: ast.AST) -> str:
    """``a.b.c`` for a chain of attributes, "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""


def test_no_code_in_data():
    """Nothing is unpickled or evaluated: a checkpoint or data file can hold no code that runs."""
    found = []
    for path in files(".py"):
        for node in ast.walk(tree(path)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module.split(".")[0]]
            found += [f"{short(path)}:{node.lineno} import {name}" for name in names if name in FORBIDDEN_IMPORTS]
            if isinstance(node, ast.Call):
                if dotted(node.func) in FORBIDDEN_CALLS:
                    found.append(f"{short(path)}:{node.lineno} {dotted(node.func)}()")
                for keyword in node.keywords:
                    if keyword.arg == "shell" and getattr(keyword.value, "value", None) is True:
                        found.append(f"{short(path)}:{node.lineno} shell=True")
    assert found == []


def test_no_global_randomness():
    """Every draw is keyed; the global generators decide nothing and are not reseeded."""
    calls = {"random.seed", "np.random.seed", "numpy.random.seed", "torch.manual_seed", "torch.cuda.manual_seed_all", "set_seed"}
    calls |= {
        f"random.{name}" for name in ("random", "shuffle", "choice", "choices", "sample", "randint", "randrange", "uniform")
    }
    found = []
    for name, path in MODULES.items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and dotted(node.func) in calls:
                found.append(f"{name}:{node.lineno} {dotted(node.func)}()")
    assert found == []


# --- what no file says ---------------------------------------------------------------------------------------------


def test_no_machine_paths_or_index_hosts():
    """A checkout works anywhere: no absolute path of a developer's machine, no address of a package index."""
    words = [
        "/" + "root/",
        "/" + "work/",
        "index" + "-url",
        "find" + "-links",
        "pypi" + ".org",
        "python" + "hosted",
        "download." + "pytorch",
    ]
    patterns = [re.escape(word) for word in words] + [r"/home/[a-z]", r"/Users/[A-Za-z]", r"(?<![\w.])/tmp/[a-z]+/"]
    pattern = re.compile("|".join(patterns))
    found = []
    for path in files(".py", ".md", ".txt", ".in", ".yaml", ".toml", ".sh", ".sbatch", "", ".json", ".jsonl", ".html"):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if match := pattern.search(line):
                found.append(f"{short(path)}:{number} {match.group()}")
    assert found == []


# --- imports -------------------------------------------------------------------------------------------------------

# Imported by the command line, by clients or before the workers start: they must cost nothing.
LIGHT = ["twinkle_research", "twinkle_research.config", "twinkle_research.data_format", "twinkle_research.errors"]
HEAVY = ["torch", "transformers", "datasets", "wandb", "peft", "tensorboard", "pandas", "matplotlib"]


def test_light_modules_import_nothing_heavy():
    light = LIGHT + [name for name in MODULES if name.count(".") == 2 and name.endswith(".config")]
    packages = [name for name, path in MODULES.items() if path.name == "__init__.py"]
    code = (
        "import importlib, json, sys\n"
        "loaded = {}\n"
        "for name in json.loads(sys.argv[1]):\n"
        "    importlib.import_module(name)\n"
        "    loaded[name] = [m for m in json.loads(sys.argv[2]) if m in sys.modules]\n"
        "print(json.dumps({name: heavy for name, heavy in loaded.items() if heavy}))\n"
    )
    arguments = [json.dumps(light + packages), json.dumps(HEAVY)]
    result = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {}


def imports_of(name: str) -> set[str]:
    """Modules of this project that module ``name`` imports, anywhere in it; imports for type checkers do not count."""
    found = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and dotted(node.test).endswith("TYPE_CHECKING"):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: relative import; write the whole name"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else node.module or "")
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree(MODULES[name]))
    return {module for module in found if module in MODULES and module != name}


def test_no_import_circles():
    """The modules can be ordered so that each imports only earlier ones, imports inside functions included."""
    graph = {name: imports_of(name) for name in MODULES}
    while ready := [name for name, needs in graph.items() if not needs & graph.keys()]:
        for name in ready:
            del graph[name]
    assert graph == {}, f"circle within: {sorted(graph)}"


# Anybody may import these; they import nothing of the project but one another. So may a package's config.py be.
VOCABULARY = {"errors", "randomness", "data_format", "symbols", "cachefolder", "durable"}
# What else a package may import: arrows point down this list's dependencies only.
USES = {
    "loss": set(),
    "advantage": {"loss"},
    "metric": set(),
    "distributed": set(),
    "template": set(),
    "processor": {"loss"},
    "dataset": {"template"},
    "reward": {"dataset"},
    "dataloader": {"dataset"},
    "checkpoint": {"distributed"},
    "model": {"loss", "metric", "distributed", "processor", "template", "checkpoint"},
    "tracking": {"distributed"},
    "config": {"model", "dataset", "template", "distributed", "tracking", "checkpoint"},
    "sampler": {"model", "template", "checkpoint", "config", "distributed"},
    "rollout": {"dataset", "distributed", "reward", "sampler"},
    "trainer": {
        "loss",
        "advantage",
        "reward",
        "rollout",
        "distributed",
        "dataset",
        "dataloader",
        "template",
        "model",
        "sampler",
        "checkpoint",
        "tracking",
        "config",
    },
    "sweep": {"config", "distributed", "tracking", "trainer"},
}
# What the plan must know beforehand, in modules that import nothing but configs.
FACTS = {"sampler.choice", "sampler.kv_cache", "sampler.vllm_env"}
# Programs and what puts the parts of one together: these may import all that they start.
PROGRAMS = {"config.cli", "distributed.launcher", "trainer.worker", "sweep.command", "chat", "report", "preprocessor"}


def test_imports_point_one_way():
    wrong = []
    for name in MODULES:
        module = name.removeprefix("twinkle_research").lstrip(".")
        package = module.split(".")[0]
        if not module or module in PROGRAMS or module.endswith("__main__"):
            continue
        allowed = VOCABULARY | {package} | (set() if package in VOCABULARY else USES[package])
        for target in imports_of(name):
            inner = target.removeprefix("twinkle_research").lstrip(".")
            is_config = (inner.count(".") == 1 and inner.endswith(".config")) or (package == "config" and inner in FACTS)
            if inner and not is_config and inner.split(".")[0] not in allowed:
                wrong.append(f"{module} imports {inner}")
    assert wrong == []


@pytest.mark.parametrize("path", [p for p in files(".py") if "tests" in p.relative_to(ROOT).parts[:1]], ids=short)
def test_test_files_have_unique_names_and_no_package(path):
    """pytest imports a test file by its base name, since the folders under tests/ are not packages."""
    assert not (path.parent / "__init__.py").exists()
    same = [short(p) for p in files(".py") if p.name == path.name and p != path and p.relative_to(ROOT).parts[0] == "tests"]
    assert same == [] or path.name == "conftest.py"
