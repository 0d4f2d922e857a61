"""Template: rows (conversations, or plain prompt and completion) to token ids and pre-shifted labels."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from twinkle_research.data_format import IGNORE_INDEX, InputFeature, Trajectory
from twinkle_research.errors import ConfigError, DataError, UserError, nearest
from twinkle_research.symbols import load_symbol
from twinkle_research.template.messages import Conversation, TextPair, canonical
from twinkle_research.template.rendering import ChatRenderer
from twinkle_research.template.shown import ShownParts
from twinkle_research.template.spans import TrainedText, TrainedTurn, bridge_text, prompt_text, trained_texts
from twinkle_research.template.tokens import SpanTokenizer, Tokens

if TYPE_CHECKING:
    from twinkle_research.dataset.config import CommonDataConfig

TRUNCATIONS = ("raise", "left", "right", "split", "delete")
TRAIN_ON = ("assistant", "last", "all")


@dataclass
class RowResult:
    """What became of one row: its features (several where it was split), or why there are none."""

    tokens: list[Tokens] = field(default_factory=list)
    dropped: str | None = None
    cut: bool = False  # was longer than max_length, and only a part of it, or its pieces, are in ``tokens``
    error: DataError | None = None
    control: str | None = None  # a control token in the row's own text, which the tokenizer takes for one


class Template:
    """A tokenizer's own chat template, to ids and labels.

    ``model_id``: folder or hub id to take the tokenizer from; or pass ``tokenizer``. Loss is on assistant turns
    (``train_on``: "assistant", "last", "all"): exactly what the model would have generated, end-of-turn marker
    included. ``max_length``: tokens in a row (None: no limit); ``truncation_strategy`` for longer ones: "raise",
    "left" (keeps the end), "right" (keeps the start), "split" (pieces), "delete". A row whose trained tokens are all
    cut off is dropped. ``default_system`` is put before conversations that have no system message.
    ``enable_thinking`` goes to the chat template. A template that prints today's date prints 1 January 2025.
    ``pairs``: the rows of a data set are preferences, of which each gives two features (dataset/preferences.py).

    A tokenizer without a chat template (a base model) takes rows of text ``prompt`` and ``completion`` only, joined
    as they are, with the beginning-of-text token that the tokenizer asks for and an end-of-text token.
    """

    def __init__(
        self,
        model_id: str | os.PathLike[str] | None = None,
        *,
        tokenizer: Any = None,
        max_length: int | None = 8192,
        truncation_strategy: str = "raise",
        default_system: str | None = None,
        enable_thinking: bool = True,
        train_on: str = "assistant",
        pairs: bool = False,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ):
        if (model_id is None) == (tokenizer is None):
            raise ValueError("Template needs either model_id or tokenizer")
        for name, value, valid in (("truncation_strategy", truncation_strategy, TRUNCATIONS), ("train_on", train_on, TRAIN_ON)):
            if value not in valid:
                raise ConfigError(f"{name}={value!r}: {nearest(value, valid)}")
        if max_length is not None and max_length < 2:
            raise ConfigError(f"max_length must be >= 2 (a token and its target), got {max_length}")
        if pairs and truncation_strategy in ("left", "split"):
            raise ConfigError(f"truncation_strategy={truncation_strategy} would give both answers of a pair other prompts")
        if pairs and train_on != "assistant":
            raise ConfigError(f"train_on={train_on} has no effect on pairs: their answers are trained")
        self.tokenizer = load_tokenizer(model_id, revision, trust_remote_code) if tokenizer is None else tokenizer
        self.model_id = str(model_id or getattr(tokenizer, "name_or_path", "") or "the given tokenizer")
        self.max_length = max_length
        self.truncation_strategy = truncation_strategy
        self.default_system = default_system
        self.train_on = train_on
        self.pairs = pairs
        self._spans = SpanTokenizer(self.tokenizer, self.model_id)
        self._renderer = ChatRenderer(self.tokenizer, self.model_id, enable_thinking) if self.tokenizer.chat_template else None
        self._shown = ShownParts(self._renderer) if self._renderer is not None else None
        special = {t.content for t in self.tokenizer.added_tokens_decoder.values() if t.special and t.content.strip()}
        self._control = sorted(special) if self._renderer is not None else []  # in plain text they are the user's own markup

    @property
    def enable_thinking(self) -> bool:
        return self._renderer is not None and self._renderer.enable_thinking

    # --- public encoding ----------------------------------------------------------------------------------------

    def encode(self, trajectory: Trajectory, add_generation_prompt: bool = False) -> InputFeature:
        """One feature. With ``add_generation_prompt`` the row is a prompt and no label is set.

        Raises DataError where the row gives no feature, or several (see encode_all).
        """
        features = self.encode_all(trajectory, add_generation_prompt)
        if len(features) != 1:
            reason = "is split into several features (use encode_all)" if features else "keeps no trained token or is too long"
            raise DataError(f"the row {reason}")
        return features[0]

    def encode_all(self, trajectory: Trajectory, add_generation_prompt: bool = False) -> list[InputFeature]:
        """All features of one row: [] where it is dropped, several where it is split."""
        result = self.encode_rows([trajectory], add_generation_prompt)[0]
        if result.error is not None:
            raise result.error
        return [to_feature(tokens) for tokens in result.tokens]

    def batch_encode(self, trajectories: Sequence[Trajectory], add_generation_prompt: bool = False) -> list[InputFeature]:
        """Features of all rows, in order; dropped rows have none."""
        features = []
        for result in self.encode_rows(trajectories, add_generation_prompt):
            if result.error is not None:
                raise result.error
            features += [to_feature(tokens) for tokens in result.tokens]
        return features

    def encode_rows(self, rows: Sequence[Any], add_generation_prompt: bool = False) -> list[RowResult]:
        """One result a row; a bad row's error is in its result. Rows are tokenised together, which is faster."""
        texts: list[list[TrainedText]] = []
        results = [RowResult() for _ in rows]
        for row, result in zip(rows, results, strict=True):
            try:
                texts.append(self._texts(row, add_generation_prompt))
                result.control = self._control_token(row)
            except DataError as exc:
                texts.append([])
                result.error = exc
        flat = iter(self._spans([t for row_texts in texts for t in row_texts]))
        for row, row_texts, result in zip(rows, texts, results, strict=True):
            tokens = [next(flat) for _ in row_texts]
            if result.error is not None:
                continue
            if self._renderer is None:
                tokens = [self._frame_plain_text(t, row, add_generation_prompt) for t in tokens]
            try:
                self._fit(tokens, result, add_generation_prompt)
            except DataError as exc:
                result.error = exc
        return results

    # --- steps --------------------------------------------------------------------------------------------------

    def _texts(self, row: Any, add_generation_prompt: bool) -> list[TrainedText]:
        row = canonical(row)
        if isinstance(row, TextPair) and row.completion is None and not add_generation_prompt:
            raise DataError("'prompt' without 'completion'")
        texts = (
            self._plain_text(row, add_generation_prompt)
            if self._renderer is None
            else self._chat_texts(row, add_generation_prompt)
        )
        for text in texts:
            try:
                text.text.encode()
            except UnicodeEncodeError as exc:
                raise DataError(f"text with a lone surrogate (half of a character): {exc.reason}") from exc
        return texts

    def _control_token(self, row: Any) -> str | None:
        """The first control token that stands in the row's own text."""
        for text in _texts_in(row):
            if any(first in text for first in {token[0] for token in self._control}):
                found = [token for token in self._control if token in text]
                if found:
                    return min(found, key=text.index)
        return None

    def _plain_text(self, row: Conversation | TextPair, add_generation_prompt: bool) -> list[TrainedText]:
        if isinstance(row, Conversation):
            raise DataError(
                f"{self.model_id} has no chat template, so 'messages' cannot be rendered: use rows of text 'prompt' and "
                "'completion' (without 'system' and 'tools'), choose an instruct model, or put a chat_template.jinja "
                "into the model folder"
            )
        if add_generation_prompt:
            return [TrainedText(row.prompt, [])]
        text = row.prompt + row.completion
        start, end = 0 if self.train_on == "all" else len(row.prompt), len(text)
        return [TrainedText(text, [TrainedTurn(start, start, end, [(start, end)])])]

    def _chat_texts(self, row: Conversation | TextPair, add_generation_prompt: bool) -> list[TrainedText]:
        if self.train_on == "all" and isinstance(row, Conversation) and not add_generation_prompt and not all(row.weights):
            raise DataError(
                f"messages[{row.weights.index(False)}].weight is 0 (not trained), but with train_on=all every token is; remove "
                "the weight, or set data.train_on=assistant"
            )
        conversation = self._conversation(row, add_generation_prompt)
        if add_generation_prompt:
            return [prompt_text(self._shown, conversation)]
        return trained_texts(self._shown, conversation, self.train_on)

    def _conversation(self, row: Conversation | TextPair, add_generation_prompt: bool) -> Conversation:
        if isinstance(row, TextPair):
            messages = [{"role": "user", "content": row.prompt}]
            if not add_generation_prompt:
                messages.append({"role": "assistant", "content": row.completion})
            row = Conversation(messages, None, [True] * len(messages))
        if self.default_system is not None and row.messages[0]["role"] not in ("system", "developer"):
            system = {"role": "system", "content": self.default_system}
            row = Conversation([system, *row.messages], row.tools, [True, *row.weights])
        return row

    def _frame_plain_text(self, tokens: Tokens, row: dict[str, Any], add_generation_prompt: bool) -> Tokens:
        """One beginning-of-text token where the tokenizer asks for it; a trained end-of-text token after a completion."""
        ids, trained = tokens.ids.tolist(), tokens.trained.tolist()
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if bos is not None and ids[:1] != [bos] and self.tokenizer("a")["input_ids"][:1] == [bos]:
            ids, trained = [bos, *ids], [False, *trained]
        if not add_generation_prompt and ids[-1:] != [eos]:
            if eos is None:
                raise ConfigError(f"the tokenizer of {self.model_id} has no end-of-text token, so a completion could not end")
            ids, trained = [*ids, eos], [*trained, True]
        return Tokens(np.asarray(ids, np.int32), np.asarray(trained, bool))

    def _fit(self, tokens: list[Tokens], result: RowResult, is_prompt: bool) -> None:
        """Applies max_length and fills ``result``."""
        limit, longest = self.max_length, max((len(t.ids) for t in tokens), default=0)
        if limit is not None and longest > limit:
            if is_prompt and self.truncation_strategy in ("right", "split"):
                raise DataError(
                    f"the prompt has {longest} tokens, data.max_length={limit}, and data.truncation={self.truncation_strategy} "
                    "would cut off the generation prompt; choose left or delete, or raise data.max_length"
                )
            if self.truncation_strategy == "raise":
                raise DataError(
                    f"{longest} tokens exceed max_length={limit}; raise data.max_length, or set data.truncation "
                    "(truncation_strategy of a Template) to left, right, split or delete"
                )
            if self.truncation_strategy == "delete":
                result.dropped = f"longer than max_length={limit}"
                return
            tokens = [piece for t in tokens for piece in _cut(t, limit, self.truncation_strategy)]
        # A token is only trained with its predecessor, so the first of a row never is.
        result.tokens = [t for t in tokens if is_prompt or t.trained[1:].any()]
        result.cut = bool(result.tokens) and limit is not None and longest > limit
        if not result.tokens:
            result.dropped = (
                f"no trained token within max_length={limit}" if limit is not None and longest > limit else "no trained token"
            )

    # --- continuing and showing ---------------------------------------------------------------------------------

    def concat_input_feature(self, prompt_input_feature: InputFeature, new_tokens: Sequence[int]) -> InputFeature:
        """Appends sampled tokens, as they are and trained, to a feature."""
        old = prompt_input_feature
        trained = [False, *(label != IGNORE_INDEX for label in old["labels"][:-1]), *[True] * len(new_tokens)]
        ids = [*old["input_ids"], *new_tokens]
        return {**old, **to_feature(Tokens(np.asarray(ids, np.int32), np.asarray(trained[: len(ids)], bool)))}

    def bridge_ids(self, trajectory: Trajectory) -> list[int]:
        """Ids to append after a sampled assistant turn (which ended with its end-of-turn marker): the separator, the
        messages that follow the last assistant message of ``trajectory``, and the next generation prompt."""
        if self._renderer is None:
            raise DataError(f"{self.model_id} has no chat template")
        return self._spans.ids_after(*bridge_text(self._renderer, self._conversation(canonical(trajectory), True)))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def trained_spans(self, feature: InputFeature) -> list[tuple[str, bool]]:
        """The row's text in pieces, each with whether it is trained."""
        trained = [False, *(label != IGNORE_INDEX for label in feature["labels"][:-1])]
        pieces, start = [], 0
        for i in range(1, len(trained) + 1):
            if i == len(trained) or trained[i] != trained[start]:
                pieces.append((self.decode(feature["input_ids"][start:i]), trained[start]))
                start = i
        return pieces


class Qwen3_5Template(Template):
    """Qwen3.5 models used for text. Their own chat template is followed like any other; images are refused."""


def to_feature(tokens: Tokens, row: str | None = None) -> InputFeature:
    ids, length = tokens.ids, len(tokens.ids)
    labels = np.full(length, IGNORE_INDEX, np.int64)
    labels[:-1] = np.where(tokens.trained[1:], ids[1:], IGNORE_INDEX)
    feature: InputFeature = {
        "input_ids": ids.tolist(),
        "labels": labels.tolist(),
        "attention_mask": [1] * length,
        "position_ids": list(range(length)),
        "length": length,
    }
    if row is not None:
        feature["row"] = row
    return feature


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(part)


def _cut(tokens: Tokens, limit: int, how: str) -> list[Tokens]:
    if how == "left":
        return [Tokens(tokens.ids[-limit:], tokens.trained[-limit:])]
    if how == "right":
        return [Tokens(tokens.ids[:limit], tokens.trained[:limit])]
    return [Tokens(tokens.ids[i : i + limit], tokens.trained[i : i + limit]) for i in range(0, len(tokens.ids), limit)]


def load_tokenizer(model_id: str | os.PathLike[str], revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer in a folder or on the Hugging Face hub (``hf://`` may stand before a hub id)."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    name = str(model_id)
    if name.startswith("ms://"):
        raise UserError(
            f"{name}: ModelScope ids are not supported; download the model and give its folder, or use the hub id without ms://"
        )
    name = name.removeprefix("hf://")
    is_folder = os.path.isdir(name)
    if not is_folder and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise UserError(f"model folder not found: {name}")
    options = {"revision": revision, "trust_remote_code": trust_remote_code, "local_files_only": is_folder}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        if _loses_spaces(tokenizer):
            # The class that the folder names rebuilds the tokenizer in another way than its tokenizer.json says.
            tokenizer = PreTrainedTokenizerFast.from_pretrained(name, **options)
    except (OSError, ValueError) as exc:
        raise UserError(f"no usable tokenizer in {name}: {str(exc).splitlines()[0]}") from exc
    if _loses_spaces(tokenizer):
        raise UserError(f"the tokenizer of {name} loses the spaces of a text; a model trained with it would be of no use")
    return tokenizer


def _loses_spaces(tokenizer: Any) -> bool:
    return tokenizer.decode(tokenizer("a b", add_special_tokens=False)["input_ids"]) == "ab"


def build_template(
    config: CommonDataConfig, model_id: str | os.PathLike[str] | None = None, *, tokenizer: Any = None, **options: Any
) -> Template:
    """The template that ``config`` (group ``data``) asks for. ``options``: revision, trust_remote_code."""
    cls = load_symbol(config.template, "twinkle_research.template", "data.template")
    if not (isinstance(cls, type) and issubclass(cls, Template)):
        raise ConfigError(f"data.template={config.template!r} is not a subclass of twinkle_research.template.Template")
    return cls(
        model_id,
        tokenizer=tokenizer,
        max_length=config.max_length,
        truncation_strategy=config.truncation.name,
        default_system=config.default_system,
        enable_thinking=config.enable_thinking,
        train_on=config.train_on.name,
        **({"pairs": True} if config.pairs else {}),
        **options,
    )
