"""A tiny model in a folder, and a server of it that trainers may control."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from other_python import started, wait_until_ready
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, f"{Path(__file__).parent}")  # the stand-in for vLLM

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("model")
    names = ["<eos>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytes_only = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, eos_token="<eos>", pad_token="<pad>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(made)
    config = LlamaConfig(
        vocab_size=len(names),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=0,
        pad_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(made)
    return made


@pytest.fixture(scope="session")
def controlled(folder: Path) -> Iterator[str]:
    """Serve the model for a trainer; return the URL."""
    words = ("serve", f"{folder}", "--port", "0", "--enable-admin", "--max-num-seqs", "16")
    with started("-m", "slotzero", *words) as line:
        url = line.split()[2].rstrip(",")
        wait_until_ready(url)
        yield url
