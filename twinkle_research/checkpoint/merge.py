"""Plain Hugging Face folders from checkpoints: a trained model as it is, or a base with its adapter merged into it.

Everything streams: no more than one weight, its parts and its result exist at a time. Merging is done in float32 (or
float64 where a part is) and rounded once, to the export dtype.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_research.checkpoint.adapter import Adapter, read_adapter
from twinkle_research.checkpoint.folder import MAX_SHARD_BYTES, FolderWriter
from twinkle_research.checkpoint.format import CheckpointReader
from twinkle_research.checkpoint.names import MANIFEST, PARTS, PICKLE_SUFFIXES
from twinkle_research.checkpoint.newest import newest_checkpoint
from twinkle_research.checkpoint.stream import TensorFolder, TensorSpec
from twinkle_research.errors import CheckpointError, nearest

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

FLOATS = ("float32", "bfloat16", "float16", "float64")
_COPIED = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
_TOKENIZER = ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "chat_template")


def export(
    path: str | Path, out: str | Path, *, base: str | None = None, dtype: str | None = None, adapter: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:  # fmt: skip
    """Writes a Hugging Face folder from ``path``: a checkpoint, a run folder (its newest checkpoint), a PEFT folder or a
    Hugging Face folder. An adapter is merged into its base.

    ``dtype``: of all float tensors in ``out``; None: the run's ``model.dtype``, or outside a run that of each base
    tensor. ``adapter``: which one, where a checkpoint holds several. ``base``: folder or hub id, where the one that the
    adapter names is not there. Raises CheckpointError naming what cannot be exported exactly.
    """
    path, out = Path(path), Path(out)
    if dtype is not None and dtype not in FLOATS:
        raise CheckpointError(f"dtype '{dtype}' is not known; {nearest(dtype, FLOATS)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists; choose a new folder")
    source = find_source(path, adapter)
    dtype = dtype or source.run_dtype
    if source.is_adapter:
        lora = read_adapter(source.folder, source.tensors)
        base_folder = find_base(lora, base)
        plan = plan_merge(lora, base_folder, dtype)
    else:
        if base is not None:
            raise CheckpointError(f"{path} holds a whole model: --base has no effect")
        plan = Plan(source.folder, source.tensors)
        specs = [source.tensors.spec(name) for name in source.tensors]
        plan.specs = [TensorSpec(spec.name, _out_dtype(spec, dtype), spec.shape) for spec in specs]
    with FolderWriter(out) as writer:
        writer.add_tensors("", plan.specs, plan.stream(), max_shard_bytes=max_shard_bytes)
        write_config(writer, plan, dtype)
        copy_files([plan.base_folder, *([source.folder] if source.is_adapter else [])], writer.path())
    return out


# --- where things are -------------------------------------------------------------------------------------------------


@dataclass
class Source:
    folder: Path
    tensors: TensorFolder
    is_adapter: bool
    run_dtype: str | None = None


def find_source(path: Path, adapter: str | None = None) -> Source:
    """What ``path`` holds to export; a checkpoint's files are verified by size before they are used."""
    if (path / "adapter_config.json").is_file() and not (path / MANIFEST).exists():
        return Source(path, TensorFolder(path, "adapter_model", follow_links=True), True)
    if (path / "config.json").is_file() and not (path / MANIFEST).exists():
        return Source(path, TensorFolder(path, follow_links=True), False)
    checkpoint = path if (path / MANIFEST).exists() else newest_checkpoint(path)
    if checkpoint is None:
        raise CheckpointError(f"{path} holds no finished checkpoint, no adapter and no model")
    reader = CheckpointReader(checkpoint)
    reader.verify("size")
    names = sorted({f"adapters/{file.split('/')[1]}" for file in reader.manifest.files if file.startswith("adapters/")})
    names += [name for name in ("adapter",) if reader.has(name)]
    if adapter is not None:
        if f"adapters/{adapter}" not in names:
            valid = [name.removeprefix("adapters/") for name in names if "/" in name]
            raise CheckpointError(f"{checkpoint} holds no adapter '{adapter}'; {nearest(adapter, valid)}")
        names = [f"adapters/{adapter}"]
    if len(names) > 1:
        raise CheckpointError(f"{checkpoint} holds several adapters, name one: {', '.join(n.split('/')[-1] for n in names)}")
    name = names[0] if names else "model"
    return Source(reader.resolve(name), reader.tensors(name), bool(names), _run_dtype(checkpoint))


def _run_dtype(checkpoint: Path) -> str | None:
    """``model.dtype`` of the run whose folder the checkpoint lies in."""
    from omegaconf import OmegaConf

    config = checkpoint.resolve().parent.parent / "config.yaml"
    dtype = OmegaConf.select(OmegaConf.load(config), "model.dtype") if config.is_file() else None
    return dtype if dtype in FLOATS else None


def find_base(adapter: Adapter, base: str | None) -> Path:
    """The folder of the adapter's base model; a hub id is looked up in the local cache, else downloaded."""
    name = base or adapter.config.get("base_model_name_or_path") or ""
    if Path(name).is_dir() and name:
        return Path(name)
    if not name or name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise CheckpointError(f"the base model {name!r} of {adapter.folder} is not there; name it with --base <folder or hub id>")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.safetensors", *(f"*{suffix}" for suffix in _COPIED)]
    try:
        return Path(snapshot_download(name, revision=adapter.config.get("revision"), allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise CheckpointError(f"the base model '{name}' is neither a folder nor on the hub ({error}); use --base") from error


# --- what is computed -------------------------------------------------------------------------------------------------


@dataclass
class Plan:
    """``of``: tensor of the export -> (base tensor, parameter name in the adapter's model). Others are copied."""

    base_folder: Path
    base: TensorFolder
    adapter: Adapter | None = None
    of: dict[str, tuple[str, str]] = field(default_factory=dict)
    specs: list[TensorSpec] = field(default_factory=list)
    untied: bool = False

    def stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        for spec in self.specs:
            source, parameter = self.of.get(spec.name, (spec.name, ""))
            yield spec.name, self._value(source, parameter).to(getattr(torch, spec.dtype))

    def _value(self, source: str, parameter: str) -> torch.Tensor:
        if not parameter:
            return self.base[source]
        replacement = self.adapter.replaced.get(parameter)
        value = self.base[source] if replacement is None else self.adapter.tensors[replacement]
        shape = self.base.spec(source).shape
        if value.shape != shape:
            raise CheckpointError(f"{parameter}: shape {list(value.shape)} in the adapter, {list(shape)} in the base")
        module, _, kind = parameter.rpartition(".")
        parts = self.adapter.modules.get(module)
        if parts is not None and kind == "weight":
            return self.adapter.weight(module, value)
        if parts is not None and kind == "bias" and parts.bias is not None:
            return self.adapter.bias(module, value)
        return value


def _out_dtype(spec: TensorSpec, dtype: str | None) -> str:
    return dtype if dtype is not None and spec.dtype in FLOATS else spec.dtype


def plan_merge(adapter: Adapter, base_folder: Path, dtype: str | None) -> Plan:
    """Finds the base tensor of everything in the adapter. A tied pair of which one changes is untied, which is exact."""
    if read_json(base_folder / "config.json").get("quantization_config"):
        raise CheckpointError(f"{base_folder} is quantized: an adapter cannot be merged into it exactly")
    base = TensorFolder(base_folder, follow_links=True)
    plan = Plan(base_folder, base, adapter)
    wanted = [f"{module}.weight" for module in adapter.modules] + list(adapter.replaced)
    wanted += [f"{module}.bias" for module, parts in adapter.modules.items() if parts.bias is not None]
    wanted = list(dict.fromkeys(wanted))
    # Embeddings, heads and norms lie outside the numbered layers: of these one may be tied, or stored by another name.
    names = ModelNames(base_folder, base) if any(n not in base or not _in_layer(n) for n in wanted) else None
    for parameter in wanted:
        stored = parameter if parameter in base or names is None else names.stored.get(parameter)
        if stored is None and parameter not in names.tied:
            raise CheckpointError(f"{adapter.folder}: the base {base_folder} has no tensor for {parameter}")
        if stored is not None:
            plan.of[stored] = (stored, parameter)
    if names is not None:
        _untie(plan, names, wanted)
    for name in [*base, *(n for n in plan.of if n not in base)]:
        source = base.spec(plan.of.get(name, (name, ""))[0])
        plan.specs.append(TensorSpec(name, _out_dtype(source, dtype), source.shape))
    return plan


def _in_layer(parameter: str) -> bool:
    return any(part.isdigit() for part in parameter.split("."))


def _untie(plan: Plan, names: ModelNames, wanted: list[str]) -> None:
    adapter = plan.adapter
    for target, source in names.tied.items():
        touched = [name for name in (target, source) if name in wanted]
        if not touched:
            continue
        lora = [name for name in touched if name.removesuffix(".weight") in adapter.modules]
        if adapter.config.get("ensure_weight_tying"):
            if lora:
                raise CheckpointError(f"{adapter.folder}: ensure_weight_tying with LoRA on {lora[0]} cannot be merged exactly")
            plan.of[names.stored[source]] = (names.stored[source], source)
            adapter.replaced.setdefault(source, adapter.replaced.get(target, ""))
            plan.of.pop(target, None)
            continue
        plan.of[target] = (names.stored[source], target if target in wanted else "")
        plan.untied = True


class ModelNames:
    """What transformers knows of the base's names, from an empty model: ``tied`` (parameter -> the one it shares) and
    ``stored`` (parameter -> tensor in the base's files; those that are fused or split on loading have none)."""

    def __init__(self, folder: Path, base: TensorFolder) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key

        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder}: transformers cannot tell how its tensors are named: {error}") from error
        self.tied: dict[str, str] = dict(model.all_tied_weights_keys)
        parameters = model.state_dict()
        renamings = [t for t in get_model_conversion_mapping(model) if isinstance(t, WeightRenaming)]
        self.stored: dict[str, str] = {}
        for stored in base:
            name, _ = rename_source_key(stored, renamings, [], model.base_model_prefix, parameters)
            if name in parameters and name not in self.tied:
                self.stored[name] = stored


# --- the other files --------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def write_config(writer: FolderWriter, plan: Plan, dtype: str | None) -> None:
    config = read_json(plan.base_folder / "config.json")
    sections = [config, *(value for value in config.values() if isinstance(value, dict))]
    for section in sections:
        for key in ("dtype", "torch_dtype"):
            if dtype is not None and isinstance(section.get(key), str):
                section[key] = dtype
        if plan.untied and ("tie_word_embeddings" in section or section is config):
            section["tie_word_embeddings"] = False
    if dtype is not None and "torch_dtype" not in config:
        config["dtype"] = dtype
    writer.add_json("config.json", config)


def copy_files(folders: list[Path], out: Path) -> None:
    """Tokenizer, chat template and the like: of the base, then of the adapter, which knows better."""
    for position, folder in enumerate(folders):
        for path in sorted(folder.iterdir()):
            name = path.name
            weights = name.endswith((".safetensors", ".index.json", PARTS, *PICKLE_SUFFIXES)) or name == "config.json"
            wanted = path.is_file() and name.endswith(_COPIED) and not weights and not name.startswith(".")
            if wanted and (position == 0 or name.startswith(_TOKENIZER)):
                shutil.copyfile(path, out / name)
    if not any(path.name.startswith("tokenizer") for path in out.iterdir()):
        log.warning("%s has no tokenizer files, so the export has none either", folders[0])
