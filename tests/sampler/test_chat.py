"""Talking to runs, checkpoints, adapters and models: python -m twinkle_research.chat."""

import io
import os
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from twinkle_research import chat as chat_module
from twinkle_research.chat import Chat, main, talk
from twinkle_research.checkpoint.format import CheckpointWriter, publish_latest
from twinkle_research.config import compose, save_config
from twinkle_research.data_format import SamplingParams
from twinkle_research.errors import CheckpointError, ConfigError, UserError
from twinkle_research.model.config import DType
from twinkle_research.model.prepare import prepare
from twinkle_research.sampler.loading import find_target, load_sampler

PARAMS = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A PEFT folder that changes the answers of model=tiny."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("adapter")
    model = AutoModelForCausalLM.from_pretrained(prepare("tiny"))
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=256, target_modules="all-linear", init_lora_weights=False))
    model.save_pretrained(folder)
    return folder


def write_run(folder, copies, overrides=(), step=3):
    """A run folder with one checkpoint that holds copies of ``{name in the checkpoint: folder}``."""
    save_config(compose(["model=tiny", *overrides]), folder)
    with CheckpointWriter(folder / "checkpoints", f"step-{step:06d}", step=step, backend="transformers") as writer:
        for name, source in copies.items():
            for file in sorted(source.iterdir()):
                writer.add_files(name, lambda target, file=file: (target / file.name).write_bytes(file.read_bytes()))
        writer.add_json("trainer_state.json", {"step": step})
    publish_latest(folder / "checkpoints", f"step-{step:06d}")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory, adapter):
    return write_run(tmp_path_factory.mktemp("runs") / "my run", {"adapter": adapter}, ["data.default_system=Be kind."])


def answer(target, text="What is it?", **options):
    return "".join(Chat(load_sampler(target), PARAMS, **options).answer(text))


# --- what is loaded -------------------------------------------------------------------------------------------------


def test_a_run_its_checkpoint_and_its_adapter_answer_alike(run, adapter):
    checkpoint = run / "checkpoints" / "step-000003"
    targets = [find_target(str(path)) for path in (run, checkpoint, checkpoint / "adapter", adapter)]
    assert [target.name for target in targets] == ["my run/step-000003", "my run/step-000003", "adapter", adapter.name]
    assert all(target.model == prepare("tiny") for target in targets)
    # The run's settings belong to the conversation: its system message is there in the first two.
    samplers = [load_sampler(target) for target in targets]
    prompts = [s.template.encode({"messages": [{"role": "user", "content": "x"}]}, add_generation_prompt=True) for s in samplers]
    assert [("Be kind." in s.template.decode(p["input_ids"])) for s, p in zip(samplers, prompts)] == [True, True, False, False]
    ids = [prompts[0]["input_ids"]]
    answers = [s.sample(ids, PARAMS)[0].sequences[0].tokens for s in samplers]
    assert all(tokens == answers[0] for tokens in answers)
    assert answers[0] != samplers[0].sample(ids, PARAMS, use_base_model=True)[0].sequences[0].tokens


def test_a_run_of_full_fine_tuning(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(prepare("tiny"))
    with torch.no_grad():
        model.model.norm.weight.mul_(-1)
    source = tmp_path / "trained"
    model.save_pretrained(source)
    AutoTokenizer.from_pretrained(prepare("tiny")).save_pretrained(source)
    target = find_target(str(write_run(tmp_path / "run", {"model": source}, ["adapter=none"])))
    assert target.model == tmp_path / "run" / "checkpoints" / "step-000003" / "model"
    assert answer(target) == answer(find_target(str(source))) != answer(find_target("tiny"))


def test_the_newest_checkpoint_counts(run, adapter, tmp_path):
    folder = write_run(tmp_path / "run", {"adapter": adapter})
    write_run(folder, {"adapter": adapter}, step=5)
    (folder / "checkpoints" / "step-000007.tmp").mkdir()
    assert find_target(str(folder)).name == "run/step-000005"


def test_dtype_and_device(adapter):
    sampler = load_sampler(find_target("tiny"), device="cpu", dtype=DType.bfloat16)
    assert sampler.module.dtype == torch.bfloat16
    with pytest.raises(UserError, match="device 'gpu' cannot be used"):
        load_sampler(find_target("tiny"), device="gpu")


def test_what_cannot_be_found_is_named(tmp_path, adapter, run):
    with pytest.raises(UserError, match="did you mean 'smollm2_135m'"):
        find_target("smolm2_135m")
    with pytest.raises(UserError, match="no such folder"):
        find_target(str(tmp_path / "nothing"))
    save_config(compose(["model=tiny"]), tmp_path / "empty")
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        find_target(str(tmp_path / "empty"))
    broken = write_run(tmp_path / "broken", {"adapter": adapter})
    (broken / "checkpoints" / "step-000003" / "adapter" / "adapter_model.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match="3 bytes instead of"):
        find_target(str(broken / "checkpoints" / "step-000003"))


def test_adapters_need_a_base_and_safetensors(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="names no base model; give one with --base"):
        find_target(str(tmp_path))
    target = find_target(str(tmp_path), "tiny")
    assert target.model == prepare("tiny")
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(CheckpointError, match="adapter_model.safetensors is missing"):
        load_sampler(target)


# --- the conversation -----------------------------------------------------------------------------------------------


@pytest.fixture
def chat():
    return Chat(load_sampler(find_target("tiny")), PARAMS, system="Be brief.")


def test_the_conversation_grows_and_starts_again(chat):
    first = "".join(chat.answer("a"))
    "".join(chat.answer("b"))
    roles = [message["role"] for message in chat.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert chat.messages[2]["content"] == first
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "Be brief."}]
    assert "".join(chat.answer("a")) == first


def test_lines_from_a_file(chat):
    out = io.StringIO()
    assert talk(chat, io.StringIO("a\n\n  \n/restet\n/reset\na\n/exit\nnever\n"), out) == 0
    lines = out.getvalue().split("unknown command /restet; /reset starts a new conversation")
    assert len(lines) == 2
    assert len(chat.messages) == 3
    assert talk(chat, io.StringIO("x y"), out) == 0  # the end of input ends it too


def test_ctrl_c_cuts_an_answer_short_and_keeps_it(chat, monkeypatch):
    stream = chat.sampler.sample_stream

    def interrupted(*args, **kwargs):
        chunks = stream(*args, **kwargs)
        yield next(chunks)
        raise KeyboardInterrupt

    monkeypatch.setattr(chat.sampler, "sample_stream", interrupted)
    out = io.StringIO()
    assert talk(chat, io.StringIO("a\n"), out) == 0
    assert "[cut short]" in out.getvalue()
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant"]


def test_a_conversation_longer_than_the_context(chat):
    out = io.StringIO()
    talk(chat, io.StringIO("word " * 1000 + "\nshort\n"), out)
    assert "the model reads at most 1024; /reset starts a new conversation" in out.getvalue()
    assert [message["content"] for message in chat.messages[:2]] == ["Be brief.", "short"]


def test_a_model_without_chat_template_continues_text(tmp_path):
    folder = prepare("tiny", tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    os.remove(folder / "tokenizer_config.json")
    tokenizer.save_pretrained(folder)
    sampler = load_sampler(find_target(str(folder)))
    chat = Chat(sampler, PARAMS)
    reply = "".join(chat.answer("The name"))
    ids = tokenizer("The name")["input_ids"]
    assert reply == sampler.sample([ids], PARAMS)[0].sequences[0].decoded
    with pytest.raises(UserError, match="no system message"):
        Chat(sampler, PARAMS, system="x")


# --- the command ----------------------------------------------------------------------------------------------------


def test_one_answer(run, capsys):
    assert main([str(run), "--prompt", "What is it?", "--max-tokens", "12"]) == 0
    assert capsys.readouterr().out == answer(find_target(str(run))) + "\n"
    assert main([str(run), "--prompt", "What is it?", "--max-tokens", "12", "--without-adapter"]) == 0
    assert capsys.readouterr().out == answer(find_target(str(run)), use_base_model=True) + "\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["smolm2_135m"], 1, "did you mean 'smollm2_135m'"),
        (["tiny", "--temperature", "-1"], 2, "temperature must be >= 0"),
        (["tiny", "--device", "gpu", "--prompt", "x"], 1, "device 'gpu'"),
    ],
)
def test_wrong_arguments(arguments, code, message, capsys):
    assert main(arguments) == code
    assert message in capsys.readouterr().err


def test_stop_texts_are_unescaped():
    options = chat_module.parse(["tiny", "--stop", r"\nUser:", "--stop", "END"])
    assert chat_module.sampling_params(options).stop == ["\nUser:", "END"]
    with pytest.raises(ConfigError, match="top_p"):
        chat_module.sampling_params(chat_module.parse(["tiny", "--top-p", "2"]))


def test_the_command_reads_questions_from_a_pipe():
    command = [sys.executable, "-m", "twinkle_research.chat", "tiny", "--max-tokens", "3"]
    done = subprocess.run(command, input="a\nb\n", capture_output=True, text=True, check=True)
    assert "Ctrl-D leaves" in done.stderr
    assert done.stdout.count("\n") >= 2
    assert "Loading" not in done.stderr
