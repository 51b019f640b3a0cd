"""Generator of the documentation's table of models, models.md.

python docs/models.py
"""

from pathlib import Path

from slotzero.models.catalog import bridged_only, family_rows, multimodal_names

FILE = Path(__file__).with_suffix(".md")
HEAD = """\
# Models

This page is made by `python docs/models.py`. `slotzero models` prints the same lists, and
`slotzero models MODEL` says of a folder or hub id whether it runs here, on what, with how much
memory, and if not, why.

## Families with layers of Slotzero

CUDA graphs, quantised weights, several devices and speculative decoding work with all of them, with
one exception: DeepSeek-V3.2 runs on a CPU only. A combination that does not work is refused by
name. "Layers" is what the tiny models of the family are made of (`slotzero certify tiny:NAME`).

| architecture | `model_type` | layers | tiny models |
|---|---|---|---|
"""
MULTIMODAL = """
The language models of these multimodal architectures run, too; images are refused: {names}.
"""
BRIDGE = """
## Models over the bridge to transformers

With `pip install 'slotzero[transformers]'`, a causal language model without a family here runs with
the layers of transformers, inside our runners: positions, KV pages, sampling, prefix cache, chunked
prefill and recorded graphs are the same, and `slotzero certify` checks them. `--model-impl auto`
takes the bridge only where there is no family, and says so in one line; `--model-impl transformers`
takes it in any case.

Tests compare the tokens of these architectures with those of transformers:

{names}

Others run if nothing in them is refused when the engine starts. A refusal names the module and the
reason:

- Attention that does not go through the attention interface of transformers (GPT-J, Bloom, Falcon,
  RWKV), or calls it twice in a layer (DiffLlama).
- A mask or bias other than causal or a sliding window (Doge), and attention arguments that we do
  not implement.
- Code that a recorded graph cannot repeat: it reads a value of a tensor on the host (`dynamic` and
  `longrope` RoPE, routers that count tokens), makes a tensor from numbers of the host in every
  step, or keeps one from step to step.
- Layers that mix tokens outside of attention: convolutions, recurrences, token shifts (LFM2, Jamba,
  MiniMax). A step packs several requests into one sequence, so they would mix.

What does not work over the bridge is refused as well: quantised checkpoints and `--quantization`,
several devices (`--tensor-parallel-size`), and drafters that read the target's layers (`eagle`,
`eagle3`, `mtp`; `ngram` and `draft` work). An FP8 KV cache works, with scales of 1. Experts gather
the weights that each token needs, which is slow in a long prefill.

Llama has both: a decode step of SmolLM2-135M in float32 on one CPU core takes as long over the
bridge as natively with one request (0.94 to 1.02 times in two runs), and 1.25 to 1.31 times as long
with 8 (2026-11-19; the same tokens). It has not been measured on a GPU.

[Decision {decision}](decisions/{decision_file}) explains how it works.
"""
DECISION = "0032-foreign-layers-are-pieces.md"


def page() -> str:
    lines = [
        f"| `{row.architecture}` | `{row.model_type}` | {row.layers} | {_code(row.tiny)} |\n"
        for row in family_rows()
    ]
    multimodal = MULTIMODAL.format(names=_code(", ".join(multimodal_names())))
    bridge = BRIDGE.format(
        names=_code(", ".join(bridged_only())), decision=int(DECISION[:4]), decision_file=DECISION
    )
    return HEAD + "".join(lines) + multimodal + bridge


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", ") if name)


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
