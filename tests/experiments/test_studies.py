"""The studies: what is committed belongs together, and the commands of their READMEs still make it."""

import importlib
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from experiments import common  # noqa: E402

NAMES = sorted(path.parent.name for path in (ROOT / "experiments").glob("*/__main__.py"))


def study(name: str) -> common.Study:
    return importlib.import_module(f"experiments.{name}.__main__").STUDY


def committed(name: str) -> dict:
    return json.loads((ROOT / "experiments" / name / "result.json").read_text())


def check_plot(path: Path) -> None:
    """An SVG with axes and a legend."""
    root = ElementTree.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    names = {element.get("id") for element in root.iter() if element.get("id")}
    assert {"axes_1", "legend_1"} <= names


def test_each_study_is_named_in_the_table_of_studies():
    text = (ROOT / "experiments" / "README.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"({name}/README.md)" not in text] == []


@pytest.mark.parametrize("name", NAMES)
def test_tables_of_the_readme_are_those_of_the_result(name):
    readme = (ROOT / "experiments" / name / "README.md").read_text(encoding="utf-8")
    assert common.with_tables(readme, study(name).tables(committed(name))) == readme
    assert f"python -m experiments.{name}\n" in readme and "curves.svg" in readme


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_result_is_of_the_full_scale(name):
    result, full = committed(name), study(name).full
    assert {key: result[key] for key in result.keys() & full.keys()} == {key: full[key] for key in result.keys() & full.keys()}
    check_plot(ROOT / "experiments" / name / "curves.svg")


def test_the_same_result_is_drawn_as_the_same_file(tmp_path):
    chosen = study("policy_losses")
    for name in ("a", "b"):
        chosen.write(tmp_path / name, committed("policy_losses"))
        check_plot(tmp_path / name / "curves.svg")
    for file in ("README.md", "result.json", "curves.svg"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    for file in ("README.md", "result.json"):
        assert (tmp_path / "a" / file).read_bytes() == (chosen.folder / file).read_bytes()


def test_a_table_without_a_place_is_an_error():
    with pytest.raises(ValueError, match="places for"):
        common.with_tables("<!-- result: a -->\n<!-- end -->\n", {"b": "| x |"})


def test_numbers():
    assert common.mean_sd([0.5]) == "0.50"
    assert common.mean_sd([1.0, 2.0, 3.0], 1, signed=True) == "+2.0 ± 1.0"
    assert common.rounded({"a": [1234567.0, 7.0735e-8], "b": 3}, 3) == {"a": [1230000.0, 7.07e-8], "b": 3}
    assert common.band([[1.0, 5.0], [3.0, 5.0]]) == ([2.0, 5.0], [2 - 2**0.5, 5.0], [2 + 2**0.5, 5.0])


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_shortened_study_makes_all_its_files(name, tmp_path):
    command = [sys.executable, "-m", f"experiments.{name}", "--short", "--work", str(tmp_path / "runs"), "--out", str(tmp_path)]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert first.returncode == 0, first.stdout + first.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    readme = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert {key: result[key] for key in ("steps", "seeds")} == {key: study(name).short[key] for key in ("steps", "seeds")}
    assert common.with_tables(readme, study(name).tables(result)) == readme
    check_plot(tmp_path / "curves.svg")
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 0 and "[1/" not in again.stdout  # what is finished is not run again
    assert json.loads((tmp_path / "result.json").read_text()) == result
