"""What an engine would do with a model, from its config alone: whether it runs, on what, and with
how much memory. No weights are read."""

from dataclasses import dataclass, replace

from slotzero.checkpoint.source import checkpoint_of
from slotzero.config import EngineConfig
from slotzero.executor.determinism import refuse_dependence
from slotzero.executor.limits import (
    choose_backend,
    choose_dtype,
    choose_kv_dtype,
    group_shapes,
    state_shape,
    unpack_if_faster,
)
from slotzero.kernels.contract import kernels_for
from slotzero.kernels.float8_kv import CODES
from slotzero.models.bridge.config import BridgedConfig
from slotzero.models.bridge.load import try_mixing
from slotzero.models.config import ModelConfig
from slotzero.models.families.family import architecture_in
from slotzero.models.implementation import parse_model
from slotzero.models.weights import weight_bytes
from slotzero.pools.budget import kv_bytes_beside

MOST_TRIED = 1 << 29
"""Parameters of the largest bridged model that is made, with random weights, to try whether its
layers mix tokens outside of attention. A larger one is tried when an engine starts."""


@dataclass(frozen=True)
class Forecast:
    model: str
    architecture: str
    implementation: str  # slotzero or transformers
    device: str
    backend: str
    dtype: str
    weight_bytes: int
    kv_bytes_per_token: int
    """KV of one token in all layers, while a request is shorter than their windows."""
    state_bytes: int
    """Recurrent states of one request."""
    context: int  # the model's own limit, or a lower one that was asked for
    kv_bytes: int
    """Memory that is left for KV beside the weights."""

    @property
    def num_kv_tokens(self) -> int:
        """Tokens whose KV fits."""
        return (self.kv_bytes - self.state_bytes) // max(1, self.kv_bytes_per_token)

    @property
    def fits(self) -> bool:
        return self.num_kv_tokens > 0


def forecast(config: EngineConfig) -> Forecast:
    """Forecast one engine on one device; raise as the engine would if it cannot run the model."""
    checkpoint = checkpoint_of(replace(config, load_format="dummy"))
    device, backend = choose_backend(config)
    dtype = choose_dtype(config.dtype, device, checkpoint.config)
    model = parse_model(checkpoint.config, config.model_impl)
    kernels = kernels_for(device, config.deterministic)
    refuse_dependence(config, model, kernels, device)
    kv_dtype = choose_kv_dtype(config.kv_cache_dtype, model, kernels, dtype)
    for group in model.groups:
        for heads in group.shapes:
            kernels.refuse(heads, kv_dtype is CODES)
    if isinstance(model, ModelConfig):
        model = unpack_if_faster(model, config.quantization, device, dtype)
        num_bytes = weight_bytes(model, kernels, dtype)
    else:
        assert isinstance(model, BridgedConfig)
        num_bytes = model.num_values * dtype.itemsize
        if model.num_values <= MOST_TRIED:
            try_mixing(model, checkpoint.config)
    shapes = group_shapes(model.groups, config.page_size, kv_dtype)
    states = state_shape(model, device, dtype, config.deterministic)
    return Forecast(
        model=checkpoint.name,
        architecture=architecture_in(checkpoint.config),
        implementation="slotzero" if isinstance(model, ModelConfig) else "transformers",
        device=str(device),
        backend=backend,
        dtype=str(dtype).removeprefix("torch."),
        weight_bytes=num_bytes,
        kv_bytes_per_token=sum(shape.num_bytes // shape.page_size for shape in shapes),
        state_bytes=0 if states is None else states.num_bytes,
        context=min(config.max_model_len or model.max_position, model.max_position),
        kv_bytes=config.kv_cache_memory
        or kv_bytes_beside(num_bytes, device, config.gpu_memory_utilization),
    )
