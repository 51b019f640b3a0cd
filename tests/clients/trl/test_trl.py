"""TRL's real client and trainer: they generate from a running server, and update its weights."""

from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_client import VLLMClient

PROMPTS = ["The sea", "A hill"]


@pytest.fixture
def client(controlled: str, monkeypatch: pytest.MonkeyPatch) -> VLLMClient:
    on_any_device(monkeypatch)
    return VLLMClient(base_url=controlled, group_port=51217)


def on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let TRL send weights from a CPU; it refuses to, as vLLM's communicator needs GPUs."""
    init = VLLMClient.init_communicator
    monkeypatch.setattr(VLLMClient, "init_communicator", lambda self, device: init(self, "cuda"))


def version_of(url: str) -> str:
    return requests.get(f"{url}/weight_info").json()["weight_version"]


def scores_of(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1)[range(len(answer)), answer]


def assert_scored_by(model: Any, made: dict[str, Any], num: int) -> None:
    """Assert that answers have the log probabilities that the model gives them."""
    for i, answer in enumerate(made["completion_ids"]):
        wanted = scores_of(model, made["prompt_ids"][i // num], answer)
        found = torch.tensor([values[0] for values in made["logprobs"][i]])
        assert torch.allclose(found, wanted, atol=1e-4)
        assert [ids[0] for ids in made["logprob_token_ids"][i]] == answer


def test_the_client_generates_and_updates(client: VLLMClient, folder: Path) -> None:
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    made = client.generate(PROMPTS, n=3, max_tokens=12)
    assert made["prompt_ids"] == tokenizer(PROMPTS)["input_ids"]
    assert len(made["completion_ids"]) == 6
    assert_scored_by(model, made, 3)
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    made = client.chat(chats, n=1, max_tokens=8)
    assert_scored_by(model, made, 1)
    before = int(version_of(client.base_url))
    client.init_communicator(device="cuda")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    client.update_model_params(model)
    client.reset_prefix_cache()
    assert int(version_of(client.base_url)) == before + 1
    assert_scored_by(model, client.generate(PROMPTS, n=2, max_tokens=12), 2)
    with client.weight_update():
        for name, parameter in model.named_parameters():
            client.update_named_param(name, parameter.data)
    assert int(version_of(client.base_url)) == before + 2
    client.close_communicator()
    requests.post(f"{client.base_url}/shutdown_weight_transfer_engine")


def test_a_grpo_step(
    controlled: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_any_device(monkeypatch)
    before = int(version_of(controlled))
    settings = GRPOConfig(
        output_dir=f"{tmp_path}",
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=controlled,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        max_steps=2,
        learning_rate=1e-2,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
    )
    trainer = GRPOTrainer(
        model=f"{folder}",
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 4}),
    )
    trainer.train()
    assert trainer.state.global_step == 2
    assert int(version_of(controlled)) > before
    made = trainer.vllm_generation.vllm_client.generate(PROMPTS, max_tokens=8)
    trainer.vllm_generation.sync_weights()
    made = trainer.vllm_generation.vllm_client.generate(PROMPTS, max_tokens=8)
    assert_scored_by(trainer.model, made, 1)
