"""A stand-in for vLLM, with the few names that TRL imports when a server generates for it.

TRL refuses to run without a package of this name. Weights go over a gloo group, as Slotzero takes
them, in place of vLLM's own communicator, which needs GPUs.
"""

__version__ = "0.31.0"


class LLM:
    """Only used when TRL generates by itself."""


class RequestOutput:
    """Likewise."""


class SamplingParams:
    """Likewise."""
