"""lm-eval computes with a server what it computes with transformers for the same weights."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_tools import MODEL
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT = 96  # tokens
WINDOW = CONTEXT - 2  # of lm-eval for a server: the first token and a generated one are not in it
TOLERANCE = 1e-3
SCORED = ("likelihood", "choice", "perplexity")

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
CONTEXTS = [f"{number} times" for number in range(1, 11)]
TASKS: Mapping[str, Mapping[str, Any]] = {
    "likelihood": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{continuation}}",
        "metric_list": [{"metric": "acc"}],
    },
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": ["a cat", "🙂", "naïve, 中文", "3.14\n"],
        "doc_to_target": "{{0}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{context * 80}}",  # several windows, and more than a prompt may have
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "generation": {
        "output_type": "generate_until",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{continuation}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny random model whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("model")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: token for token, text in enumerate([*letters, "<bos>", "<eos>"])}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
        bos_token_id=vocab["<bos>"],
        eos_token_id=vocab["<eos>"],
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def url(folder: Path, serve: Callable[..., AbstractContextManager[str]]) -> Iterator[str]:
    with serve(str(folder)) as url:
        yield url


@pytest.fixture(scope="session")
def tasks(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    """Write the tasks, of which half of the continuations are the most likely ones."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder)
    docs = []
    for index, context in enumerate(CONTEXTS):
        ids = tokenizer(context, return_tensors="pt").input_ids
        likeliest = tokenizer.decode(model(ids).logits[0, -1, :128].argmax())
        docs.append({"context": context, "continuation": likeliest if index % 2 else " so on"})
    written = tmp_path_factory.mktemp("tasks")
    data = written / "docs.jsonl"
    data.write_text("".join(f"{json.dumps(doc)}\n" for doc in docs))
    for name, task in TASKS.items():
        read = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        whole = {"task": name, "test_split": "test", **read, **task}
        (written / f"{name}.yaml").write_text(json.dumps(whole, ensure_ascii=False))
    return TaskManager(include_path=str(written), include_defaults=False)


@pytest.fixture(scope="session")
def expected(folder: Path, tasks: TaskManager) -> dict[str, Any]:
    return evaluate("hf", f"pretrained={folder},dtype=float32,max_length={WINDOW}", tasks, TASKS)


def evaluate(model: str, args: str, tasks: TaskManager, names: Any, **more: Any) -> dict[str, Any]:
    evaluated = simple_evaluate(
        model=model,
        model_args=args,
        tasks=list(names),
        task_manager=tasks,
        device="cpu",
        bootstrap_iters=0,
        **more,
    )
    assert evaluated is not None
    return evaluated


def answers(evaluated: Mapping[str, Any], task: str) -> list[Any]:
    """Return what the model said of each document, in order."""
    samples = sorted(evaluated["samples"][task], key=lambda sample: sample["doc_id"])
    return [answer for sample in samples for (answer,) in sample["resps"]]


def metrics(evaluated: Mapping[str, Any], task: str) -> dict[str, float]:
    made = evaluated["results"][task]
    return {name: value for name, value in made.items() if isinstance(value, float)}


@pytest.mark.parametrize(
    "more",
    ["", ",batch_size=4", ",num_concurrent=4", ",tokenizer_backend=huggingface,tokenizer={folder}"],
)
def test_completions(
    more: str, folder: Path, url: str, tasks: TaskManager, expected: dict[str, Any]
) -> None:
    """The first case has lm-eval's defaults: it finds the tokenizer on the server."""
    args = f"model={MODEL},base_url={url}/v1/completions,max_length={CONTEXT}"
    made = evaluate("local-completions", args + more.format(folder=folder), tasks, TASKS)
    for task in SCORED:
        assert metrics(made, task) == pytest.approx(metrics(expected, task), abs=TOLERANCE)
    for task in ("likelihood", "choice"):
        pairs = list(zip(answers(made, task), answers(expected, task), strict=True))
        for (value, is_greedy), (right, is_right_greedy) in pairs:
            assert value == pytest.approx(right, abs=TOLERANCE)
            assert is_greedy == is_right_greedy
    assert len({is_greedy for _, is_greedy in answers(expected, "likelihood")}) == 2
    assert answers(made, "perplexity") == pytest.approx(
        answers(expected, "perplexity"), abs=TOLERANCE
    )
    assert answers(made, "generation") == answers(expected, "generation")


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_chats(system: str | None, folder: Path, url: str, tasks: TaskManager) -> None:
    chat: dict[str, Any] = {"apply_chat_template": True, "system_instruction": system}
    args = f"pretrained={folder},dtype=float32,max_length={CONTEXT}"
    expected = evaluate("hf", args, tasks, ["generation"], **chat)
    args = f"model={MODEL},base_url={url}/v1/chat/completions"
    made = evaluate("local-chat-completions", args, tasks, ["generation"], **chat)
    assert answers(made, "generation") == answers(expected, "generation")
    assert any(answers(made, "generation"))
