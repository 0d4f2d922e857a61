"""``python -m twinkle_research.model prepare model=<name> [out=<folder>] [dtype=<dtype>]``"""

from __future__ import annotations

import sys

from twinkle_research.errors import ConfigError, UserError, nearest
from twinkle_research.model.config import DType, ModelSource

USAGE = f"""usage: python -m twinkle_research.model prepare model=<name> [out=<folder>] [dtype=<dtype>]

Writes a shipped model as a Hugging Face folder (config, safetensors weights, tokenizer with chat template).
  model   {", ".join(ModelSource.__members__)}
  out     a new folder; without it the model goes to the cache that training uses
  dtype   {", ".join(DType.__members__)}; default: float32 for tiny, else bfloat16"""


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    try:
        command, *settings = arguments
        if command != "prepare":
            raise ConfigError(f"unknown command {command!r}; {nearest(command, ['prepare'])}")
        values = dict(_setting(text) for text in settings)
        if "model" not in values:
            raise ConfigError("model=<name> is missing")
        from twinkle_research.model.facts import read_facts
        from twinkle_research.model.prepare import prepare

        folder = prepare(values["model"], values.get("out"), values.get("dtype"))
        print(f"{folder}  ({read_facts(folder).parameters:,} parameters)")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _setting(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    valid = ["model", "out", "dtype"]
    if key not in valid:
        raise ConfigError(f"unknown setting {text!r}; {nearest(key, valid)}")
    if not separator or not value:
        raise ConfigError(f"{key} needs a value: {key}=...")
    return key, value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
