"""Preparing into folders and the cache, finding folders and hub ids, the command."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from twinkle_research.errors import ConfigError, UserError
from twinkle_research.model import __main__ as command
from twinkle_research.model.config import DType, ModelConfig, ModelSource
from twinkle_research.model.prepare import model_facts, prepare, resolve_model_folder, tiny


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TWINKLE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def test_the_cache_is_filled_once(cache):
    first = prepare("tiny")
    assert first.parent == cache
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert prepare(ModelSource.tiny) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    assert prepare("tiny", dtype=DType.bfloat16) != first
    assert {path.stat().st_mode & 0o777 for path in first.iterdir()} == {0o666 & ~_umask()}


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_processes_that_ask_at_once_get_one_whole_folder(cache):
    code = "from twinkle_research.model.prepare import prepare; print(prepare('tiny'))"
    with ThreadPoolExecutor(3) as pool:
        paths = set(pool.map(lambda _: subprocess.check_output([sys.executable, "-c", code], text=True).strip(), range(3)))
    assert len(paths) == 1
    assert sorted(path.name for path in cache.iterdir() if path.is_dir()) == [os.path.basename(paths.pop())]


def test_a_killed_preparation_leaves_nothing_that_counts(cache):
    code = """
import os, signal
from twinkle_research.model.prepare import prepare, tiny
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
tiny.write_tiny_tokenizer = die
prepare('tiny')
"""
    run = subprocess.run([sys.executable, "-c", code])
    assert run.returncode == -signal.SIGKILL
    assert any(".tmp-" in path.name for path in cache.iterdir())
    folder = prepare("tiny")
    assert (folder / "tokenizer.json").is_file()
    assert not any(".tmp-" in path.name for path in cache.iterdir())


def test_a_failing_preparation_leaves_nothing(cache, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(tiny, "write_tiny_tokenizer", fail)
    with pytest.raises(OSError, match="disk full"):
        prepare("tiny")
    assert not any(path.is_dir() for path in cache.iterdir())


def test_out(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("new/deeper", "empty"):
        assert (prepare("tiny", tmp_path / name) / "config.json").is_file()
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        prepare("tiny", tmp_path / "empty")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        prepare("tiny", tmp_path / "file")
    with pytest.raises(UserError, match="cannot write .*TWINKLE_CACHE"):
        prepare("tiny", tmp_path / "file" / "x")


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TWINKLE_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="cannot write the model cache .*TWINKLE_CACHE"):
        prepare("tiny")


def test_unknown_names():
    with pytest.raises(ConfigError, match="did you mean 'smollm2_135m'"):
        prepare("smollm_135m")
    with pytest.raises(ConfigError, match="did you mean 'bfloat16'"):
        prepare("tiny", dtype="bfloat")


# --- folders and hub ids --------------------------------------------------------------------------------------------


def test_path_goes_before_source(tmp_path):
    config = ModelConfig(name="tiny", source=ModelSource.tiny, architecture=tiny.ARCHITECTURE)
    prepared = resolve_model_folder(config)
    assert prepared == prepare("tiny")
    own = prepare("tiny", tmp_path / "own model")
    config.path = str(tmp_path / "own model")
    assert resolve_model_folder(config) == own
    config.path = os.path.relpath(own)
    assert resolve_model_folder(config) == own


def test_facts_of_a_config(tmp_path, cache):
    shipped = ModelConfig(name="tiny", source=ModelSource.tiny, architecture=tiny.ARCHITECTURE)
    assert model_facts(shipped).parameters == 853_376
    assert not cache.exists(), "the plan must not prepare anything"
    shipped.path = str(prepare("tiny", tmp_path / "own"))
    assert model_facts(shipped).weight_bytes > 0
    shipped.path = "nobody/nothing-here"
    assert model_facts(shipped) is None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("./missing", "no such folder"),
        ("/missing/model", "no such folder"),
        ("a/b/c", "no such folder"),
        ("ms://Qwen/Qwen3-0.6B", "modelscope"),
        ("tiny", "chosen by model=tiny"),
        (__file__, "this is a file"),
    ],
)
def test_paths_that_are_no_models(path, message):
    with pytest.raises(ConfigError, match=message):
        resolve_model_folder(ModelConfig(name="hf", path=path))


def test_a_folder_without_config(tmp_path):
    with pytest.raises(ConfigError, match="no config.json"):
        resolve_model_folder(ModelConfig(name="hf", path=str(tmp_path)))
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(ConfigError, match="PEFT adapter: merge it first"):
        resolve_model_folder(ModelConfig(name="hf", path=str(tmp_path)))
    (tmp_path / "my-model").mkdir()
    with pytest.raises(ConfigError, match="did you mean 'my-model'"):
        resolve_model_folder(ModelConfig(name="hf", path=str(tmp_path / "my-modl")))


def test_hf_needs_a_path():
    with pytest.raises(ConfigError, match="model.path: needed with model=hf"):
        resolve_model_folder(ModelConfig(name="hf"))


@pytest.mark.parametrize("path", ["nobody/nothing-here", "hf://nobody/nothing-here", "gpt2-that-is-not-here"])
def test_a_hub_id_without_network(path):
    with pytest.raises(UserError, match=f"model.path={path}: not a folder here"):
        resolve_model_folder(ModelConfig(name="hf", path=path))
    with pytest.raises(UserError, match="not in the local Hugging Face cache"):
        resolve_model_folder(ModelConfig(name="hf", path=path), download=False)


def test_a_hub_id_in_the_cache(tmp_path, monkeypatch):
    """A snapshot laid out as the hub client does: files are links into blobs/."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--someone--small"
    (repo / "blobs").mkdir(parents=True)
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    for file in prepare("tiny").iterdir():
        (repo / "blobs" / file.name).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(os.path.join("../../blobs", file.name))
    config = ModelConfig(name="hf", path="someone/small")
    assert resolve_model_folder(config, download=False) == snapshot
    assert model_facts(config).parameters == 853_376
    (snapshot / "model.safetensors").unlink()
    assert model_facts(config) is None  # an interrupted download


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command(tmp_path, capsys):
    assert command.main(["prepare", "model=tiny", f"out={tmp_path / 'out'}", "dtype=bfloat16"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}  (853,376 parameters)\n"
    assert command.main(["--help"]) == 0
    assert "smollm2_135m" in capsys.readouterr().out
    assert command.main([]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepar", "model=tiny"], "unknown command 'prepar'; did you mean 'prepare'"),
        (["prepare"], "model=<name> is missing"),
        (["prepare", "model=tinny"], "did you mean 'tiny'"),
        (["prepare", "modell=tiny"], "did you mean 'model'"),
        (["prepare", "model=tiny", "out="], "out needs a value"),
        (["prepare", "model=tiny", "dtype=float16"], "did you mean 'bfloat16'"),
    ],
)
def test_the_command_refuses_what_it_does_not_know(arguments, message, capsys):
    assert command.main(arguments) == 2
    assert message in capsys.readouterr().err
