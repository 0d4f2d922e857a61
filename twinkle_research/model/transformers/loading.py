"""Loads a causal language model of transformers for training."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from twinkle_research.checkpoint.stream import TensorFolder
from twinkle_research.errors import ConfigError
from twinkle_research.model.facts import weight_files
from twinkle_research.model.transformers.names import DiskNames

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from twinkle_research.model.layout import Layout

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
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision}
    config = _config(model_id, options)
    with _load_errors(model_id):
        model = AutoModelForCausalLM.from_pretrained(
            model_id,
            config=config,
            dtype=dtype,
            attn_implementation=attention_kind(attention, torch.device(device), config),
            use_safetensors=True,
            **options,
        )
    return model.to(device).eval()


def load_skeleton(
    model_id: str | os.PathLike[str],
    *,
    dtype: torch.dtype,
    attention: str,
    device: torch.device,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> tuple[PreTrainedModel, TensorFolder]:
    """The model in eval mode without weights (parameters on the meta device, buffers real), and the tensors of its folder,
    to be read one by one. Raises ConfigError as ``load_model``, CheckpointError for damaged files."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision}
    config = _config(model_id, options)
    with _load_errors(model_id), init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            attn_implementation=attention_kind(attention, device, config),
            trust_remote_code=trust_remote_code,
        )
    folder = weights_folder(model_id, revision)
    model.name_or_path = str(model_id)
    model.tie_weights()
    # transformers looks them up by the name of the class, which FSDP changes.
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    model._weight_conversions = [c for c in conversions if not isinstance(c, PrefixChange)]
    return model.eval(), folder


def weights_folder(model_id: str | os.PathLike[str], revision: str | None = None) -> TensorFolder:
    """The tensors of a folder or hub id, to be read one by one. Raises ConfigError where the hub cannot give it."""
    folder = Path(model_id)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        with _load_errors(model_id):
            folder = Path(snapshot_download(str(model_id), revision=revision, allow_patterns=["*.safetensors", "*.json"]))
    return TensorFolder(folder, "model", follow_links=True)


@torch.no_grad()
def load_weights(model: PreTrainedModel, folder: TensorFolder, weights: Mapping[str, Tensor], layout: Layout) -> None:
    """Fills ``weights`` (names in memory -> this rank's parts) from ``folder``, one tensor at a time, rounded to the dtype
    that ``layout`` computes in. Raises ConfigError for a tensor that is missing or that the model does not know."""
    names = DiskNames(model, {name: layout.shape(name, tensor) for name, tensor in weights.items()})
    unknown = re.compile("|".join(f"(?:{pattern})" for pattern in model._keys_to_ignore_on_load_unexpected or ["(?!)"]))
    tied = set(model.all_tied_weights_keys or {})
    for missing in sorted(set(names.disk_names) - set(folder)):
        raise ConfigError(f"{folder.path}: tensor {missing} is missing; backend.sharding=ddp loads older layouts of files")
    for extra in sorted(set(folder) - set(names.disk_names) - tied):
        if not unknown.search(extra):
            raise ConfigError(f"{folder.path}: tensor {extra} is not part of this model; is config.json the model's own?")
    for name, part in names.parts_from_disk(folder, weights, layout.rows):
        weights[name].copy_(part.to(layout.dtype(name, weights[name])))


def _config(model_id: str | os.PathLike[str], options: dict[str, Any]) -> PretrainedConfig:
    from transformers import AutoConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if (Path(model_id) / "model.safetensors.index.json").is_file():
        weight_files(Path(model_id))  # transformers follows an index wherever it points
    try:
        config = AutoConfig.from_pretrained(model_id, **options)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={model_id}: {error}") from error
    drop_attention_dropout(config)
    return config


@contextmanager
def _load_errors(model_id: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"model.path={model_id} cannot be loaded: {error}") from error


def attention_kind(attention: str, device: torch.device, config: PretrainedConfig | None = None) -> str:
    """transformers' name for ``model.attention``; auto takes flash attention on a GPU where it is installed. Raises ConfigError
    where the kind would leave out something that the model of ``config`` does: sdpa knows no softcap of attention scores."""
    installed = importlib.util.find_spec("flash_attn") is not None
    if attention == "flash" and (device.type != "cuda" or not installed):
        missing = "a GPU" if device.type != "cuda" else "the package flash-attn"
        raise ConfigError(f"model.attention=flash needs {missing}; model.attention=auto takes sdpa here")
    if attention == "flash" or (attention == "auto" and device.type == "cuda" and installed):
        return "flash_attention_2"
    softcap = None if config is None else config.get_text_config().to_dict().get("attn_logit_softcapping")
    if attention == "sdpa" and softcap:
        raise ConfigError(
            f"model.attention=sdpa would leave out the attn_logit_softcapping={softcap} of this model; write eager, or auto"
        )
    return ("eager" if softcap else "sdpa") if attention == "auto" else attention


def drop_attention_dropout(config: PretrainedConfig) -> None:
    """Sets the attention dropout rates of a config to 0: masks inside a fused kernel cannot be keyed."""
    text = config.get_text_config()
    for key in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        if text.to_dict().get(key):
            log.warning(
                "%s=%s of the model is not used: dropout inside attention would not be reproducible", key, text.to_dict()[key]
            )
            setattr(text, key, 0.0)
