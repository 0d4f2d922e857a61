"""Rows that are too long (case S10), and base models without a chat template."""

import pytest
from chat_styles import BOS, EOS, WORD_CHATML, chat, make_tokenizer, trained, word_tokenizer, words

from twinkle_research.data_format import IGNORE_INDEX
from twinkle_research.dataset.formats import to_trainable
from twinkle_research.errors import ConfigError, DataError
from twinkle_research.template import Template

PAIR = r"{%- for m in messages -%}{{ m.content + ' ' }}{%- if m.role == 'assistant' -%}{{ '<E> ' }}{%- endif -%}{%- endfor -%}"


def pair(prompt: int, answer: int) -> dict:
    """``prompt`` tokens before and ``answer`` trained tokens, end marker included."""
    return chat(" ".join(["b"] * prompt), " ".join("abc"[: answer - 1]))


def test_s10_rows_whose_answer_is_cut_off_are_dropped_and_counted() -> None:
    tokenizer = word_tokenizer(PAIR)
    template = Template(tokenizer=tokenizer, max_length=8, truncation_strategy="right")
    results = template.encode_rows([pair(8, 3), pair(2, 3), pair(6, 3)])
    assert [r.dropped is not None for r in results] == [True, False, False]
    assert [int(r.tokens[0].trained.sum()) for r in results[1:]] == [3, 2]
    assert tokenizer.eos_token_id not in results[2].tokens[0].ids  # nothing invented
    assert len(template.batch_encode([pair(8, 3), pair(2, 3), pair(6, 3)])) == 2
    with pytest.raises(DataError, match="keeps no trained token"):
        template.encode(pair(8, 3))


def test_truncation_strategies() -> None:
    def encode(strategy: str, row: dict) -> list[list[str]]:
        tokenizer = word_tokenizer(PAIR)
        template = Template(tokenizer=tokenizer, max_length=4, truncation_strategy=strategy)
        return [words(tokenizer, f["input_ids"]) + words(tokenizer, trained(f)) for f in template.encode_all(row)]

    row = pair(3, 3)  # b b b a b <E>
    assert encode("left", row) == [["b", "a", "b", "<E>", "a", "b", "<E>"][:4] + ["a", "b", "<E>"]]
    assert encode("right", row) == [["b", "b", "b", "a", "a"]]
    assert encode("split", row) == [["b", "b", "b", "a", "a"], ["b", "<E>", "<E>"]]
    assert encode("delete", row) == []
    with pytest.raises(DataError, match="6 tokens exceed max_length=4"):
        encode("raise", row)
    assert encode("raise", pair(2, 2)) == [["b", "b", "a", "<E>", "a", "<E>"]]
    with pytest.raises(DataError, match="split into several"):
        Template(tokenizer=word_tokenizer(PAIR), max_length=4, truncation_strategy="split").encode(row)


def test_truncated_prompts_keep_the_generation_prompt() -> None:
    tokenizer = word_tokenizer(WORD_CHATML)
    prompt = chat("a b c")
    cut = Template(tokenizer=tokenizer, max_length=5, truncation_strategy="left").encode(prompt, add_generation_prompt=True)
    assert words(tokenizer, cut["input_ids"]) == "<E> \n <S> assistant \n".split(" ")
    assert set(cut["labels"]) == {IGNORE_INDEX}
    with pytest.raises(DataError, match="cut off the generation prompt"):
        Template(tokenizer=tokenizer, max_length=5, truncation_strategy="right").encode(prompt, add_generation_prompt=True)


def test_a_role_that_is_no_text_is_a_bad_row() -> None:
    with pytest.raises(DataError, match=r"messages\[0\].role is \['user'\]"):
        Template(tokenizer=make_tokenizer("chatml")).encode({"messages": [{"role": ["user"], "content": "q"}]})


# --- base models ----------------------------------------------------------------------------------------------------


def test_base_model_joins_prompt_and_completion() -> None:
    tokenizer = make_tokenizer(None)
    template = Template(tokenizer=tokenizer)
    feature = template.encode({"prompt": "1 2 3", "completion": " 4 5"})
    assert template.decode(feature["input_ids"]) == f"{BOS}1 2 3 4 5{EOS}"
    assert template.decode(trained(feature)) == f" 4 5{EOS}"
    prompt = template.encode({"prompt": "1 2 3"}, add_generation_prompt=True)
    assert feature["input_ids"][: prompt["length"]] == prompt["input_ids"]
    whole = Template(tokenizer=tokenizer, train_on="all").encode({"prompt": "1 2 3", "completion": " 4 5"})
    assert whole["labels"][:-1] == feature["input_ids"][1:]


def test_base_model_refuses_a_system_message_beside_prompt_and_completion() -> None:
    row = to_trainable({"prompt": "a", "completion": "b", "system": "s"})
    with pytest.raises(DataError, match="has no chat template.*without 'system' and 'tools'"):
        Template(tokenizer=make_tokenizer(None)).encode(row)


def test_base_model_adds_nothing_twice() -> None:
    template = Template(tokenizer=make_tokenizer(None))
    feature = template.encode({"prompt": f"{BOS}a", "completion": f"b{EOS}"})
    assert template.decode(feature["input_ids"]) == f"{BOS}ab{EOS}"


def test_base_model_without_end_token_or_with_conversations_is_refused() -> None:
    tokenizer = make_tokenizer(None)
    with pytest.raises(DataError, match="has no chat template.*prompt"):
        Template(tokenizer=tokenizer).encode(chat("u", "a"))
    with pytest.raises(DataError, match="has no chat template"):
        Template(tokenizer=tokenizer).bridge_ids(chat("u", "a", "v"))
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no end-of-text token"):
        Template(tokenizer=tokenizer).encode({"prompt": "a", "completion": "b"})


def test_prompt_and_completion_become_one_exchange_where_there_is_a_chat_template() -> None:
    template = Template(tokenizer=make_tokenizer("chatml"), default_system="Be kind.")
    row = chat("What?", "That.")
    assert template.encode({"prompt": "What?", "completion": "That."}) == template.encode(row)
    assert template.decode(template.encode(row)["input_ids"]).startswith("<|start|>system\nBe kind.<|end|>")
    with pytest.raises(DataError, match="without 'completion'"):
        template.encode({"prompt": "What?"})
