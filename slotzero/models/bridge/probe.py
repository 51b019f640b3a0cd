"""Examination of a model of transformers, without its weights.

The model runs over fake tensors, which have shapes and no numbers. So its attention is found, and
the shape and window of each; layers are traced, to know which do the same; and what a recorded
graph could not repeat is found and refused by name: see lint.py.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from slotzero.errors import UnsupportedModelError
from slotzero.graph.structure import flatten
from slotzero.kernels.types import Heads
from slotzero.models.bridge import library
from slotzero.models.bridge.attention import AttentionCall, Hook, attach_hook, window_of
from slotzero.models.bridge.body import Arguments, Body
from slotzero.models.bridge.config import BridgedConfig, BridgedLayer
from slotzero.models.bridge.lint import Lint, explained, refuse_kept, tensors_in
from slotzero.models.bridge.parts import NO_INTERFACE, Parts
from slotzero.models.bridge.trace import trace_piece

NUM_TOKENS = 3
Config = Mapping[str, Any]


def examine(config: Config) -> BridgedConfig:
    """Examine the model that a config.json names; refuse it by name if the bridge cannot run it."""
    kind, made = library.class_and_config(config)
    with library.quiet(), FakeTensorMode():
        return _Probe(kind, made).examined()


class _Probe(Hook):
    """One examination. As a hook it notes the calls of the attention interface."""

    def __init__(self, kind: Any, made: Any) -> None:
        self._name, self._made = kind.__name__, made
        with explained(f"{self._name} cannot be built"):
            try:
                model = kind._from_config(made).eval()
            except KeyError as error:
                if error.args != (made._attn_implementation,):
                    raise
                # a class with its own table of attentions
                raise UnsupportedModelError(f"{self._name}: {NO_INTERFACE}") from error
        self._num_values = sum(tensor.numel() for tensor in model.parameters())
        self._parts = Parts(model)
        self._paths = {module: path for path, module in self._parts.trunk.named_modules()}
        self._calls: dict[str, AttentionCall] = {}  # by path of the attention module
        self._codes: dict[int, Any] = {}  # by layer: what it does
        attach_hook(self._parts.trunk, self)

    def examined(self) -> BridgedConfig:
        max_position = self._max_position()
        with library.attention_with_masks(self._made):
            self._run(torch.ones(1, NUM_TOKENS, dtype=torch.int64), lint=False)
        stack = self._parts.stack_path(self._calls)
        windows = {p: self._window(p, call, max_position) for p, call in self._calls.items()}
        layers = [*self._parts.trunk.get_submodule(stack)]
        before = tensors_in(self._parts)
        for index, layer in enumerate(layers):
            self._trace(index, layer)
        hidden, logits = self._run()
        self._refuse_changed(windows)
        refuse_kept(self._name, before, tensors_in(self._parts))
        heads = {
            int(path.removeprefix(f"{stack}.").split(".")[0]): call.heads(windows[path])
            for path, call in self._calls.items()
        }
        return BridgedConfig(
            family=self._made.model_type,
            architecture=self._name,
            vocab_size=logits.shape[-1],
            hidden_size=hidden.shape[-1],
            max_position=max_position,
            stack=stack,
            layers=tuple(self._layers(heads, len(layers))),
            num_values=self._num_values,
        )

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        path = self._paths[module]
        if path in self._calls:
            raise UnsupportedModelError(f"{self._name}: {path} attends twice in one pass")
        if call.query.shape[2] != NUM_TOKENS or call.key.shape[2] != NUM_TOKENS:
            raise UnsupportedModelError(f"{self._name}: {path} attends to other tokens too")
        self._calls[path] = call
        _, num_heads, num_tokens, _ = call.query.shape
        used = call.query.sum() + call.key.sum() + call.value.sum()
        return used + call.value.new_zeros(num_tokens, num_heads, call.value.shape[-1])

    def _run(self, mask: Tensor | None = None, lint: bool = True) -> tuple[Tensor, Tensor]:
        """Return the hidden states and logits of a pass."""
        self._calls.clear()
        ids = torch.zeros(NUM_TOKENS, dtype=torch.int64)
        with Lint(self._name, self._parts, lint), torch.no_grad():
            hidden = self._parts.hidden(ids, ids.clone(), mask)
            return hidden, self._parts.logits(hidden)

    def _trace(self, index: int, layer: nn.Module) -> None:
        """Note, in the next pass, what the layer does with its arguments and weights."""
        body, path = Body(layer), self._paths[layer]

        def forward(*args: Any, **kwargs: Any) -> Any:
            arguments = Arguments.of(f"{self._name}: {path}", args, kwargs)
            tensors, structure = flatten((arguments, body.weights))
            before, self._calls = self._calls, {}
            graph, made = trace_piece(body.call, tensors, structure)
            settings = [(c.settings, c.query.shape, c.value.shape) for c in self._calls.values()]
            self._calls = before
            looks = [(tensor.shape, tensor.dtype) for tensor in tensors]
            self._codes[index] = (graph.code, structure, made, looks, settings)
            return body(*args, **kwargs)

        layer.forward = forward

    def _layers(self, heads: Mapping[int, Heads], num: int) -> Iterator[BridgedLayer]:
        """Yield the layers; two are equal if they do the same and see the same keys."""
        seen: list[tuple[Any, Heads | None]] = []
        for index in range(num):
            seen.append((self._codes.get(index), heads.get(index)))
            yield BridgedLayer(heads.get(index), seen.index(seen[-1]))

    def _refuse_changed(self, windows: Mapping[str, int | None]) -> None:
        """Raise if recorded passes, in which no mask is made, attend otherwise than with masks."""
        for path in sorted(self._calls.keys() | windows.keys()):
            call = self._calls.get(path)
            if path not in windows or call is None or call.mask is not None:
                raise UnsupportedModelError(
                    f"{self._name}: {path} attends otherwise if it makes no mask"
                )
            if call.query.shape[-1] % 2:
                raise UnsupportedModelError(
                    f"{self._name}: {path} has an odd head_dim, {call.query.shape[-1]}"
                )

    def _window(self, path: str, call: AttentionCall, max_position: int) -> int | None:
        """Return the window of an attention, as its mask has it."""
        where, seen = f"{self._name}: {path}", getattr(call.mask, "mask_function", None)
        if seen is None:
            what = "no mask" if call.mask is None else "a mask or bias of its own"
            raise UnsupportedModelError(
                f"{where} is given {what}: the bridge to transformers attends to all earlier "
                "tokens or to a sliding window of them"
            )
        try:
            with torch._C._DisableTorchDispatch():  # real numbers, in the middle of fake ones
                window = window_of(seen, max_position)
        except Exception as error:
            raise UnsupportedModelError(f"{where} has a mask that is not supported: "
                                        f"{library.first_line(error)}") from error  # fmt: skip
        said = call.settings.window
        if said is not None and said < max_position and said != window:
            raise UnsupportedModelError(
                f"{where}: sliding_window={said} contradicts its mask, whose window is {window}"
            )
        return window

    def _max_position(self) -> int:
        found = getattr(self._made, "max_position_embeddings", None)
        if not isinstance(found, int) or found < 2:
            raise UnsupportedModelError(
                f"config field max_position_embeddings={found!r}: must be a number of positions"
            )
        return found
