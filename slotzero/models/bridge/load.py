"""Loading of a bridged model: its weights become constants of the registry.

Tensors come from our checkpoints. transformers converts them to what its class expects (names, and
how experts are joined). Parameters of all layers with one name and shape are stacked, so that the
registry stays short; those of a layer are views.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slotzero.errors import CorruptCheckpointError, UnsupportedModelError
from slotzero.graph import Registry
from slotzero.kernels.contract import Kernels
from slotzero.models.bridge import library
from slotzero.models.bridge.config import BridgedConfig
from slotzero.models.bridge.lint import explained
from slotzero.models.bridge.mixing import refuse_mixing
from slotzero.models.bridge.model import BridgedModel
from slotzero.models.bridge.parts import Parts
from slotzero.models.checkpoint import Checkpoint
from slotzero.models.weights import Progress
from slotzero.pools.budget import refuse_beyond

_EMBEDDING, _HEAD = "embedding", "head"  # names that the benchmarks know
_COPIES = 2  # of the weights, while they are read: the checkpoint's and the model's


def load_bridged(
    config: BridgedConfig,
    checkpoint: Checkpoint,
    registry: Registry,
    kernels: Kernels,
    dtype: torch.dtype,
    frequencies: Mapping[str, Tensor],
    progress: Progress,
    random_seed: int | None = None,
) -> BridgedModel:
    """Load a model, or with a seed draw its weights, and register every tensor of it."""
    held = config.num_values * dtype.itemsize * (1 if random_seed is not None else _COPIES)
    host = torch.device("cpu")  # where transformers builds the model, whatever device runs it
    refuse_beyond(held, host, "weights, while transformers loads them,", "use a smaller model")
    kind, made = library.class_and_config(checkpoint.config)
    with explained(f"{checkpoint.name} cannot be loaded"):
        if random_seed is None:
            model = _read(kind, made, checkpoint, dtype)
        else:
            model = _random(kind, made, dtype, random_seed)
    model = model.eval().requires_grad_(False)
    _Owner(model, config, registry, progress).take()
    parts = Parts(model)
    refuse_mixing(config, parts)
    return BridgedModel(config, parts, frequencies, kernels)


def try_mixing(config: BridgedConfig, stored: Mapping[str, Any]) -> None:
    """Raise if the layers mix tokens outside of attention, tried with random weights."""
    kind, made = library.class_and_config(stored)
    refuse_mixing(config, Parts(_random(kind, made, torch.float32, seed=0)))


def _random(kind: Any, made: Any, dtype: torch.dtype, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind._from_config(made, dtype=dtype).eval().requires_grad_(False)


def _read(kind: Any, made: Any, checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    stored = {name: checkpoint.read(name) for name in checkpoint.names()}
    with library.quiet():
        model, report = kind.from_pretrained(
            None,
            config=made,
            state_dict=stored,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    missing, mismatched = report["missing_keys"], {name for name, *_ in report["mismatched_keys"]}
    for what, names in (("missing", missing), ("of another shape", mismatched)):
        if names:
            raise CorruptCheckpointError(
                f"{checkpoint.name}: tensor {min(names)} is {what} ({len(names)} in total): the "
                "checkpoint does not fit its config.json"
            )
    if report["unexpected_keys"]:
        names = sorted(report["unexpected_keys"])
        raise UnsupportedModelError(
            f"{checkpoint.name}: tensor {names[0]} is unknown to {kind.__name__} "
            f"({len(names)} in total)"
        )
    return model


class _Owner:
    """Registers the tensors of a model, and puts them in the place of the model's own."""

    def __init__(
        self, model: Any, config: BridgedConfig, registry: Registry, progress: Progress
    ) -> None:
        self._model, self._registry, self._progress = model, registry, progress
        self._total, self._done = config.num_values, 0
        trunk = next(name for name, m in model.named_modules() if m is model.get_decoder())
        self._layer = re.compile(re.escape(f"{trunk}.{config.stack}.") + r"(\d+)\.")
        ends = (model.get_output_embeddings(), _HEAD), (model.get_input_embeddings(), _EMBEDDING)
        self._names = {id(end.weight): name for end, name in ends if end is not None}

    def take(self) -> None:
        stacks: dict[tuple[str, torch.Size, torch.dtype], list[_Held]] = {}
        others: dict[int, list[_Held]] = {}  # by tensor: embeddings and head may share one
        for held in _held_by(self._model):
            if self._layer.match(held.path):
                name = self._layer.sub(lambda m: m[0].replace(m[1], "*"), held.path)
                stacks.setdefault((name, held.tensor.shape, held.tensor.dtype), []).append(held)
            else:
                others.setdefault(id(held.tensor), []).append(held)
        for members in others.values():
            tensor = members[0].tensor
            made = self._register(members[0], self._names.get(id(tensor), members[0].path), ())
            for held in members:
                held.put(made)
            self._fill(made, tensor)
        counts: dict[str, int] = {}
        for name, *_ in [*stacks]:
            members = stacks.pop(next(iter(stacks)))
            counts[name] = counts.get(name, 0) + 1  # layers may differ in shape
            number = f".{counts[name]}" if counts[name] > 1 else ""
            stack = self._register(members[0], name + number, (len(members),))
            while members:  # each is freed before the next is copied
                held = members.pop()
                place = stack[len(members)]
                self._fill(place, held.tensor)
                held.put(place)

    def _register(self, held: "_Held", name: str, lead: tuple[int, ...]) -> Tensor:
        shape, device = (*lead, *held.tensor.shape), self._registry.device
        made = torch.empty(shape, dtype=held.tensor.dtype, device=device)
        kind = "weight" if held.is_parameter else "buffer"
        return self._registry.constant(f"{kind}.{name}", made)

    def _fill(self, made: Tensor, tensor: Tensor) -> None:
        made.copy_(tensor)
        self._done += tensor.numel()
        self._progress(min(self._done, self._total), self._total)


class _Held(NamedTuple):
    """A tensor where a module holds it."""

    path: str
    module: nn.Module
    name: str
    tensor: Tensor

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.tensor, nn.Parameter)

    def put(self, new: Tensor) -> None:
        """Put another tensor in its place."""
        if self.is_parameter:
            self.module._parameters[self.name] = nn.Parameter(new, requires_grad=False)
        else:
            self.module._buffers[self.name] = new


def _held_by(model: nn.Module) -> Iterator[_Held]:
    for path, module in model.named_modules():
        for kept in (module._parameters, module._buffers):
            for name, tensor in kept.items():
                if tensor is not None and tensor.numel():
                    yield _Held(f"{path}.{name}", module, name, tensor)
