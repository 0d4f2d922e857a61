"""Settings of the data: mixtures and streams, and mistakes in them."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from twinkle_research.config import compose, to_object, validate
from twinkle_research.config.plan import print_plan, run_plan
from twinkle_research.config.resume import diff, resumable_changes
from twinkle_research.config.storage import load_config, save_config
from twinkle_research.dataset.config import MixDataConfig, MixSource, MixStop, TrainOn
from twinkle_research.errors import ConfigError


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name, "completion": name}) + "\n")
    return tmp_path


def mix(sources: str, *words: str) -> list[str]:
    return ["model=tiny", "data=mix", f"data.sources={sources}", *words]


def test_sources_on_the_command_line(files) -> None:
    words = mix("[{path: a.jsonl, weight: 0.7}, {path: b.jsonl, weight: 0.3, train_on: last}]", "data.stop=all_exhausted")
    data = validate(compose(words)).data
    assert isinstance(data, MixDataConfig) and data.stop is MixStop.all_exhausted
    assert data.sources == [
        MixSource("a.jsonl", weight=0.7), MixSource("b.jsonl", weight=0.3, train_on=TrainOn.last),
    ]  # fmt: skip
    assert validate(compose([*words, "data.sources.1.weight=2"])).data.sources[1].weight == 2


def test_sources_in_a_stored_config_and_on_resume(files, capsys) -> None:
    cfg = validate(compose(mix("[{path: a.jsonl}, {path: b.jsonl, processor_args: {}, enable_thinking: false}]")))
    save_config(cfg, files / "run")
    assert load_config(files / "run") == cfg
    other = to_object(compose(mix("[{path: a.jsonl, weight: 3}, {path: b.jsonl, enable_thinking: false}]", "data.cache=false")))
    changes = diff(cfg, other)
    assert changes == {"data.sources[0].weight": (1.0, 3.0), "data.cache": (True, False)}
    assert resumable_changes(changes) == {"data.cache"}
    print_plan(run_plan(other), other)
    assert "mix: a.jsonl (0.75), b.jsonl (0.25); rows of at most 1024" in capsys.readouterr().out


MISTAKES = {
    "[{path: a.jsonl}, {path: b.jsonl, wieght: 1}]": r"unknown key 'data.sources\[1\].wieght'; did you mean 'weight'\?",
    "[{path: a.jsonl, weight: x}, {path: b.jsonl}]": r"'data.sources\[0\].weight' must be a number, got 'x'",
    "[{path: a.jsonl}, {path: b.jsonl, train_on: lst}]": r"'data.sources\[1\].train_on' must be one of .*did you mean 'last'",
    "[{path: a.jsonl}, {path: b.jsonl, weight: 0}]": r"'data.sources\[1\].weight' must be > 0, got 0.0",
    "[{path: a.jsonl, limit: 0}, {path: b.jsonl}]": r"'data.sources\[0\].limit' must be >= 1, got 0",
    "[{path: a.jsonl}, {path: c.jsonl}]": r"data.sources\[1\].path: c.jsonl: no such file",
    "[{path: a.jsonl}, {}]": r"data.sources needs rows: give data.sources\[1\].path=<file or folder> or",
    "[{path: a.jsonl}, {path: b.jsonl, dataset_id: x}]": r"give data.sources\[1\].path or data.sources\[1\].dataset_id, not both",
    "[{path: a.jsonl}, {path: b.jsonl, split: test}]": r"'data.sources\[1\].split' has no effect",
    "[{path: a.jsonl}, {path: b.jsonl, processor: Slf}]": r"data.sources\[1\].processor=Slf is no class of",
    "[{path: a.jsonl}, {path: b.jsonl, processor_args: {x: 1}}]": r"'data.sources\[1\].processor_args' has no effect without",
    "[{path: a.jsonl}, {path: b.jsonl, default_system: None}]": r"'data.sources\[1\].default_system' is the text 'None'",
    "[{path: a.jsonl}]": "data.sources has one source, so its weight has no effect",
    "[]": "data=mix needs data.sources, for example",
    "a.jsonl": r"'data.sources\[0\]' must be a section with the settings path, dataset_id",
    "[{path: a.jsonl}, null]": r"'data.sources\[1\]' must be a section with the settings",
    "{path: a.jsonl}": r"'data.sources' must be a list, for example \[\{path: ...",
    "null": "'data.sources'.*list",
}


@pytest.mark.parametrize("sources", MISTAKES)
def test_mistakes_in_sources_name_the_source_and_the_key(files, sources: str) -> None:
    with pytest.raises(ConfigError, match=MISTAKES[sources]):
        validate(compose(mix(sources)))


def test_mistakes_in_an_experiment_name_them_too(files, monkeypatch) -> None:
    from twinkle_research.config import listitems

    (files / "experiment").mkdir()
    (files / "experiment" / "mine.yaml").write_text("data:\n  sources:\n    - {path: a.jsonl}\n    - {pth: b.jsonl}\n")
    monkeypatch.setattr(listitems, "config_dir", lambda: files)
    error = None
    try:
        OmegaConf.merge(OmegaConf.structured(MixSource), {"pth": "b.jsonl"})
    except Exception as raised:  # OmegaConf's, whose type is its own affair
        error = raised
    said = listitems.explain_item(error, ["experiment=mine"])
    assert said == "unknown key 'data.sources[1].pth'; did you mean 'path'?"
    assert listitems.explain_item(error, []) == "unknown key 'data.sources[?].pth'; did you mean 'path'?"


def stream(*words: str) -> list[str]:
    return ["model=tiny", "data=jsonl", "data.path=a.jsonl", "data.streaming=true", *words]


def test_streams(files) -> None:
    whole = ["data.shuffle=false", "trainer.max_steps=5"]
    assert validate(compose(stream(*whole))).data.streaming
    for words, message in (
        (
            ["trainer.max_steps=5"],
            "data.streaming=true takes rows in their order.*write data.shuffle=false, or data.streaming=false",
        ),
        (["data.shuffle=false"], "data.streaming=true needs trainer.max_steps"),
        ([*whole, "trainer.epochs=2"], "trainer.epochs has no effect with data.streaming=true"),
        ([*whole, "data.eval_rows=2"], "data.eval_rows needs all rows at hand.*give data.eval_path"),
        ([*whole, "data.cache=false"], "'data.cache' has no effect: data.streaming=true keeps nothing"),
        ([*whole, "data.cache_dir=x"], "'data.cache_dir' has no effect"),
        (["data=mix"], "unknown key 'data.path'"),
    ):
        with pytest.raises(ConfigError, match=message):
            validate(compose(stream(*words)))
    validate(compose(stream(*whole, "data.eval_path=b.jsonl", "data.cache_dir=x")))


def test_empty_names(files) -> None:
    for key in ("data.cache_dir", "data.eval_path"):
        with pytest.raises(ConfigError, match=f"'{key}' is empty"):
            validate(compose(["model=tiny", "data=jsonl", "data.path=a.jsonl", f"{key}=' '"]))
