"""The contract of a model: what runners, memory and checks need to know of any model.

`Decoder` implements it with the blocks of this package, `BridgedModel` (models/bridge) with the
layers of transformers. A model maps tokens, each given as a (slot, position), to hidden states and
those to logits. It does not know requests, scheduling or sampling.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from slotzero.distributed.ranks import Ranks
from slotzero.graph import Pieces
from slotzero.kernels.types import Branches, Experts, Normed, PagedKv, Rows, Tokens
from slotzero.kernels.types_recurrent import Scan, States, Trail
from slotzero.models.blocks.attention import KvGroup
from slotzero.models.blocks.recurrent import RecurrentBlock
from slotzero.quantization.quantization import Quantization

NO_TAPS: Mapping[int, Tensor] = {}


class DecoderBatch(NamedTuple):
    """The tokens of a step."""

    tokens: Tokens
    ids: Tensor  # [slots + 1, max_len], by position
    prompt_len: Tensor  # [slots + 1]
    rows: Rows | None  # None: every row has one token
    branches: Branches | None = None


class RecurrentLayers(NamedTuple):
    """The recurrent layers of a model. Their mixers all have the same config."""

    mixer: RecurrentBlock
    layers: tuple[int, ...]

    def index_of(self, layer: int) -> int:
        return self.layers.index(layer)


class ModelShape(Protocol):
    """What the engine must know of a model before its weights are loaded."""

    @property
    def family(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def max_position(self) -> int: ...
    @property
    def groups(self) -> tuple[KvGroup, ...]: ...
    @property
    def recurrent(self) -> RecurrentLayers | None: ...
    @property
    def experts(self) -> Experts | None: ...
    @property
    def quantization(self) -> Quantization: ...
    def shard(self, ranks: Ranks) -> "ModelShape":
        """Return one rank's part of the model; raise ConfigError if it cannot be split so."""


class Model(ABC):
    writes: tuple[str, ...]
    """Names of the registered tensors that every forward pass writes."""

    @property
    @abstractmethod
    def config(self) -> ModelShape: ...

    @property
    @abstractmethod
    def is_batch_invariant(self) -> bool:
        """Whether a token's results have the same bits in every batch."""

    @abstractmethod
    def forward(
        self,
        batch: DecoderBatch,
        kv: Mapping[str, PagedKv],
        pieces: Pieces,
        taps: Mapping[int, Tensor] = NO_TAPS,
        states: States | None = None,
        trail: Trail | None = None,
    ) -> Normed:
        """Return hidden states [T, hidden] under the final norm.

        The KV of every real token is stored on the way. Recurrent states (stacked by layer) are
        updated in place, or, with a trail, written to the trail only.

        `taps` maps a layer to a buffer [T, hidden] that receives the layer's input. The entry one
        past the last layer receives the hidden states under the final norm.
        """

    @abstractmethod
    def scan_of(self, states: States) -> Scan:
        """Return the scan of the recurrent layers, without snapshots if the states keep none."""

    @abstractmethod
    def new_hidden(self, num_tokens: int, num_states: int) -> Tensor:
        """Allocate `num_states` hidden states per token, side by side."""

    @abstractmethod
    def logits(self, normed: Normed, slots: Tensor, out: Tensor) -> None:
        """Write the logits [rows, vocab] of [rows, hidden] to `out`; rows of slot 0 get zeros."""
