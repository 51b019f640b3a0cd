"""EAGLE heads: one layer that guesses from the target's hidden states, and then from its own.

Location i of its KV holds a pair: the token at i + 1 and the target's hidden state at i, so it
guesses the token at i + 2. Where no hidden state of the target is there yet it takes its own.
EAGLE-1 and -2 are one kind of head (the last hidden state, joined with the embedding by `fc`);
EAGLE-3 is the other (states of three layers, joined by `fc`, each side under a norm). The embedding
is the target's, and the vocabulary head too unless a checkpoint brings its own.

The last location of a prefix that was found in the cache holds the pair of whoever computed it: its
token may be another one. The guesses that follow may be a little worse.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slotzero.errors import CorruptCheckpointError, UnsupportedModelError
from slotzero.graph import Pieces, Registry
from slotzero.kernels.contract import Branches, Heads, Kernels, Normed, Rows, Tokens, standing
from slotzero.loading.checkpoint import Checkpoint
from slotzero.models.config import KvGroup, ModelConfig
from slotzero.models.decoder import LAYER_WEIGHTS, Kind, KvPages
from slotzero.models.rope import frequencies, parse_rope
from slotzero.models.weights import DecoderWeights
from slotzero.pools.tables import SlotTables
from slotzero.runners.passes import Followed
from slotzero.speculative.drafter import Guess, Guesser

GROUP = "draft"
HIDDEN = "draft_hidden"
ARCHITECTURES = (  # which kind of head it is, its weights tell
    "LlamaForCausalLMEagle",
    "EagleLlamaForCausalLM",
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLM",
)


@dataclass(frozen=True)
class EagleConfig:
    is_third: bool
    taps: tuple[int, ...]
    group: KvGroup
    hidden_size: int
    intermediate_size: int
    norm_eps: float
    vocab_size: int  # of the target
    draft_vocab: int

    def __post_init__(self) -> None:
        if len(set(self.taps)) < len(self.taps):  # of equal ones, all but the last are not written
            raise UnsupportedModelError(f"a head that sees layers {self.taps}: they must differ")


def parse_eagle(checkpoint: Checkpoint, target: ModelConfig, wanted: str) -> EagleConfig:
    """`wanted` is eagle or eagle3."""
    config, name, names = checkpoint.config, checkpoint.name, _plain_names(checkpoint)
    architecture = (config.get("architectures") or [""])[0]
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{name}: {architecture!r} is no EAGLE head; known: {', '.join(ARCHITECTURES)}"
        )
    is_third = "midlayer.hidden_norm.weight" in names
    if is_third != (wanted == "eagle3"):
        other = "eagle3" if is_third else "eagle"
        raise UnsupportedModelError(
            f"{name} is an {other} head: say --speculative {other}, not {wanted}"
        )
    _fits(config, "hidden_size", target.hidden_size, name)
    _fits(config, "vocab_size", target.vocab_size, name)
    if int(config.get("num_hidden_layers", 1)) != 1:
        raise UnsupportedModelError(
            f"{name}: num_hidden_layers={config['num_hidden_layers']}: a head has one layer"
        )
    num_heads = int(config.get("num_attention_heads", 0))
    kv_heads = int(config.get("num_key_value_heads") or num_heads)
    if num_heads < 1 or num_heads % kv_heads:
        raise UnsupportedModelError(
            f"{name}: num_attention_heads={num_heads} is no multiple of {kv_heads} KV heads"
        )
    head_dim = int(config.get("head_dim") or target.hidden_size // num_heads)
    eps = float(config.get("rms_norm_eps", 1e-6))
    heads = Heads(num_heads, kv_heads, head_dim, head_dim, eps, head_dim**-0.5)
    max_position = int(config.get("max_position_embeddings") or target.max_position)
    rope = parse_rope({"rope_theta": 10000.0, **config}, head_dim, max_position)
    if rope.depends_on_prompt:
        raise UnsupportedModelError(f"{name}: a head with {rope.kind} rope is not implemented")
    return EagleConfig(
        is_third=is_third,
        taps=_taps(config, target, name) if is_third else (target.num_layers,),
        group=KvGroup(GROUP, (0,), heads, rope, False),
        hidden_size=target.hidden_size,
        intermediate_size=int(config["intermediate_size"]),
        norm_eps=eps,
        vocab_size=target.vocab_size,
        draft_vocab=int(config.get("draft_vocab_size") or target.vocab_size),
    )


def random_eagle(target: ModelConfig, wanted: str) -> EagleConfig:
    """A head in the target's own shape, for models whose weights are random too."""
    heads = replace(target.groups[0].heads, window=None, softcap=None, norms_whole=False)
    heads = replace(heads, value_dim=heads.head_dim, scale=heads.head_dim**-0.5)
    rope = parse_rope({"rope_theta": 10000.0}, heads.head_dim, target.max_position)
    num = target.num_layers
    taps = (0, num // 2, num) if wanted == "eagle3" else (num,)
    return EagleConfig(
        is_third=wanted == "eagle3",
        taps=taps,
        group=KvGroup(GROUP, (0,), heads, rope, False),
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        norm_eps=target.norm_eps,
        vocab_size=target.vocab_size,
        draft_vocab=target.vocab_size,
    )


def _fits(config: Mapping[str, Any], field: str, value: int, name: str) -> None:
    if config.get(field, value) != value:
        raise UnsupportedModelError(
            f"{name}: its {field} is {config[field]}, the target's {value}: "
            "it was made for another model"
        )


def _taps(config: Mapping[str, Any], target: ModelConfig, name: str) -> tuple[int, ...]:
    """Where the config does not say, as the field has it: an early, a middle and a late layer."""
    num = target.num_layers
    given = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    taps = tuple(given) if given is not None else (2, num // 2, num - 3)
    if len(taps) != 3 or not all(isinstance(i, int) and 0 <= i < num for i in taps):
        raise UnsupportedModelError(
            f"{name}: eagle_aux_hidden_state_layer_ids={list(taps)}: three layers from 0 to "
            f"{num - 1} of the target are needed"
        )
    return taps


def _as_model(config: EagleConfig, target: ModelConfig) -> ModelConfig:
    """What a layer of it needs to know."""
    return replace(
        target,
        intermediate_size=config.intermediate_size,
        norm_eps=config.norm_eps,
        activation="silu",
        experts=None,
        sparse_layers=(),
    )


class HeadWeights(NamedTuple):
    fc: Tensor
    fc_bias: Tensor | None
    layer: list[Tensor | None]  # as Kind.run takes them
    embed_norm: Tensor | None
    hidden_norm: Tensor | None
    first_norm: Tensor | None  # of what `fc` made of a pair
    norm: Tensor | None  # before the vocabulary head
    embedding: Tensor
    head: Tensor
    draft_of: Tensor | None  # [vocab] int32: the head's id of each of the target's; -1: it has none


class EagleDrafter(Guesser):
    behind = 1

    def __init__(
        self,
        config: EagleConfig,
        target: ModelConfig,
        weights: HeadWeights,
        kernels: Kernels,
        registry: Registry,
        tables: SlotTables,
        pending: Tensor,
        kv: KvPages,
    ) -> None:
        super().__init__(kernels, tables, pending)
        self.name = "eagle3" if config.is_third else "eagle"
        self.groups, self.taps = (config.group,), config.taps
        self._config, self._weights, self._kv = config, weights, kv
        self._kind = Kind(_as_model(config, target), config.group, None, kernels)
        speed = frequencies(config.group.rope).to(registry.device)
        self._frequency = registry.constant(f"rope_{GROUP}", speed)
        rows = len(tables["length"])
        shape = rows, config.hidden_size
        hidden = torch.zeros(shape, dtype=weights.fc.dtype, device=registry.device)
        self._hidden = registry.table(HIDDEN, hidden)

    def extend(self, followed: Followed, pieces: Pieces) -> None:
        super().extend(followed, pieces)
        weights, hidden = self._weights, followed.features
        if self._config.is_third:
            hidden = self._product(hidden, weights.fc, weights.fc_bias)
        hidden, _ = self._forward(followed.tokens, hidden, pieces, followed.rows)
        self.kernels.keep_last(followed.rows.slots, followed.last, hidden, self._hidden)

    def first(self, tokens: Tokens, pieces: Pieces) -> Guess:
        """The newest pair was computed by `extend`."""
        hidden = self.kernels.fetch(tokens.slots, self._hidden[:, None])
        normed = self.kernels.norm(hidden, self._weights.norm, self._config.norm_eps)
        return Guess(hidden, self._logits(normed, tokens.slots))

    def next(
        self,
        tokens: Tokens,
        state: Tensor | None,
        pieces: Pieces,
        rows: Rows | None = None,
        branches: Branches | None = None,
    ) -> Guess:
        assert state is not None
        hidden, normed = self._forward(tokens, state, pieces, rows, branches)
        return Guess(hidden, self._logits(normed, tokens.slots))

    def _forward(
        self,
        tokens: Tokens,
        hidden: Tensor,
        pieces: Pieces,
        rows: Rows | None,
        branches: Branches | None = None,
    ) -> tuple[Tensor, Normed]:
        """Pairs of the token after each of these and a hidden state [T, hidden] -> hidden states,
        and they under the last norm"""
        config, weights, kernels = self._config, self._weights, self.kernels
        eps, rope = config.norm_eps, config.group.rope
        after = self.tables["tokens"][:, 1:]  # by the position of the token before
        x = kernels.open_pair(
            tokens, after, weights.embedding, weights.embed_norm, hidden, weights.hidden_norm, eps
        )
        normed = Normed(x, None)
        if not config.is_third:
            hidden = self._product(x, weights.fc, weights.fc_bias)
            normed = kernels.norm(hidden, weights.first_norm, eps)
        angles = kernels.turn(standing(tokens, branches), self._frequency, rope.attention_factor)
        plan = kernels.plan(tokens, rows, config.group.heads, branches)
        hidden, *parts = pieces(
            self._kind.run, hidden, *normed, tokens.slots, *angles,
            self._kv.pages[0], self._kv.page_table, *weights.layer, weights.norm, *plan,
        )  # fmt: skip
        return hidden, Normed(*parts)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        config = self._config
        return self.kernels.linear(
            Normed(x, None), config.norm_eps, weight, bias, config.hidden_size
        )

    def _logits(self, normed: Normed, slots: Tensor) -> Tensor:
        config, weights = self._config, self._weights
        few = normed.x.new_empty(len(slots), config.draft_vocab)
        self.kernels.logits(normed, config.norm_eps, weights.head, slots, None, few)
        return few if weights.draft_of is None else self.kernels.spread(few, weights.draft_of)


class _Reader:
    """Weights of a head, from a checkpoint or at random, into registered constants."""

    def __init__(
        self,
        checkpoint: Checkpoint | None,
        registry: Registry,
        kernels: Kernels,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        self._checkpoint, self._registry, self._kernels = checkpoint, registry, kernels
        self._dtype = dtype
        self._generator = torch.Generator(registry.device).manual_seed(seed)
        self._stored = {} if checkpoint is None else _plain_names(checkpoint)
        self._read: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self._stored

    def matrix(self, name: str, columns: int, **sources: int) -> Tensor:
        """Of so many rows of each source, in order."""
        parts = [self._tensor(source, (rows, columns)) for source, rows in sources.items()]
        return self._keep(name, self._kernels.pack(torch.cat(parts)))

    def vector(self, name: str, source: str, size: int, *, optional: bool = False) -> Tensor | None:
        if optional and not self.has(source):
            return None
        return self._keep(name, self._tensor(source, (size,)))

    def ids(self, size: int, vocab: int) -> Tensor:
        """[size]: the target's id of each of the head's; `d2t` is what is to be added."""
        assert self._checkpoint is not None
        stored = self._checkpoint.read(self._take("d2t")).long()
        ids = stored + torch.arange(len(stored))
        if len(ids) != size or ids.min() < 0 or ids.max() >= vocab:
            raise CorruptCheckpointError(
                f"{self._checkpoint.name}: d2t does not name {size} of {vocab} tokens"
            )
        return ids

    def draft_of(self, ids: Tensor, vocab: int) -> Tensor:
        """The inverse of `ids`"""
        drafts = torch.full((vocab,), -1, dtype=torch.int32)
        drafts[ids] = torch.arange(len(ids), dtype=torch.int32)
        return self._keep("draft_of", drafts.to(self._registry.device))

    def refuse_rest(self, ignored: frozenset[str]) -> None:
        rest = sorted(self._stored.keys() - self._read - ignored)
        if rest and self._checkpoint is not None:
            raise UnsupportedModelError(
                f"{self._checkpoint.name}: tensor {rest[0]} is not part of an EAGLE head as we "
                f"know it ({len(rest)} such)"
            )

    def _keep(self, name: str, tensor: Tensor) -> Tensor:
        return self._registry.constant(f"weight.{GROUP}.{name}", tensor.contiguous())

    def _tensor(self, source: str, shape: tuple[int, ...]) -> Tensor:
        device = self._registry.device
        if self._checkpoint is None:
            if len(shape) == 1:
                return torch.ones(shape, dtype=self._dtype, device=device)
            drawn = torch.empty(shape, dtype=self._dtype, device=device)
            return drawn.normal_(0, 0.05, generator=self._generator)
        tensor = self._checkpoint.read(self._take(source))
        if tuple(tensor.shape) != shape:
            raise CorruptCheckpointError(
                f"{self._checkpoint.name}: tensor {source} has shape {list(tensor.shape)}, "
                f"its config asks for {list(shape)}"
            )
        return tensor.to(device).to(self._dtype)

    def _take(self, source: str) -> str:
        assert self._checkpoint is not None
        if source not in self._stored:
            raise CorruptCheckpointError(f"{self._checkpoint.name}: tensor {source} is missing")
        self._read.add(source)
        return self._stored[source]


def _plain_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Without what some exporters put before -> as stored"""
    return {name.removeprefix("model."): name for name in checkpoint.names()}


def load_head(
    config: EagleConfig,
    checkpoint: Checkpoint | None,  # None: random
    target: DecoderWeights,
    registry: Registry,
    kernels: Kernels,
    dtype: torch.dtype,
    seed: int,
) -> HeadWeights:
    read = _Reader(checkpoint, registry, kernels, dtype, seed)
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.group.heads
    third = config.is_third
    at = "midlayer" if third else "layers.0"
    q, k, v = heads.sizes
    layer: dict[str, Tensor | None] = dict.fromkeys(LAYER_WEIGHTS)
    qkv = {f"{at}.self_attn.{n}_proj.weight": s for n, s in (("q", q), ("k", k), ("v", v))}
    gate_up = {f"{at}.mlp.{n}_proj.weight": inner for n in ("gate", "up")}
    layer["qkv"] = read.matrix("qkv", 2 * hidden if third else hidden, **qkv)
    layer["out"] = read.matrix("out", heads.out_size, **{f"{at}.self_attn.o_proj.weight": hidden})
    layer["mlp_norm"] = read.vector("mlp_norm", f"{at}.post_attention_layernorm.weight", hidden)
    layer["gate_up"] = read.matrix("gate_up", hidden, **gate_up)
    layer["down"] = read.matrix("down", inner, **{f"{at}.mlp.down_proj.weight": hidden})
    first_norm = f"{at}.input_layernorm.weight"
    head, ids, draft_of = target.head, None, None
    if config.draft_vocab != config.vocab_size:
        ids = read.ids(config.draft_vocab, config.vocab_size)
        draft_of = read.draft_of(ids, config.vocab_size)
    if read.has("lm_head.weight"):
        head = read.matrix("head", hidden, **{"lm_head.weight": config.draft_vocab})
    elif ids is not None:
        rows = kernels.embedded(ids.to(registry.device), target.head)
        head = registry.constant(f"weight.{GROUP}.head", kernels.pack(rows).contiguous())
    weights = HeadWeights(
        fc=read.matrix("fc", (len(config.taps) if third else 2) * hidden, **{"fc.weight": hidden}),
        fc_bias=read.vector("fc_bias", "fc.bias", hidden, optional=True),
        layer=list(layer.values()),
        embed_norm=read.vector("embed_norm", first_norm, hidden) if third else None,
        hidden_norm=read.vector("hidden_norm", f"{at}.hidden_norm.weight", hidden)
        if third
        else None,
        first_norm=None if third else read.vector("first_norm", first_norm, hidden, optional=True),
        norm=read.vector("norm", "norm.weight", hidden) if third else None,
        embedding=target.embedding,
        head=head,
        draft_of=draft_of,
    )
    # a head's embedding is a copy of the target's, and t2d says what d2t does
    read.refuse_rest(frozenset({"embed_tokens.weight", "t2d"}))
    return weights
