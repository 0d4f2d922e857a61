"""Talk to a trained model: ``python -m twinkle_research.chat <run_dir>``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from twinkle_research.data_format import Message, SamplingParams
from twinkle_research.distributed.env import let_idle_threads_sleep
from twinkle_research.errors import EXIT_INTERRUPTED, ConfigError, DataError, UserError
from twinkle_research.model.config import DType

if TYPE_CHECKING:
    from twinkle_research.sampler.transformers import TransformersSampler

HELP = "/reset starts a new conversation, /exit or Ctrl-D leaves, Ctrl-C cuts an answer short"


class Chat:
    """One conversation. ``answer`` streams a reply; a model without a chat template continues each text by itself."""

    def __init__(
        self, sampler: TransformersSampler, params: SamplingParams, system: str | None = None, use_base_model: bool = False
    ):
        self.sampler = sampler
        self.params = params
        self.system = system
        self.use_base_model = use_base_model
        self.has_turns = sampler.tokenizer.chat_template is not None
        if system is not None and not self.has_turns:
            raise UserError("--system: this model has no chat template, so it knows no system message")
        self.reset()

    def reset(self) -> None:
        self.messages: list[Message] = [{"role": "system", "content": self.system}] if self.system is not None else []

    def answer(self, text: str) -> Iterator[str]:
        """Pieces of the reply to ``text``. A reply that is cut short stays in the conversation as far as it came."""
        question: Message = {"role": "user", "content": text}
        request = {"messages": [*self.messages, question]} if self.has_turns else {"prompt": text}
        reply = ""
        try:
            for chunk in self.sampler.sample_stream(request, self.params, use_base_model=self.use_base_model):
                reply += chunk.delta
                yield chunk.delta
        finally:
            if reply:
                self.messages += [question, {"role": "assistant", "content": reply}]


def talk(chat: Chat, lines: TextIO, out: TextIO) -> int:
    """Reads questions line by line until the end of input; returns the exit code."""
    interactive = lines.isatty()
    if interactive:
        import readline  # noqa: F401 - gives input() editing and history
    while True:
        try:
            text = input("> ") if interactive else next(lines).rstrip("\n")
        except (EOFError, StopIteration):
            return 0
        except KeyboardInterrupt:
            print(file=out)
            return EXIT_INTERRUPTED
        if not text.strip():
            continue
        command = text.strip()
        if command == "/exit":
            return 0
        if command == "/reset":
            chat.reset()
        elif command.startswith("/") and " " not in command:
            print(f"unknown command {command}; {HELP}", file=out)
        else:
            say(chat, text, out)


def say(chat: Chat, text: str, out: TextIO) -> None:
    """Prints the answer as it comes."""
    try:
        for piece in chat.answer(text):
            print(piece, end="", file=out, flush=True)
        print(file=out)
    except KeyboardInterrupt:
        print(" [cut short]", file=out)
    except DataError as error:
        print(f"{error}; {HELP}", file=out)


def parse(arguments: list[str]) -> argparse.Namespace:
    description = f"Talk to a trained model. {HELP}."
    parser = argparse.ArgumentParser(prog="python -m twinkle_research.chat", description=description)
    parser.add_argument("target", help="run folder, checkpoint, PEFT or model folder, tiny, tiny_sums, smollm2_135m, or a hub id")
    parser.add_argument("--prompt", help="answer this and leave")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--base", help="base model of an adapter: folder, hub id or name of a shipped model")
    parser.add_argument("--without-adapter", action="store_true", help="let the base model answer, to compare")
    parser.add_argument("--max-tokens", type=int, default=512, help="in one answer (default: 512)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default: always the most likely token")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample from the most likely tokens with this probability")
    parser.add_argument("--top-k", type=int, default=-1, help="sample from this many most likely tokens")
    parser.add_argument("--seed", type=int, help="the same seed gives the same answers")
    parser.add_argument(
        "--stop", action="append", default=[], help=r"text that ends an answer, such as '\nUser:'; may be repeated"
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ...")
    parser.add_argument("--dtype", choices=list(DType.__members__), help="of the weights; by default float32 on a CPU")
    return parser.parse_args(arguments)


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    from twinkle_research.sampler.stops import unescape

    try:
        return SamplingParams(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            seed=options.seed,
            stop=[unescape(text) for text in options.stop] or None,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    let_idle_threads_sleep()
    try:
        from twinkle_research.sampler.loading import find_target, load_sampler

        params = sampling_params(options)
        target = find_target(options.target, options.base)
        sampler = load_sampler(target, device=options.device, dtype=DType(options.dtype) if options.dtype else None)
        chat = Chat(sampler, params, options.system, options.without_adapter)
        if options.prompt is not None:
            for piece in chat.answer(options.prompt):
                print(piece, end="", flush=True)
            print()
            return 0
        print(f"{target.name}: {HELP}", file=sys.stderr)
        return talk(chat, sys.stdin, sys.stdout)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
