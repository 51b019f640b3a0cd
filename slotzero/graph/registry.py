"""The registry of every tensor that a captured graph uses, with the rules for each kind.

It allocates, pads, stamps and fingerprints tensors, and does not know what they mean. A graph uses
no other long-lived tensors; after `freeze` no tensor is added and no address may change.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from slotzero.errors import ContractError
from slotzero.graph.transfer import UploadRing

# address, shape, stride, dtype
Fingerprint = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


class TensorKind(Enum):
    TABLE = "table"
    PUBLISHED = "published"
    DERIVED = "derived"
    OUTPUT = "output"
    CONSTANT = "constant"


@dataclass(frozen=True)
class Entry:
    name: str
    kind: TensorKind
    tensor: Tensor
    pad: int | None = None
    reason: str = ""
    axis: int = 0
    """For a table: the axis that is indexed by slot, or with `through`, by page or similar."""
    through: str = ""
    """For a table that is not indexed by slot, such as a KV cache: the table whose rows list the
    indices that each slot owns, such as a page table."""
    per: str = "row"
    """For a derived or output tensor: one entry per "row", per "token", or for the "step" as a
    whole."""
    is_float8: bool = False
    """For bytes: they are codes of numbers in e4m3."""
    chosen_from: str = ""
    """The tensor from which its values were chosen, such as logits for tokens: if that differs by
    rounding, these may differ entirely."""

    def extent(self, tokens: int, rows: int) -> int:
        """Return how many entries of a derived or output tensor a step of this size writes."""
        return {"row": rows, "token": tokens, "step": len(self.tensor)}[self.per]


def fingerprint(tensor: Tensor) -> Fingerprint:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


class Registry:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.step = 0
        self._entries: dict[str, Entry] = {}
        self._stamps: dict[str, int] = {}
        self._rings: dict[str, UploadRing] = {}
        self._frozen = False
        self._latest: tuple[int, tuple[Fingerprint, ...]] = -1, ()  # step, and fingerprints in it

    # One method per kind.

    def table(
        self,
        name: str,
        tensor: Tensor,
        *,
        axis: int = 0,
        through: str = "",
        is_float8: bool = False,
        chosen_from: str = "",
    ) -> Tensor:
        """Register a pool's memory as a table; no slot owns row 0."""
        tensor = self._on_device(name, tensor)
        return self._add(
            Entry(
                name,
                TensorKind.TABLE,
                tensor,
                axis=axis,
                through=through,
                is_float8=is_float8,
                chosen_from=chosen_from,
            )
        )

    def published(
        self, name: str, capacity: int, *, pad: int, reason: str, dtype: torch.dtype = torch.int32
    ) -> Tensor:
        if not reason:
            raise ContractError(
                f"published tensor {name!r}: a pad value needs its reason", tensor=name
            )
        tensor = torch.full((capacity,), pad, dtype=dtype, device=self.device)
        self._rings[name] = UploadRing(tensor)
        return self._add(Entry(name, TensorKind.PUBLISHED, tensor, pad, reason))

    def derived(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, *, per: str = "row"
    ) -> Tensor:
        tensor = torch.zeros(*shape, dtype=dtype, device=self.device)
        return self._add(Entry(name, TensorKind.DERIVED, tensor, per=per))

    def output(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        per: str = "row",
        chosen_from: str = "",
    ) -> Tensor:
        tensor = torch.zeros(*shape, dtype=dtype, device=self.device)
        return self._add(Entry(name, TensorKind.OUTPUT, tensor, per=per, chosen_from=chosen_from))

    def constant(self, name: str, tensor: Tensor) -> Tensor:
        return self._add(Entry(name, TensorKind.CONSTANT, self._on_device(name, tensor)))

    def __getitem__(self, name: str) -> Tensor:
        return self.entry(name).tensor

    def entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise ContractError(f"tensor {name!r} is not registered", tensor=name)
        return self._entries[name]

    def entries(self) -> Iterable[Entry]:
        return self._entries.values()

    def freeze(self) -> None:
        """Allow no further tensors, as graphs are recorded from now on."""
        self._frozen = True

    def begin_step(self) -> None:
        """Begin a step: every published tensor must be published again before the next replay."""
        self.step += 1

    def publish(self, name: str, values: Sequence[int]) -> None:
        """Write values, then the pad value up to the end of the buffer, not only of the size."""
        entry = self.entry(name)
        if entry.kind is not TensorKind.PUBLISHED or entry.pad is None:
            raise ContractError(
                f"{entry.kind.value} tensor {name!r} cannot be published", tensor=name
            )
        capacity = entry.tensor.shape[0]
        if len(values) > capacity:
            raise ContractError(
                f"published tensor {name!r}: {len(values)} values for {capacity}", tensor=name
            )
        self._rings[name].upload(values, entry.pad)
        self._stamps[name] = self.step

    def published_values(self, name: str) -> list[int]:
        """Return the expected contents: the last published values, padded to the end."""
        entry = self.entry(name)
        assert entry.pad is not None
        values = self._rings[name].uploaded
        return [*values, *[entry.pad] * (entry.tensor.shape[0] - len(values))]

    def reupload_published(self) -> None:
        """Upload all published tensors at the next step even if nothing changed, because other code
        wrote to them."""
        for ring in self._rings.values():
            ring.forget()

    def check_stamps(self, names: Iterable[str]) -> None:
        for name in names:
            if self._stamps.get(name) != self.step:
                raise ContractError(
                    f"published tensor {name!r} was not published in step {self.step}: "
                    "every replay needs its published tensors written in the same step",
                    tensor=name,
                )

    def fingerprints(self) -> tuple[Fingerprint, ...]:
        return tuple([fingerprint(entry.tensor) for entry in self._entries.values()])

    def check_fingerprints(self, recorded: tuple[Fingerprint, ...]) -> None:
        """Compare fingerprints, which are taken once per step, however many recordings it
        replays."""
        step, current = self._latest
        if step != self.step:
            current = self.fingerprints()
            self._latest = self.step, current
        if current != recorded:
            self._name_the_change(recorded, current)

    def _name_the_change(
        self, recorded: tuple[Fingerprint, ...], current: tuple[Fingerprint, ...]
    ) -> None:
        aspects = ("address", "shape", "stride", "dtype")
        for entry, was, now in zip(self._entries.values(), recorded, current, strict=True):
            for aspect, old, new in zip(aspects, was, now, strict=True):
                if old != new:
                    raise ContractError(
                        f"{entry.kind.value} tensor {entry.name!r}: its {aspect} was {old} when "
                        f"recorded and is {new} now; a registered tensor is never replaced",
                        tensor=entry.name,
                    )

    def _on_device(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.device.type != self.device.type:
            raise ContractError(
                f"tensor {name!r} is on {tensor.device}, graphs run on {self.device}",
                tensor=name,
            )
        return tensor

    def _add(self, entry: Entry) -> Tensor:
        if self._frozen:
            raise ContractError(
                f"tensor {entry.name!r}: registered after the first recording", tensor=entry.name
            )
        if entry.name in self._entries:
            raise ContractError(f"tensor {entry.name!r} is registered twice", tensor=entry.name)
        self._entries[entry.name] = entry
        return entry.tensor
