"""The weights of an EAGLE head, from a checkpoint or random.

A missing or an unexpected tensor is an error.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slotzero.errors import CorruptCheckpointError, UnsupportedModelError
from slotzero.kernels.types import PairNorms, QkNorms
from slotzero.kernels.weights import DenseWeight, LinearWeight
from slotzero.models.blocks.attention import AttentionWeights
from slotzero.models.blocks.dense_mlp import DenseMlpWeights
from slotzero.models.checkpoint import Checkpoint
from slotzero.models.layer import LayerWeights, NormWeights
from slotzero.models.vocabulary import Vocabulary
from slotzero.models.weight_store import WeightStore
from slotzero.quantization.method import check_plain
from slotzero.speculative.eagle_config import GROUP, EagleConfig, plain_names


class HeadWeights(NamedTuple):
    fc: LinearWeight
    layer: LayerWeights
    norms: PairNorms  # of the two sides of a pair
    first_norm: Tensor | None  # applied to the result of `fc`
    norm: Tensor | None  # before the vocabulary head
    vocabulary: Vocabulary  # the target's
    head: LinearWeight | None  # None: the target's
    draft_of: Tensor | None  # [vocab] int32: the head's id of each target token; -1: it has none


def load_head(
    config: EagleConfig,
    checkpoint: Checkpoint | None,  # None: random
    target: Vocabulary,
    store: WeightStore,
    seed: int,
) -> HeadWeights:
    read = _Reader(checkpoint, store, seed)
    hidden, third, eps = config.hidden_size, config.is_third, config.norm_eps
    prefix = "midlayer" if third else "layers.0"
    first_norm = f"{prefix}.input_layernorm.weight"
    layer = _load_layer(config, read, prefix)
    head, draft_of = _load_vocabulary(config, read, target, store)
    fc_columns = (len(config.taps) if third else 2) * hidden
    fc = read.matrix("fc", fc_columns, **{"fc.weight": hidden})
    norms = PairNorms(None, None, eps)
    if third:
        embed_norm = read.vector("embed_norm", first_norm, hidden)
        hidden_norm = read.vector("hidden_norm", f"{prefix}.hidden_norm.weight", hidden)
        norms = PairNorms(embed_norm, hidden_norm, eps)
    weights = HeadWeights(
        fc=fc._replace(bias=read.vector("fc_bias", "fc.bias", hidden, optional=True)),
        layer=layer,
        norms=norms,
        first_norm=None if third else read.vector("first_norm", first_norm, hidden, optional=True),
        norm=read.vector("norm", "norm.weight", hidden) if third else None,
        vocabulary=target,
        head=head,
        draft_of=draft_of,
    )
    # a head's embedding is a copy of the target's, and t2d repeats what d2t says
    read.refuse_rest(frozenset({"embed_tokens.weight", "t2d"}))
    return weights


def _load_layer(config: EagleConfig, read: "_Reader", prefix: str) -> LayerWeights:
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.group.heads
    qkv_sizes = dict(zip("qkv", heads.sizes, strict=True))
    qkv = {f"{prefix}.self_attn.{n}_proj.weight": size for n, size in qkv_sizes.items()}
    out = {f"{prefix}.self_attn.o_proj.weight": hidden}
    gate_up = {f"{prefix}.mlp.{n}_proj.weight": inner for n in ("gate", "up")}
    down = {f"{prefix}.mlp.down_proj.weight": hidden}
    attention = AttentionWeights(
        read.matrix("qkv", 2 * hidden if config.is_third else hidden, **qkv),
        read.matrix("out", heads.out_size, **out),
        QkNorms(None, None),
    )
    norm = read.vector("mlp_norm", f"{prefix}.post_attention_layernorm.weight", hidden)
    mlp = DenseMlpWeights(
        read.matrix("gate_up", hidden, **gate_up), read.matrix("down", inner, **down)
    )
    return LayerWeights(NormWeights(None, None, norm, None), attention, mlp)


def _load_vocabulary(
    config: EagleConfig,
    read: "_Reader",
    target: Vocabulary,
    store: WeightStore,
) -> tuple[LinearWeight | None, Tensor | None]:
    """Return the head's own vocabulary head, if it has one, and its ids of the target's tokens."""
    ids, draft_of = None, None
    if config.draft_vocab != config.vocab_size:
        ids = read.ids(config.draft_vocab, config.vocab_size)
        draft_of = read.draft_of(ids, config.vocab_size)
    if read.has("lm_head.weight"):
        lm_head = {"lm_head.weight": config.draft_vocab}
        return read.matrix("head", config.hidden_size, **lm_head), draft_of
    if ids is None:
        return None, None
    registry = store.registry
    rows = target.head_of(ids.to(registry.device))
    packed = registry.constant(f"weight.{GROUP}.head", store.kernels.pack(rows).contiguous())
    return DenseWeight(packed, None, config.draft_vocab), draft_of


class _Reader:
    """Reader of a head's weights, which are loaded or drawn into registered constants."""

    def __init__(self, checkpoint: Checkpoint | None, store: WeightStore, seed: int) -> None:
        self._checkpoint, self._store, self._registry = checkpoint, store, store.registry
        self._generator = torch.Generator(store.registry.device).manual_seed(seed)
        self._stored = {} if checkpoint is None else plain_names(checkpoint)
        self._read: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self._stored

    def matrix(self, name: str, columns: int, **sources: int) -> DenseWeight:
        """Join the rows of several sources, given by name and number of rows."""
        parts = [self._tensor(source, (rows, columns)) for source, rows in sources.items()]
        packed = self._keep(name, self._store.kernels.pack(torch.cat(parts)))
        return DenseWeight(packed, None, sum(sources.values()))

    def vector(self, name: str, source: str, size: int, *, optional: bool = False) -> Tensor | None:
        if optional and not self.has(source):
            return None
        return self._keep(name, self._tensor(source, (size,)))

    def ids(self, size: int, vocab: int) -> Tensor:
        """Return [size]: the target's token id of each draft index, which is the index plus d2t."""
        assert self._checkpoint is not None
        stored = self._checkpoint.read(self._take("d2t")).long()
        ids = stored + torch.arange(len(stored))
        if len(ids) != size or ids.min() < 0 or ids.max() >= vocab:
            raise CorruptCheckpointError(
                f"{self._checkpoint.name}: d2t does not name {size} of {vocab} tokens"
            )
        return ids

    def draft_of(self, ids: Tensor, vocab: int) -> Tensor:
        """Return the inverse of `ids`."""
        drafts = torch.full((vocab,), -1, dtype=torch.int32)
        drafts[ids] = torch.arange(len(ids), dtype=torch.int32)
        return self._keep("draft_of", drafts.to(self._registry.device))

    def refuse_rest(self, ignored: frozenset[str]) -> None:
        rest = sorted(self._stored.keys() - self._read - ignored)
        if rest and self._checkpoint is not None:
            raise UnsupportedModelError(
                f"{self._checkpoint.name}: tensor {rest[0]} is not part of a supported EAGLE head "
                f"({len(rest)} such tensors)"
            )

    def _keep(self, name: str, tensor: Tensor) -> Tensor:
        return self._registry.constant(f"weight.{GROUP}.{name}", tensor.contiguous())

    def _tensor(self, source: str, shape: tuple[int, ...]) -> Tensor:
        device, dtype = self._registry.device, self._store.dtype
        if self._checkpoint is None:
            if len(shape) == 1:
                return torch.ones(shape, dtype=dtype, device=device)
            drawn = torch.empty(shape, dtype=dtype, device=device)
            return drawn.normal_(0, 0.05, generator=self._generator)
        tensor = self._checkpoint.read(self._take(source))
        if tuple(tensor.shape) != shape:
            raise CorruptCheckpointError(
                f"{self._checkpoint.name}: tensor {source} has shape {list(tensor.shape)}, "
                f"its config asks for {list(shape)}"
            )
        return check_plain(self._checkpoint.name, source, tensor).to(device).to(dtype)

    def _take(self, source: str) -> str:
        assert self._checkpoint is not None
        if source not in self._stored:
            raise CorruptCheckpointError(f"{self._checkpoint.name}: tensor {source} is missing")
        self._read.add(source)
        return self._stored[source]
