"""Architectures that tests run over the bridge, token for token as transformers does.

Others run too, if nothing in them is refused (probe.py, mixing.py); only these are known to.
"""

TRIED = (
    "ApertusForCausalLM",
    "BitNetForCausalLM",
    "Cohere2ForCausalLM",
    "CohereForCausalLM",
    "Exaone4ForCausalLM",
    "GPTNeoXForCausalLM",
    "GlmForCausalLM",
    "GraniteForCausalLM",
    "HeliumForCausalLM",
    "NemotronForCausalLM",
    "OPTForCausalLM",
    "OlmoForCausalLM",
    "OlmoeForCausalLM",
    "PersimmonForCausalLM",
    "Phi3ForCausalLM",
    "PhiForCausalLM",
    "SmolLM3ForCausalLM",
    "StableLmForCausalLM",
    "Starcoder2ForCausalLM",
    "VaultGemmaForCausalLM",
)
