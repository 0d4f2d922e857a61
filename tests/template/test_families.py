"""200 random conversations in the chat format of each model family: token-exact labels, against a renderer of the tests' own."""

import json
import random

import pytest
from families import FAMILIES, thought_of

from twinkle_research.data_format import IGNORE_INDEX
from twinkle_research.dataset import Dataset, DatasetMeta
from twinkle_research.errors import DataError
from twinkle_research.template import Qwen3_5Template, Template

CONVERSATIONS = 200
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("weather", "search")
]
WORDS = [
    "Paris",
    "is",
    "the",
    "capital",
    "ü",
    "日本",
    "🦊",
    "\n",
    "\n\n",
    "  ",
    "a:b",
    "###x",
    "don't",
    "</p>",
    "{",
    "42",
    "def f(x):\n",
]
MARKERS = ["[/INST]", "<|im_end|", "</think", "<tool_call", "<<SYS>>", "<|user|", "assistant\n", "\\n"]  # as plain text


def text_of(rng: random.Random) -> str:
    words = WORDS + MARKERS
    return "".join(rng.choice(words) + rng.choice([" ", "", "\n"]) for _ in range(rng.randint(1, 7)))


def conversation(rng: random.Random, name: str) -> dict:
    family = FAMILIES[name]
    messages = [{"role": "system", "content": text_of(rng)}] if family.system and rng.random() < 0.5 else []
    tools = rng.choice([TOOLS, TOOLS[:1]]) if family.tools and rng.random() < 0.5 else None
    for _ in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": text_of(rng)})
        if tools and rng.random() < 0.6:
            for _ in range(rng.randint(1, 2)):
                messages.append(turn := answer(rng, name, rng.choice([None, "", "Let me see."])))
                calls = rng.randint(1, 2)
                turn["tool_calls"] = [tool_call(rng, i) for i in range(calls)]
                for i in range(calls):
                    messages.append({"role": "tool", "content": text_of(rng), "tool_call_id": f"call0000{i}"})
        messages.append(answer(rng, name, text_of(rng)))
    return {"messages": messages, **({"tools": tools} if tools else {})}


def tool_call(rng: random.Random, number: int) -> dict:
    arguments = {"city": text_of(rng), "days": rng.choice([3, "3", None, 1.5]), "more": {"deep": [True, text_of(rng)]}}
    arguments = rng.choice([arguments, json.dumps(arguments)])
    return {"id": f"call0000{number}", "type": "function", "function": {"name": "weather", "arguments": arguments}}


def answer(rng: random.Random, name: str, content: str | None) -> dict:
    turn = {"role": "assistant", "content": content}
    if FAMILIES[name].thinking == "own":  # it drops line breaks before an answer, which thinking would end with
        turn["content"] = content and content.lstrip("\n")
    if FAMILIES[name].thinking != "no" and rng.random() < 0.4:
        thought = "So: " + text_of(rng).strip("\n") + "."
        if rng.random() < 0.5:
            turn["reasoning_content"] = thought
        else:
            turn["content"] = f"<think>\n{thought}\n</think>\n\n{turn['content'] or ''}"
    return turn


def runs(feature: dict) -> list[tuple[list[int], list[int]]]:
    """(ids before, ids trained) of each run of trained tokens."""
    ids, labels, found, start = feature["input_ids"], feature["labels"], [], 0
    assert labels[-1] == IGNORE_INDEX
    while start < len(ids) - 1:
        end = start
        while labels[end] != IGNORE_INDEX:
            assert labels[end] == ids[end + 1]  # pre-shifted
            end += 1
        if end > start:
            found.append((ids[: start + 1], ids[start + 1 : end + 1]))
        start = max(end, start + 1)
    return found


def expected(name: str, row: dict) -> list[tuple[list[int], str]]:
    """(ids that a sampler would be given, text that it would produce) of each assistant turn."""
    family = FAMILIES[name]
    wanted, turns = [], []
    for k, message in enumerate(row["messages"]):
        if message["role"] == "assistant":
            before = family.before(row["messages"][:k], row.get("tools"), bool(thought_of(message)[0]))
            wanted.append((sampled_ids(name, before, turns), family.turn(message)))
            turns.append((before, family.turn(message)))
    return wanted


def sampled_ids(name: str, text: str, turns: list[tuple[str, str]]) -> list[int]:
    """Ids of a prompt in which earlier ``turns``, each (before, turn), stand in the tokens in which they were sampled."""
    tokenizer = FAMILIES[name].tokenizer()
    ids = lambda piece: tokenizer(piece, add_special_tokens=False)["input_ids"]  # noqa: E731
    cuts = [0]
    for before, turn in turns:
        if text.startswith(before + turn):
            prompt = ids(before)
            if ids(before + turn)[: len(prompt)] != prompt:
                assert not FAMILIES[name].metaspace  # whose pieces would each start with a space
                cuts.append(len(before))
    return [i for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True) for i in ids(text[start:end])]


def check(name: str, template: Template, row: dict, features: list[dict]) -> None:
    found = [run for feature in features for run in runs(feature)]
    wanted = expected(name, row)
    key = lambda pair: (len(pair[0]), pair[0])  # noqa: E731
    assert len(found) == len(wanted)
    for (context, ids), (wanted_context, text) in zip(sorted(found, key=key), sorted(wanted, key=key), strict=True):
        assert context == wanted_context
        assert template.decode(context + ids)[len(template.decode(context)) :] == text


@pytest.mark.parametrize("name", FAMILIES)
def test_labels_are_token_exact(name):
    kind = Qwen3_5Template if name == "qwen3.5" else Template
    template = kind(tokenizer=FAMILIES[name].tokenizer(), max_length=None)
    rng = random.Random(name)
    split = 0
    for _ in range(CONVERSATIONS):
        row = conversation(rng, name)
        features = template.encode_all(row)
        split += len(features) > 1
        check(name, template, row, features)
    assert bool(split) == (name in ("qwen3", "qwen3.5", "mistral", "deepseek", "gpt-oss"))  # those that rewrite what came before


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_are_token_exact(name):
    """What a sampler is given: with thinking wanted or not, where the family has a switch."""
    family = FAMILIES[name]
    rng = random.Random(name + "prompt")
    for thinking in (True,) if name == "smollm3" else (True, False):
        template = Template(tokenizer=family.tokenizer(), max_length=None, enable_thinking=thinking)
        for _ in range(30):
            row = conversation(rng, name)
            while row["messages"][-1]["role"] == "assistant":
                row["messages"].pop()
            ids = template.encode(row, add_generation_prompt=True)["input_ids"]
            text = family.before(row["messages"], row.get("tools"), thinking or family.thinking != "own")
            turns = []
            for k, message in enumerate(row["messages"]):
                if message["role"] == "assistant":
                    before = family.before(row["messages"][:k], row.get("tools"), bool(thought_of(message)[0]))
                    turns.append((before, family.turn(message)))
            assert ids == sampled_ids(name, text, turns)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_last_turn_alone_and_everything(name):
    family = FAMILIES[name]
    last = Template(tokenizer=family.tokenizer(), max_length=None, train_on="last")
    whole = Template(tokenizer=family.tokenizer(), max_length=None, train_on="all")
    rng = random.Random(name + "last")
    for _ in range(20):
        row = conversation(rng, name)
        ((context, ids),) = runs(last.encode(row))
        wanted_context, text = expected(name, row)[-1]
        assert context == wanted_context and last.decode(context + ids)[len(last.decode(context)) :] == text
        feature = whole.encode(row)
        assert feature["labels"][:-1] == feature["input_ids"][1:]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_dataset_gives_the_same(name):
    family = FAMILIES[name]
    template = Template(tokenizer=family.tokenizer(), max_length=None)
    rng = random.Random(name + "dataset")
    rows = [conversation(rng, name) for _ in range(12)]
    alone = [feature["input_ids"] for row in rows for feature in template.encode_all(row)]
    labels = [feature["labels"] for row in rows for feature in template.encode_all(row)]
    for batched in (True, False):
        features = list(Dataset(DatasetMeta(data=rows)).set_template(template).encode(batched=batched))
        assert [f["input_ids"] for f in features] == alone and [f["labels"] for f in features] == labels


@pytest.mark.parametrize(
    "name", [name for name in FAMILIES if FAMILIES[name].bos and name != "zephyr"]
)  # whose template writes none
def test_s09_one_beginning_of_text(name):
    family = FAMILIES[name]
    template = Template(tokenizer=family.tokenizer(), max_length=None)
    rng = random.Random(name + "bos")
    bos = family.tokenizer().bos_token_id
    turns = 1 if name != "llama-2" else None  # which begins each pair of turns with one
    for _ in range(20):
        row = conversation(rng, name)
        for feature in template.encode_all(row):
            users = sum(m["role"] == "user" for m in row["messages"])
            assert feature["input_ids"][0] == bos and feature["input_ids"].count(bos) <= (turns or users)


def test_s25_arguments_as_object_or_text_are_the_same_tokens():
    for name in (name for name in FAMILIES if FAMILIES[name].tools):
        template = Template(tokenizer=FAMILIES[name].tokenizer(), max_length=None)
        ids = []
        for arguments in ({"city": "Oslo"}, '{"city": "Oslo"}'):
            calls = [{"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": arguments}}]
            messages = [{"role": "user", "content": "w"}, {"role": "assistant", "content": None, "tool_calls": calls}]
            ids.append(template.encode({"messages": messages, "tools": TOOLS[:1]})["input_ids"])
        text = template.decode(ids[0])
        assert ids[0] == ids[1] and "None" not in text and "null" not in text and '\\"' not in text


def test_smollm3_without_thinking_has_the_empty_block_in_every_turn():
    template = Template(tokenizer=FAMILIES["smollm3"].tokenizer(), enable_thinking=False)
    messages = [{"role": r, "content": c} for r, c in (("user", "u1"), ("assistant", "a1"), ("user", "u2"), ("assistant", "a2"))]
    (feature,) = template.encode_all({"messages": messages})
    (first, one), (second, two) = runs(feature)
    assert [template.decode(ids) for ids in (one, two)] == ["a1<|im_end|>", "a2<|im_end|>"]
    for ids, k in ((first, 1), (second, 3)):
        assert ids == template.encode({"messages": messages[:k]}, add_generation_prompt=True)["input_ids"]
        assert "/no_think" in template.decode(ids) and template.decode(ids).endswith("assistant\n<think>\n\n</think>\n")
    messages[1]["content"] = "<think>\nt\n</think>\n\na1"
    with pytest.raises(DataError, match="enable_thinking=false.*closes it"):
        template.encode_all({"messages": messages})


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "phi-3"])
def test_contents_with_the_markers_of_the_format(name):
    """Text that reads like a marker is that marker for every sampler, so it is for training; nothing else moves."""
    template = Template(tokenizer=FAMILIES[name].tokenizer(), max_length=None)
    markers = [m for m in FAMILIES[name].special.split() if "think" not in m] + ["[INST]", "[/INST]", "<<SYS>>", "</s>"]
    rng = random.Random(name + "markers")
    for _ in range(40):
        row = conversation(rng, name)
        for message in row["messages"]:
            if message["content"] and rng.random() < 0.5:
                message["content"] += f"x{rng.choice(markers)}{rng.choice(['', ' ', '!'])}y"
        check(name, template, row, template.encode_all(row))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_rollout_that_goes_on_is_the_prompt_of_the_next_turn(name):
    """Prompt, sampled ids and the bridge are what the next turn is given; refused where the template rewrites what was said."""
    template = Template(tokenizer=FAMILIES[name].tokenizer(), max_length=None)
    rng = random.Random(name + "bridge")
    bridged = 0
    for _ in range(30):
        row = conversation(rng, name)
        turns = [k for k, message in enumerate(row["messages"]) if message["role"] == "assistant"]
        for k, after in zip(turns, turns[1:], strict=False):
            upto = {**row, "messages": row["messages"][: k + 1]}
            following = {**row, "messages": row["messages"][:after]}
            try:
                bridge = template.bridge_ids(following)
            except DataError as error:
                assert "rewrites earlier messages" in str(error)
                continue
            context, ids = runs(template.encode_all(upto)[-1])[-1]
            assert context + ids + bridge == template.encode(following, add_generation_prompt=True)["input_ids"]
            bridged += 1
    assert bridged or name in ("qwen3", "qwen3.5", "gpt-oss")


def test_what_a_family_cannot_show_is_refused():
    def refused(name: str, message: str, content: object, **extra: object) -> None:
        row = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "b"}], **extra}
        with pytest.raises(DataError, match=message):
            Template(tokenizer=FAMILIES[name].tokenizer(), max_length=None).encode(row)

    refused("gemma", "tools", "a", tools=TOOLS)
    refused("phi-4", "tools", "a", tools=TOOLS)
    refused("qwen3.5", "image", [{"type": "image", "image": "x.png"}])
