"""Preference rows: layouts, the two features of each, and pairs that stay pairs on their way to a step."""

import json

import numpy as np
import pytest
from chat_styles import STYLES, make_tokenizer

from twinkle_research.data_format import IGNORE_INDEX
from twinkle_research.dataloader import DataLoader
from twinkle_research.dataset import Dataset, DatasetMeta, IterableDataset, MixedDataset, build_datasets
from twinkle_research.dataset.config import PreferenceDataConfig
from twinkle_research.dataset.pairs import Pairs
from twinkle_research.dataset.preferences import LAYOUTS, to_pair
from twinkle_research.dataset.preview import preview
from twinkle_research.errors import ConfigError, DataError
from twinkle_research.template import Template, build_template

USER, GOOD, BAD = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}
SYSTEM, EARLIER = {"role": "system", "content": "s"}, {"role": "assistant", "content": "old"}
CONTEXT = {**EARLIER, "weight": 0}
TOOLS = [{"name": "weather"}]
TWO = [{"messages": [USER, GOOD]}, {"messages": [USER, BAD]}]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, [{"prompt": "q", "completion": answer} for answer in "ab"]),
        ({"prompt": "q", "chosen": [GOOD], "rejected": [BAD]}, TWO),
        ({"prompt": "q", "chosen": GOOD, "rejected": "b"}, TWO),
        ({"prompt": [USER], "chosen": "a", "rejected": "b"}, TWO),
        ({"prompt": "q", "chosen": [USER, GOOD], "rejected": [USER, BAD], "messages": [USER, GOOD], "score_chosen": 5.0}, TWO),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, TWO),
        ({"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, TWO),
        ({"instruction": "q", "input": "", "output": "a", "chosen": "a", "rejected": "b"}, TWO),
        ({"messages": [USER], "chosen": "a", "rejected": "b"}, TWO),
        (
            {
                "conversations": [{"from": "human", "value": "q"}],
                "chosen": {"from": "gpt", "value": "a"},
                "rejected": {"from": "gpt", "value": "b"},
            },
            TWO,
        ),
        (
            {"prompt": "q", "chosen": "a", "rejected": "b", "system": "s", "tools": TOOLS},
            [{"messages": [SYSTEM, USER, answer], "tools": TOOLS} for answer in (GOOD, BAD)],
        ),
        (
            {"chosen": [USER, EARLIER, USER, GOOD], "rejected": [USER, EARLIER, USER, BAD], "system": "s", "tools": TOOLS},
            [{"messages": [SYSTEM, USER, CONTEXT, USER, answer], "tools": TOOLS} for answer in (GOOD, BAD)],
        ),
        (
            {"prompt": [USER, EARLIER, USER], "chosen": [GOOD, USER, GOOD], "rejected": "b"},
            [{"messages": [USER, CONTEXT, USER, GOOD, USER, GOOD]}, {"messages": [USER, CONTEXT, USER, BAD]}],
        ),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, [{"messages": [USER, GOOD]}] * 2),
    ],
)  # fmt: skip
def test_layouts(row, expected):
    assert to_pair(row) == expected


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "q", "chosen": "a"}, r"no 'rejected' in the row \(keys: 'prompt', 'chosen'\)\. Known: prompt"),
        ({"prompt": "q", "chosen": None, "rejected": "b"}, "'chosen' is null"),
        ({"chosen": "a", "rejected": "b"}, "no prompt beside 'chosen' and 'rejected'"),
        ({"prompt": "q", "chosen": 3, "rejected": "b"}, "'chosen' must be text or messages, got int"),
        ({"prompt": "q", "chosen": [], "rejected": "b"}, "'chosen' is empty"),
        ({"prompt": "q", "chosen": [USER, GOOD], "rejected": "b"}, "'chosen' is a whole conversation, but the other"),
        ({"chosen": [USER, GOOD], "rejected": [SYSTEM, USER, BAD]}, r"chosen\[0\] is not the assistant's, and differs"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD, USER, BAD]}, "only the beginning of the other"),
        ({"prompt": "x", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "'prompt' is not what 'chosen' and"),
        ({"prompt": [USER, EARLIER], "chosen": "a", "rejected": "b"}, "the prompt ends with a message of the assistant"),
        ("text", "a row must be an object with keys, got str"),
    ],
)  # fmt: skip
def test_bad_rows(row, message):
    with pytest.raises(DataError, match=message):
        to_pair(row)


def template(style: str | None = "chatml", **options) -> Template:
    return Template(tokenizer=make_tokenizer(style), pairs=True, **options)


def encode(rows, style: str | None = "chatml", on_error="raise", **options) -> Dataset:
    return Dataset(DatasetMeta(data=rows), on_error).set_template(template(style, **options)).encode()


def answer_of(made: Template, feature) -> str:
    return made.decode([label for label in feature["labels"] if label != IGNORE_INDEX])


def prompt_of(feature) -> list[int]:
    first = next(i for i, label in enumerate(feature["labels"]) if label != IGNORE_INDEX)
    return feature["input_ids"][: first + 1]


def turns(question: str, answer: str, thought: str | None = None) -> list[dict]:
    extra = {} if thought is None else {"reasoning_content": thought}
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **extra}]


KEEP = [style for style in sorted(STYLES) if style not in ("no_end", "text_arguments", "null_content")]


@pytest.mark.parametrize("style", KEEP)
def test_both_features_share_their_prompt_in_every_style(style):
    """A second turn too, whose context the template may write in another way than when it was the last."""
    rows = [
        {"prompt": "How are you?", "chosen": "I am fine.", "rejected": "The lazy dog"},
        {"chosen": turns("Hello!", "user") + turns("What is 1 2 3?", "Paris is the capital"),
         "rejected": turns("Hello!", "user") + turns("What is 1 2 3?", "I am")},
    ]  # fmt: skip
    dataset = encode(rows, style)
    assert len(dataset) == 4
    made = dataset.template
    for i in (0, 2):
        chosen, rejected = dataset[i], dataset[i + 1]
        assert prompt_of(chosen) == prompt_of(rejected)
        assert chosen["row"] == rejected["row"] == f"data[{i // 2}]"
    texts = [answer_of(made, dataset[i]) for i in range(4)]
    for text, answer in zip(texts, ("I am fine.", "The lazy dog", "Paris is the capital", "I am"), strict=True):
        assert answer in text and not any(other in text for other in ("Hello!", "How", "user"))


def test_plain_text_for_a_tokenizer_without_a_chat_template():
    dataset = encode([{"prompt": "1 2 3", "chosen": " 4", "rejected": " 7 8"}], style=None)
    made = dataset.template
    assert [answer_of(made, dataset[i]) for i in range(2)] == [" 4<eos>", " 7 8<eos>"]
    assert prompt_of(dataset[0]) == prompt_of(dataset[1]) == made.tokenizer("1 2 3")["input_ids"]


def test_a_template_that_breaks_the_shared_prompt_is_refused_with_the_row():
    """Without thinking this template writes an empty block, which is context; with thinking it is the answer's."""
    rows = [{"prompt": "q", "chosen": "a", "rejected": "b"}] * 2
    rows.append({"chosen": turns("q", "a", thought="hm"), "rejected": turns("q", "b")})
    with pytest.raises(
        DataError, match=r"data\[2\]: the chat template writes the prompt in another way .* give both of them some"
    ):
        encode(rows, "thinking")
    rows[2] = {"chosen": turns("q", "a", thought="hm"), "rejected": turns("q", "b", thought="well")}
    assert len(encode(rows, "thinking")) == 6
    rows[2]["chosen"] += turns("and?", "c", thought="so")
    with pytest.raises(DataError, match=r"data\[2\]: chosen: this chat template rewrites earlier turns"):
        encode(rows, "thinking")


def test_both_answers_are_dropped_where_one_cannot_be_used(caplog):
    long = "The quick brown fox jumps over the lazy dog. " * 4
    rows = [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": long, "rejected": "b"},
        {"prompt": "q", "chosen": "a", "rejected": "a"},
        {"prompt": "q", "chosen": "a"},
        {"prompt": "q", "chosen": "1", "rejected": "2"},
    ]
    dataset = encode(rows, max_length=30, truncation_strategy="delete", on_error="skip")
    assert [dataset[i]["row"] for i in range(len(dataset))] == ["data[0]", "data[0]", "data[4]", "data[4]"]
    assert {dropped.row: dropped.reason for dropped in dataset.dropped} == {
        "data[1]": "chosen: longer than max_length=30",
        "data[2]": "the same answer chosen and rejected",
        "data[3]": f"no 'rejected' in the row (keys: 'prompt', 'chosen'). Known: {LAYOUTS}",
    }
    cut = encode(rows[:2], max_length=30, truncation_strategy="right")
    assert [cut[i]["length"] for i in (2, 3)][0] == 30 and prompt_of(cut[2]) == prompt_of(cut[3])
    with pytest.raises(DataError, match=r"data\[1\]: chosen: .* tokens exceed max_length=30"):
        encode(rows[:2], max_length=30)


@pytest.mark.parametrize("options", [{"truncation_strategy": "left"}, {"truncation_strategy": "split"}, {"train_on": "all"}])
def test_settings_that_take_pairs_apart_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        template(**options)


# --- on their way to a step -------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"q {i}", "chosen": f"good {i} " + "fox " * (i % 7), "rejected": f"bad {i}"} for i in range(23)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def datasets(file, **options):
    config = PreferenceDataConfig(
        name="preference", path=str(file), cache=False, cache_dir=str(file.parent / "encoded"), **options
    )
    made = build_template(config, tokenizer=make_tokenizer("chatml"))
    return (*build_datasets(config, made, seed=3), made)


def test_the_config_gives_pairs_and_holds_whole_ones_out(file):
    train, held, made = datasets(file, eval_rows=5, num_proc=1)
    assert isinstance(train, Pairs) and isinstance(held, Pairs) and (len(train), len(held)) == (18, 5)
    rows = set()
    for pair in (*train, *held):
        assert pair[0]["row"] == pair[1]["row"] and pair[0]["row"] not in rows
        assert [answer_of(made, side).split()[0] for side in pair] == ["good", "bad"]
        rows.add(pair[0]["row"])
    assert len(rows) == 23
    lengths = train.lengths(np.arange(18))
    assert lengths.tolist() == [sum(side["length"] for side in pair) for pair in train]
    with pytest.raises(IndexError, match="pair 18"):
        train[18]
    assert train.fingerprint != datasets(file)[0].fingerprint
    shown = preview(train, made, 1, marks=True).plain
    assert "⟦good" in shown and "⟦bad" in shown
    train, held, _ = datasets(file, eval_path=str(file))
    assert len(train) == len(held) == 23


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_loader_counts_pairs_and_never_parts_one(file, ranks):
    train, _, _ = datasets(file)
    shares = [DataLoader(train, batch_size=5, shuffle=True, seed=1, dp_rank=r, dp_size=ranks) for r in range(ranks)]
    assert {len(loader) for loader in shares} == {5}
    seen = []
    for step, parts in enumerate(zip(*shares, strict=True)):
        features = [feature for part in parts for feature in part]
        assert all(len(part) % 2 == 0 for part in parts)
        for part in parts:
            for chosen, rejected in zip(part[::2], part[1::2], strict=True):
                assert chosen["row"] == rejected["row"]
                assert rejected["sample_index"] == chosen["sample_index"] + 1 and chosen["sample_index"] % 2 == 0
        assert sorted(f["sample_index"] for f in features) == list(range(len(features)))
        seen += [f["row"] for f in features[::2]]
        assert shares[0].get_state() == {"consumed_train_samples": min(5 * (step + 1), 23)}
    assert len(seen) == len(set(seen)) == 23


def test_single_features_of_pairs_are_refused(file):
    train, _, made = datasets(file)
    with pytest.raises(ConfigError, match="give Pairs of it"):
        DataLoader(train.dataset, batch_size=4)
    with pytest.raises(ConfigError, match="cannot be mixed"):
        MixedDataset([train.dataset])
    with pytest.raises(ConfigError, match="cannot be streamed"):
        IterableDataset(DatasetMeta(str(file))).set_template(made)


def test_threads_fetch_the_same_pairs(file):
    train, _, _ = datasets(file)
    plain, ahead = (list(DataLoader(train, batch_size=4, num_workers=n)) for n in (0, 2))
    assert plain == ahead
