"""What an adapter may be, whichever backend trains it: PEFT's config, checked before anything is built, and PEFT's rules."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from twinkle_research.errors import CheckpointError, ConfigError, UserError, nearest
from twinkle_research.model.config import LoraAdapterConfig
from twinkle_research.randomness import derive_seed

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel

PREFIX = "base_model.model."  # of every PEFT tensor name

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")  # of a folder in checkpoints, and of torch modules, which take no dots
_TAKEN = frozenset(dir(nn.ModuleDict()))  # PEFT keeps an adapter's layers in one, under the adapter's name


def check_name(adapter_name: str) -> None:
    """Raises UserError for a name that cannot be used."""
    if not adapter_name:
        raise UserError("adapter_name is empty")
    if not _NAME.fullmatch(adapter_name) or adapter_name in _TAKEN:
        raise UserError(
            f"adapter name {adapter_name!r} is refused: expected 1 to 128 letters, digits, '_' or '-', starting with a letter or "
            "digit, and not an attribute of torch's ModuleDict (such as 'keys')"
        )


def lora_config(config: LoraAdapterConfig | LoraConfig | str | Path) -> LoraConfig:
    """A PEFT config from our config, a PEFT config, or a PEFT folder (``adapter_config.json``)."""
    from peft import LoraConfig

    if isinstance(config, LoraConfig):
        own = copy.deepcopy(config)  # PEFT and the checks below write into it
        own.task_type = own.task_type or "CAUSAL_LM"
        own.inference_mode = False
        return own
    if isinstance(config, LoraAdapterConfig):
        targets: Any = list(config.target_modules)
        # PEFT and vLLM expect a whole number where it is one.
        alpha = int(config.alpha) if config.alpha == int(config.alpha) else config.alpha
        return LoraConfig(
            task_type="CAUSAL_LM", r=config.r, lora_alpha=alpha, lora_dropout=config.dropout, use_rslora=config.rslora,
            use_dora=config.dora, target_modules="all-linear" if targets == ["all-linear"] else targets,
            modules_to_save=list(config.modules_to_save) or None,
        )  # fmt: skip
    if not isinstance(config, str | Path):
        raise ConfigError(
            f"an adapter is given by a peft LoraConfig, a LoraAdapterConfig or a PEFT folder, got {config!r}"
            + ("; write LoraConfig(**...)" if isinstance(config, Mapping) else "")
        )
    if not (Path(config) / "adapter_config.json").is_file():
        raise CheckpointError(f"{config} holds no adapter: adapter_config.json is missing")
    loaded = LoraConfig.from_pretrained(str(config))
    if not isinstance(loaded, LoraConfig):
        raise CheckpointError(f"{config}: a {loaded.peft_type} adapter; only LoRA is supported")
    loaded.inference_mode = False
    loaded.task_type = loaded.task_type or "CAUSAL_LM"
    return loaded


# Fields of PEFT's LoraConfig with which training here, saving and merging were tried; further down their values are checked.
_SUPPORTED = frozenset(
    "r lora_alpha lora_dropout target_modules exclude_modules layers_to_transform layers_pattern rank_pattern alpha_pattern "
    "use_rslora use_dora modules_to_save".split()
)
# What PEFT or this module sets, and what is only written into adapter_config.json.
_OF_THE_FILE = frozenset(
    "peft_type task_type auto_mapping peft_version base_model_name_or_path revision inference_mode fan_in_fan_out "
    "ensure_weight_tying init_lora_weights bias lora_bias".split()
)


def _check_fields(config: LoraConfig) -> None:
    """Refuses every other field that is set, those of later versions of PEFT included."""
    for field in dataclasses.fields(config):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        value = getattr(config, field.name)
        if field.name not in _SUPPORTED | _OF_THE_FILE and value != default:
            raise ConfigError(f"LoraConfig.{field.name}={value!r} is not supported; what is: {', '.join(sorted(_SUPPORTED))}")
    if config.task_type != "CAUSAL_LM":
        raise ConfigError(f"LoraConfig.task_type={config.task_type!r} is not supported: only CAUSAL_LM")


def check_config(model: PreTrainedModel, config: LoraConfig) -> None:
    """Refuses what PEFT would take silently or fail on late. ``model`` has no adapter yet."""
    _check_fields(config)
    if type(config.r) is not int or config.r < 1:
        raise ConfigError(f"adapter.r must be a whole number >= 1, got {config.r!r}")
    if not 0.0 < config.lora_alpha < math.inf:
        raise ConfigError(f"adapter.alpha must be finite and > 0, got {config.lora_alpha}")
    if not 0.0 <= config.lora_dropout < 1.0:
        raise ConfigError(f"adapter.dropout must be in [0, 1), got {config.lora_dropout}")
    if config.init_lora_weights is not True:
        raise ConfigError(f"init_lora_weights={config.init_lora_weights!r} is not supported: A is drawn by key and B is 0")
    if config.bias != "none" or config.lora_bias:
        raise ConfigError("a LoRA with trained biases is not supported: bias must be 'none' and lora_bias false")
    _leave_out_experts(model, config)
    modules = plain_modules(model)
    for key, wanted in (("target_modules", config.target_modules), ("modules_to_save", config.modules_to_save)):
        for target in [] if wanted is None or isinstance(wanted, str) else sorted(wanted):
            if not any(_matches(name, target) for name in modules):
                kinds = {name.rpartition(".")[2] for name, m in modules.items() if is_linear(m) or isinstance(m, nn.Embedding)}
                raise ConfigError(f"adapter.{key}: the model has no module named '{target}'; {nearest(target, sorted(kinds))}")
    _check_parts(model, config)
    tied = tied_modules(model)
    head = next(name for name, module in modules.items() if module is plain(model.get_output_embeddings()))
    for name in target_names(model, config):
        module = modules[name]
        if not is_linear(module) and not isinstance(module, nn.Embedding):
            raise ConfigError(
                f"adapter.target_modules names {name}, a {type(module).__name__}; LoRA needs a linear or embedding layer"
            )
        if name in tied:
            raise ConfigError(
                f"adapter.target_modules: {' and '.join(sorted(tied))} share one weight in this model, so a low-rank change of "
                f"{name} would untie them; train them in full with adapter.modules_to_save=[{name.rpartition('.')[2]}]"
            )
        if config.use_dora and (name == head or isinstance(module, nn.Embedding)):
            raise ConfigError(f"adapter.dora=true is not supported on {name}; leave it out of adapter.target_modules")
    if any(_matches(name, target) for target in config.modules_to_save or () for name in tied):
        config.ensure_weight_tying = True  # one copy for both, so they stay tied


def _leave_out_experts(model: PreTrainedModel, config: LoraConfig) -> None:
    """PEFT takes some targets in a mixture of experts for what they were in older versions of transformers, and puts a LoRA on
    parameters that are all experts in one, or the router, which nothing else can read. ``all-linear`` is the rest here."""
    asked = config.target_modules
    if isinstance(asked, str) and (read := _as_peft_reads(model, config, asked)) == asked:
        return  # PEFT leaves this type of model alone
    names = _wanted_names(model, config)
    endings = {name.rpartition(".")[2] for name in names} if isinstance(asked, str) else set(asked or ())
    lost = {ending for ending in endings if not _as_peft_reads(model, config, {ending})}
    if asked == "all-linear":
        config.target_modules = endings - lost
    elif lost or (isinstance(asked, str) and read is None):
        raise ConfigError(
            f"adapter.target_modules names {', '.join(sorted(lost or {asked}))}, by which PEFT means experts or their router in "
            f"a model of type {model.config.model_type}; they cannot have a LoRA here: name layers of the attention, or write "
            "all-linear"
        )
    elif isinstance(asked, str) and names:
        config.target_modules = set(names)  # PEFT would widen the expression to all layers


def _as_peft_reads(model: PreTrainedModel, config: LoraConfig, targets: str | set[str]) -> Any:
    """The modules, not parameters, that PEFT means by ``target_modules=targets``: nothing where it means parameters too."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    own = copy.deepcopy(config)
    own.target_modules = targets
    try:
        convert_peft_config_for_transformers(own, model, None)
    except ValueError:  # one of several parameters that are one now
        return None
    return None if own.target_parameters else own.target_modules


def _check_parts(model: PreTrainedModel, config: LoraConfig) -> None:
    """Refuses an entry of the fields that say which modules and layers that fits nothing: PEFT ignores it."""
    if not config.target_modules:
        raise ConfigError("adapter.target_modules is empty: name linear layers, or write all-linear")
    wide = _wanted_names(model, config)
    names = target_names(model, config)
    for entry in _listed(config.exclude_modules):
        fits = (lambda n: re.fullmatch(entry, n)) if isinstance(config.exclude_modules, str) else lambda n: _matches(n, entry)  # noqa: B023
        if not any(map(fits, wide)):
            raise ConfigError(f"LoraConfig.exclude_modules: {entry!r} excludes nothing of target_modules")
    layers = config.layers_to_transform
    for layer in [] if layers is None else [layers] if isinstance(layers, int) else layers:
        only = copy.copy(config)
        only.layers_to_transform = [layer]
        if not target_names(model, only):
            raise ConfigError(f"LoraConfig.layers_to_transform: no module of target_modules is in a layer {layer!r}")
    if not names:
        raise ConfigError("adapter.target_modules: no module is left that would get a LoRA")
    for field, valid in (("rank_pattern", "a whole number >= 1"), ("alpha_pattern", "a number > 0")):
        for pattern, value in (getattr(config, field) or {}).items():
            if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in names):  # as PEFT's get_pattern_key
                endings = sorted({name.rpartition(".")[2] for name in names})
                raise ConfigError(f"LoraConfig.{field}: {pattern!r} fits no module that gets a LoRA; {nearest(pattern, endings)}")
            whole_number = field == "alpha_pattern" or type(value) is int
            if type(value) not in (int, float) or not whole_number or not 0 < value < math.inf:
                raise ConfigError(f"LoraConfig.{field}[{pattern!r}] must be {valid}, got {value!r}")
    if not isinstance(config.target_modules, str):
        for name in sorted(set(config.target_modules) & set(config.modules_to_save or ())):
            raise ConfigError(f"{name} cannot be in both target_modules and modules_to_save")


def _listed(value: Any) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else sorted(value)


def target_names(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Names of the modules that get a LoRA, by PEFT's own rules."""
    from peft.tuners.tuners_utils import check_target_module_exists

    wanted = _wanted_names(model, config)
    own = copy.copy(config)
    if config.target_modules == "all-linear":
        own.target_modules = set(wanted)
    return [name for name in wanted if check_target_module_exists(own, name)]


def _wanted_names(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Names of all modules that ``target_modules`` means: a regular expression, ``all-linear`` or name endings."""
    wanted = config.target_modules
    modules = plain_modules(model)
    names = list(modules)
    if wanted == "all-linear":
        head = plain(model.get_output_embeddings())
        return [name for name, module in modules.items() if is_linear(module) and module is not head]
    if isinstance(wanted, str):
        return [name for name in names if re.fullmatch(wanted, name)]
    return [name for name in names if any(_matches(name, target) for target in wanted or ())]


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # Conv1D: GPT-2's transposed linear


def tied_modules(model: PreTrainedModel) -> set[str]:
    """Names of the input embedding and the output projection where they share one weight, else nothing."""
    embedding, head = plain(model.get_input_embeddings()), plain(model.get_output_embeddings())
    if head is None or embedding.weight is not head.weight:
        return set()
    return {name for name, module in plain_modules(model).items() if module is embedding or module is head}


def plain(module: nn.Module) -> nn.Module:
    """The model's own layer, whether or not an adapter was put around it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module


def plain_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Name -> module of the model as it is without its adapters."""
    found: dict[str, nn.Module] = {}
    wrapped: list[str] = []
    for name, module in model.named_modules():
        if not any(name.startswith(outer) for outer in wrapped):
            found[name] = plain(module)
            if found[name] is not module:
                wrapped.append(f"{name}.")
    return found


def inject(model: PreTrainedModel | PeftModel, config: LoraConfig, name: str, empty: bool = False) -> PeftModel:
    """Checks ``config`` and puts PEFT's layers into ``model``, beside those that it may have. ``empty``: they get no values,
    for a model on the meta device, which is only asked what PEFT does to it."""
    import warnings

    from peft import PeftModel, get_peft_model

    base = model.get_base_model() if isinstance(model, PeftModel) else model
    check_config(base, config)
    config.base_model_name_or_path = base.name_or_path or None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's remarks on fan_in_fan_out and tied weights: both are handled
        try:
            if isinstance(model, PeftModel):
                model.add_adapter(name, config, low_cpu_mem_usage=empty)
            else:
                model = get_peft_model(model, config, adapter_name=name, low_cpu_mem_usage=empty)
        except ValueError as error:
            raise ConfigError(f"adapter: {error}") from error
    own = model.peft_config[name]
    own.target_parameters = own.target_parameters or None  # PEFT leaves an empty set behind
    return model


def initial_a(seed: int, name: str, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """PEFT's initial distribution of A, [rank, inputs], drawn by its name on disk: uniform within 1 / sqrt(inputs) of 0."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "init", name))
    bound = 1 / math.sqrt(math.prod(shape[1:]))
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def config_json(config: LoraConfig) -> dict[str, Any]:
    """The content of ``adapter_config.json``, the same in every run."""

    def plain(value: Any) -> Any:
        if isinstance(value, Enum):
            return value.value
        if isinstance(value, Mapping):
            return {str(k): plain(v) for k, v in sorted(value.items(), key=lambda item: str(item[0]))}
        if isinstance(value, (set, frozenset)):
            return sorted(value)
        return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value

    return plain(config.to_dict() | {"inference_mode": True})
