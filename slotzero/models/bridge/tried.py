"""Architectures that tests run over the bridge, token for token as transformers does.

Others run too, if nothing in them is refused (probe.py, mixing.py); only these are known to.
"""

TRIED = (
    "ApertusForCausalLM",
    "ArceeForCausalLM",
    "BitNetForCausalLM",
    "Cohere2ForCausalLM",
    "CohereForCausalLM",
    "Ernie4_5ForCausalLM",
    "Exaone4ForCausalLM",
    "GPTNeoXForCausalLM",
    "Glm4ForCausalLM",
    "GlmForCausalLM",
    "GraniteForCausalLM",
    "HeliumForCausalLM",
    "MixtralForCausalLM",
    "NanoChatForCausalLM",
    "NemotronForCausalLM",
    "OPTForCausalLM",
    "Olmo2ForCausalLM",
    "OlmoForCausalLM",
    "OlmoeForCausalLM",
    "PersimmonForCausalLM",
    "Phi3ForCausalLM",
    "PhiForCausalLM",
    "Qwen2MoeForCausalLM",
    "SeedOssForCausalLM",
    "SmolLM3ForCausalLM",
    "StableLmForCausalLM",
    "Starcoder2ForCausalLM",
    "VaultGemmaForCausalLM",
)
