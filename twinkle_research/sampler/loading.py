"""Finds what there is to talk to in a run, a checkpoint, an adapter or a model folder, and loads it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_research.checkpoint.format import CheckpointReader
from twinkle_research.checkpoint.names import MANIFEST
from twinkle_research.checkpoint.newest import newest_checkpoint
from twinkle_research.config.storage import FILE_NAME, load_config
from twinkle_research.dataset.config import Truncation
from twinkle_research.errors import CheckpointError, UserError, nearest
from twinkle_research.model.config import DType, ModelConfig, ModelSource
from twinkle_research.model.facts import read_facts, read_json
from twinkle_research.model.prepare import prepare, resolve_model_folder

if TYPE_CHECKING:
    from twinkle_research.sampler.transformers import TransformersSampler
    from twinkle_research.trainer.config import TrainConfig


@dataclass(frozen=True)
class Target:
    """``model`` is a Hugging Face folder, ``adapter`` a PEFT folder on top of it; ``config`` that of the run, if any."""

    model: Path
    adapter: Path | None
    config: TrainConfig | None
    name: str


def find_target(path: str, base: str | None = None) -> Target:
    """``path``: a run folder (its newest whole checkpoint counts), a checkpoint, a PEFT or a model folder, the name of
    a shipped model, or a hub id. ``base`` replaces the model that an adapter folder names. Raises UserError."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        if path in ModelSource.__members__:
            return Target(prepare(path), None, None, path)
        return Target(_model_folder(path), None, None, path)
    if (folder / FILE_NAME).is_file() or (folder / MANIFEST).is_file():
        return _find_checkpoint(folder, base)
    if (folder / "adapter_config.json").is_file():
        return _find_adapter(folder, base)
    return Target(_model_folder(path), None, None, folder.name)


def load_sampler(target: Target, *, device: str | None = None, dtype: DType | None = None) -> TransformersSampler:
    """The sampler of a target. By default on a GPU in bfloat16 where there is one, else on the CPU in float32."""
    import torch

    from twinkle_research.model.transformers.loading import load_model
    from twinkle_research.sampler.transformers import TransformersSampler

    read_facts(target.model)  # refuses weights that are not safetensors
    place = _device(device)
    kind = dtype or (DType.float32 if place.type == "cpu" else DType.bfloat16)
    remote_code = target.config is not None and target.config.model.trust_remote_code
    module = load_model(target.model, dtype=getattr(torch, kind.value), device=place, trust_remote_code=remote_code)
    if target.adapter is not None:
        from peft import PeftModel

        if not (target.adapter / "adapter_model.safetensors").is_file():
            raise CheckpointError(f"{target.adapter}: adapter_model.safetensors is missing (other weight files are not read)")
        module = PeftModel.from_pretrained(module, str(target.adapter)).eval()
    return TransformersSampler(module, _template(target, remote_code))


def _device(name: str | None) -> Any:
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return device


def _template(target: Target, remote_code: bool) -> Any:
    from twinkle_research.template import Template, build_template

    if target.config is None:
        return Template(target.model, max_length=None)
    # The limits of training rows are not those of a conversation; the model's own context is checked when sampling.
    data = replace(target.config.data, max_length=None, truncation=Truncation["raise"])
    return build_template(data, target.model, trust_remote_code=remote_code)


def _find_checkpoint(folder: Path, base: str | None) -> Target:
    is_run = (folder / FILE_NAME).is_file()
    run = folder if is_run else folder.resolve().parent.parent
    config = load_config(run) if (run / FILE_NAME).is_file() else None
    checkpoint = newest_checkpoint(folder) if is_run else folder
    if checkpoint is None:
        raise CheckpointError(f"{folder}: the run has saved no checkpoint yet")
    name = f"{run.name}/{checkpoint.name}" if config is not None else checkpoint.name
    reader = CheckpointReader(checkpoint)
    reader.verify("size")
    if reader.has("model"):
        return Target(reader.hugging_face_folder("model"), None, config, name)
    adapter = reader.hugging_face_folder("adapter")
    if base is None and config is not None:
        return Target(resolve_model_folder(config.model), adapter, config, name)
    return replace(_find_adapter(adapter, base), config=config, name=name)


def _find_adapter(folder: Path, base: str | None) -> Target:
    named = base or read_json(folder / "adapter_config.json").get("base_model_name_or_path")
    if not named:
        raise UserError(f"{folder}: its adapter_config.json names no base model; give one with --base")
    model = prepare(named) if named in ModelSource.__members__ else _model_folder(named)
    return Target(model, folder, None, folder.name)


def _model_folder(path: str) -> Path:
    try:
        return resolve_model_folder(ModelConfig(name="hf", path=path))
    except UserError as error:
        hint = nearest(path, ModelSource.__members__)
        shipped = f"; {hint}" if hint.startswith("did you mean") else ""
        raise UserError(str(error).removeprefix("model.path=") + shipped) from None
