"""Loads a causal language model of transformers for training."""

from __future__ import annotations

import importlib.util
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from twinkle_research.errors import ConfigError
from twinkle_research.model.facts import weight_files

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def load_model(
    model_id: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    attention: str = "auto",
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> PreTrainedModel:
    """The model in eval mode on ``device``, attention dropout off. Raises ConfigError for what is not a causal LM."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if (Path(model_id) / "model.safetensors.index.json").is_file():
        weight_files(Path(model_id))  # transformers follows an index wherever it points
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision}
    try:
        config = AutoConfig.from_pretrained(model_id, **options)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={model_id}: {error}") from error
    drop_attention_dropout(config)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            model_id,
            config=config,
            dtype=dtype,
            attn_implementation=attention_kind(attention, torch.device(device)),
            use_safetensors=True,
            **options,
        )
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"model.path={model_id} cannot be loaded: {error}") from error
    return model.to(device).eval()


def attention_kind(attention: str, device: torch.device) -> str:
    """transformers' name for ``model.attention``; auto takes flash attention on a GPU where it is installed."""
    installed = importlib.util.find_spec("flash_attn") is not None
    if attention == "flash" and (device.type != "cuda" or not installed):
        missing = "a GPU" if device.type != "cuda" else "the package flash-attn"
        raise ConfigError(f"model.attention=flash needs {missing}; model.attention=auto takes sdpa here")
    if attention == "flash" or (attention == "auto" and device.type == "cuda" and installed):
        return "flash_attention_2"
    return "sdpa" if attention == "auto" else attention


def drop_attention_dropout(config: PretrainedConfig) -> None:
    """Sets the attention dropout rates of a config to 0: masks inside a fused kernel cannot be keyed."""
    text = config.get_text_config()
    for key in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        if text.to_dict().get(key):
            log.warning(
                "%s=%s of the model is not used: dropout inside attention would not be reproducible", key, text.to_dict()[key]
            )
            setattr(text, key, 0.0)
