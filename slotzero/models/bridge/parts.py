"""The parts of a model of transformers: the trunk between token ids and hidden states, the list of
layers in it, and the head after it."""

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn

from slotzero.errors import UnsupportedModelError

NO_INTERFACE = (
    "its attention does not go through the attention interface of transformers "
    "(AttentionInterface), so it cannot use our KV cache"
)


class TrunkStandIn(nn.Module):
    """Takes the place of the trunk in a model, which then computes logits from given states."""

    def __init__(self) -> None:
        super().__init__()
        self.output: Any = None

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.output


class Parts:
    """A model taken apart into trunk and head."""

    def __init__(self, model: Any) -> None:
        self.model, self.trunk = model, model.get_decoder()
        path = next((name for name, module in model.named_modules() if module is self.trunk), "")
        if not path:
            raise UnsupportedModelError(
                f"{type(model).__name__}: it has no decoder before its head, as the bridge to "
                "transformers needs"
            )
        self.like: Tensor = next(self.trunk.parameters())
        """A tensor with the type and device of hidden states."""
        self._stand_in = TrunkStandIn()
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, self._stand_in)

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        yield from self.trunk.named_modules()
        yield from self.model.named_modules()

    def hidden(self, ids: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the hidden states [T, hidden] of tokens [T]."""
        out = self.trunk(
            input_ids=ids[None], position_ids=positions[None], attention_mask=mask, use_cache=False
        )
        self._kind = type(out)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [rows, vocab] of hidden states, as the whole model computes them."""
        self._stand_in.output = self._kind(last_hidden_state=hidden[None])
        try:
            logits: Tensor = self.model(inputs_embeds=hidden[None], use_cache=False).logits[0]
        finally:
            self._stand_in.output = None
        return logits

    def stack_path(self, attentions: Collection[str]) -> str:
        """Return the path within the trunk of the list of layers, each of which has at most one of
        these modules."""
        for path, module in self.trunk.named_modules():
            inner = [name for name in attentions if name.startswith(f"{path}.")]
            layers = {name.removeprefix(f"{path}.").split(".")[0] for name in inner}
            if isinstance(module, nn.ModuleList) and len(layers) == len(attentions) > 0:
                return str(path)
        what = "no list of layers has one attention in each layer" if attentions else NO_INTERFACE
        raise UnsupportedModelError(f"{type(self.model).__name__}: {what}")
