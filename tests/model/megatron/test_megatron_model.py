"""What a person may do wrong with a MegatronModel in Python, in one process."""

import pytest
from equality_cases import make_folder
from peft import LoraConfig

from twinkle_research.errors import ConfigError, UserError
from twinkle_research.model import MegatronBackendConfig, MegatronModel


@pytest.fixture
def folder(tmp_path):
    make_folder("qwen3-tied", tmp_path)
    return tmp_path


ROW = {"input_ids": [5, 6, 7], "labels": [6, 7, -100]}


@pytest.mark.parametrize("kind", ["tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"])
def test_a_layout_that_the_processes_do_not_fit(folder, kind):
    with pytest.raises(ConfigError, match=r"= 2 must divide the number of processes, but there is one: .*runtime=Runtime.start"):
        MegatronModel(folder, layout=MegatronBackendConfig(**{kind: 2}))


def test_after_close(folder):
    first, second = MegatronModel(folder), MegatronModel(folder)  # one mesh for both
    with pytest.raises(UserError, match="another layout is open"):
        MegatronModel(folder, layout=MegatronBackendConfig(logits_chunk=7))
    first.close()
    loss = second.forward_only(ROW).result["loss"]
    second.close()
    second.close()
    for model in (first, second):
        for call in (
            lambda m: m.forward_backward([ROW]),
            lambda m: m.add_adapter_to_model("a", LoraConfig()),
            MegatronModel.save,
        ):
            with pytest.raises(UserError, match="this model is closed"):
                call(model)
    third = MegatronModel(folder, layout=MegatronBackendConfig(logits_chunk=1))
    assert third.forward_only(ROW).result["loss"] == pytest.approx(loss, abs=1e-6)
    third.close()


def test_client_code(folder):
    model = MegatronModel(folder)
    try:
        model.set_optimizer("default", lr=1e-2)
        model.set_lr_scheduler("default", lr_decay_steps=10, max_lr=1e-2)
        losses = []
        for _ in range(4):
            losses.append(model.forward_backward([ROW]).result["loss"])
            model.clip_grad_and_step()
        assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.1
        assert model.get_train_configs().scheduler["lr_decay_steps"] == 10
    finally:
        model.close()
