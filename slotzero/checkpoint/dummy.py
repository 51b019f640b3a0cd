"""A checkpoint with random weights: shapes from the config, values from a seed.

It does not read tensor files, so a config.json alone is enough to measure speed and memory.

The rule: the values of a tensor depend on the seed, its name and its shape only. They are the same
in any order of reading, and on every machine with the same version of torch.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, final

import torch

from slotzero.errors import CorruptCheckpointError
from slotzero.models.checkpoint import Checkpoint
from slotzero.models.tensors import expected_tensors, scales_of_cache
from slotzero.quantization.method import CACHE_SCALES
from slotzero.text.tokenizer import Tokenizer

_DEFAULT_STD = 0.02
_A_LOG_MEAN = -2.0  # states that decay slowly, so that an error in a state stays visible for long
_LEAST_SCALE, _MOST_SCALE = 0.02, 0.06  # of an FP8 KV cache: few keys and values are beyond it
_ONES = ("norm.weight", "norm_1.weight", "norm_2.weight", "scalar", "router.scale", "expert_scale",
         "norm_f.weight")  # fmt: skip


@final
class DummyCheckpoint(Checkpoint):
    def __init__(
        self,
        config: Mapping[str, Any],
        name: str,
        *,
        eos_token_ids: tuple[int, ...],
        make_tokenizer: Callable[[], Tokenizer],
        sampling: Callable[[], Mapping[str, Any]] = dict,
        modules: Callable[[], Sequence[tuple[str, Mapping[str, Any]]]] = tuple,
        seed: int = 0,
    ) -> None:
        self.name = name
        self.config = config
        self.eos_token_ids = eos_token_ids
        self._make_tokenizer = make_tokenizer
        self._sampling = sampling
        self._modules = modules
        self._seed = seed

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return expected_tensors(self.config) | scales_of_cache(self.config)

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def read(self, name: str) -> torch.Tensor:
        if name not in self._shapes:
            raise CorruptCheckpointError(f"{self.name}: a model with its config has no {name}")
        shape = self._shapes[name]
        if name.endswith(_ONES):
            return torch.ones(shape)
        generator = torch.Generator().manual_seed(tensor_seed(self._seed, name))
        if name.endswith(CACHE_SCALES):
            return torch.empty(shape).uniform_(_LEAST_SCALE, _MOST_SCALE, generator=generator)
        std = float(self.config.get("initializer_range") or _DEFAULT_STD)
        mean = _A_LOG_MEAN if name.endswith("A_log") else 0.0
        return torch.empty(shape).normal_(mean, std, generator=generator)

    def tokenizer(self) -> Tokenizer:
        return self._make_tokenizer()

    def sampling(self) -> Mapping[str, Any]:
        return self._sampling()

    def modules(self) -> Sequence[tuple[str, Mapping[str, Any]]]:
        return self._modules()


def tensor_seed(seed: int, name: str) -> int:
    """Return the seed of a tensor. (Python's own hash of a string differs between processes.)"""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")
