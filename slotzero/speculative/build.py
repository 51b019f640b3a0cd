"""Construction of the drafter that the settings ask for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from slotzero.checkpoint.folder import FolderCheckpoint
from slotzero.checkpoint.source import open_checkpoint
from slotzero.config import DEFAULT_MODEL, EngineConfig
from slotzero.distributed.ranks import Ranks
from slotzero.errors import ConfigError, TokenizerMissingError, UnsupportedModelError
from slotzero.graph import Registry
from slotzero.kernels.contract import Kernels
from slotzero.kernels.types import PagedKv
from slotzero.models.blocks.attention import Attention, KvGroup
from slotzero.models.blocks.block import BlockContext
from slotzero.models.blocks.dense_mlp import DenseMlp
from slotzero.models.cache_scales import read_cache_scales, read_mtp_scales
from slotzero.models.checkpoint import Checkpoint
from slotzero.models.config import ModelConfig, with_group
from slotzero.models.decoder import Decoder
from slotzero.models.families.family import parse_config
from slotzero.models.families.gemma4_assistant import MODEL_TYPE
from slotzero.models.layer import DecoderLayer, LayerForward, LayerNorms
from slotzero.models.model import Model, ModelShape
from slotzero.models.rope import frequencies
from slotzero.models.routing import EXPERT_STARTS, Routing
from slotzero.models.vocabulary import Vocabulary
from slotzero.models.weight_store import WeightStore
from slotzero.models.weights import Progress, load_weights, random_weights
from slotzero.pools.tables import SlotTables
from slotzero.speculative.assistant import AssistantDrafter, fit_assistant, load_assistant
from slotzero.speculative.drafter import FEATURES, MOST_PENDING, Drafter
from slotzero.speculative.eagle import EagleDrafter
from slotzero.speculative.eagle_config import GROUP, EagleConfig, parse_eagle, random_eagle
from slotzero.speculative.eagle_weights import load_head
from slotzero.speculative.model import ModelDrafter
from slotzero.speculative.mtp import load_mtp, mtp_config
from slotzero.speculative.ngram import NgramDrafter

PACKAGED_HEAD = Path(__file__).parent / "heads" / DEFAULT_MODEL

Make = Callable[[SlotTables, Tensor, Mapping[str, PagedKv]], Drafter]


@dataclass(frozen=True)
class Prepared:
    """A drafter whose weights are loaded; `drafter` builds it once its KV and the tables exist."""

    groups: tuple[KvGroup, ...]
    taps: tuple[int, ...]
    make: Make
    shares_prefixes: bool = True
    """Whether cached prefixes can be shared. Not with several layers that take turns: those after
    the first also compute positions before the end of a prefix."""
    read_cache_scales: Callable[[], Mapping[str, Tensor]] = dict
    """Reads the scales of an FP8 KV cache that the checkpoint has, by group."""

    def drafter(
        self,
        decoder: Model,
        registry: Registry,
        tables: SlotTables,
        kv: Mapping[str, PagedKv],
        max_width: int,  # tokens of a row that are verified at once
    ) -> Drafter:
        like, most = decoder.new_hidden(0, len(self.taps)), max(max_width, MOST_PENDING)
        pending = like.new_zeros(tables.num_slots + 1, most, like.shape[1])
        return self.make(tables, registry.table(FEATURES, pending), kv)


@dataclass(frozen=True)
class DraftTarget:
    """The target model, for which tokens are drafted."""

    config: ModelShape  # of the whole model, not of this rank's part
    decoder: Model
    routing: Routing | None
    checkpoint: Checkpoint
    store: WeightStore
    float8_kv: bool
    progress: Progress
    ranks: Ranks
    drafter: str
    """Name of the drafter that the settings ask for."""

    @property
    def family(self) -> ModelConfig:
        """The config, for drafters that need to know the target's layers."""
        if not isinstance(self.config, ModelConfig):
            raise ConfigError(
                f"speculative={self.drafter}: this drafter needs a target with layers of this "
                "package, not of transformers; use --speculative ngram or draft"
            )
        return self.config

    @property
    def kernels(self) -> Kernels:
        return self.store.kernels

    @property
    def vocabulary(self) -> Vocabulary:
        assert isinstance(self.decoder, Decoder)
        return self.decoder.vocabulary


def prepare_drafter(settings: EngineConfig, target: DraftTarget) -> Prepared:
    _refuse_short_windows(settings, target.config, target.checkpoint)
    if target.config.recurrent is not None and settings.tree is not None:
        raise UnsupportedModelError(
            f"{target.checkpoint.name}: draft trees are not supported with recurrent layers; use "
            "--speculative-topk 1"
        )
    if settings.speculative == "ngram":
        if settings.speculative_model is not None:
            raise ConfigError("speculative_model: an ngram drafter has no model; drop it")
        return Prepared(
            (), (), lambda tables, pending, kv: NgramDrafter(target.kernels, tables, pending)
        )
    if settings.speculative == "draft":
        return _draft_model(settings, target)
    if settings.speculative == "mtp":
        return _mtp(settings, target)
    return _eagle(settings, target)


def _mtp(settings: EngineConfig, target: DraftTarget) -> Prepared:
    model, num = target.checkpoint.name, target.family.num_mtp_layers
    name = settings.speculative_model
    if name is not None and not num:
        return _assistant(name, settings.load_format, target)
    if name not in (None, settings.model):
        raise ConfigError(f"speculative_model={name}: {model} has its own MTP layers; drop it")
    if not num:
        raise UnsupportedModelError(
            f"speculative=mtp: {model} has no MTP layers (its config has no "
            "num_nextn_predict_layers); name its assistant with --speculative-model, if it has "
            "one, or use another --speculative"
        )
    if num > 1 and settings.tree is not None:
        raise UnsupportedModelError(
            f"speculative_topk: draft trees are not supported with the {num} MTP layers of "
            f"{model}; use --speculative-topk 1"
        )
    if num > 1 and settings.speculative_steps > num:
        raise ConfigError(
            f"speculative_steps={settings.speculative_steps}: {model} has {num} MTP layers, which "
            f"draft one token each; use --speculative-steps {num}"
        )
    registry, kernels = target.store.registry, target.kernels
    layers = load_mtp(target.family, target.vocabulary, target.checkpoint, target.store)
    mine = target.family.shard(target.ranks)
    config = mtp_config(mine)
    assert mine.mtp is not None
    bound = with_group(mine.mtp.layer, lambda group: config.group)
    layer = LayerForward(bound, BlockContext(kernels, target.ranks))
    routing = None if bound.moe is None else target.routing
    return Prepared(
        (config.group,),
        config.taps,
        lambda tables, pending, kv: EagleDrafter(
            "mtp", config, layer, layers, routing, kernels, registry, tables, pending, kv[GROUP]
        ),
        shares_prefixes=num == 1,
        read_cache_scales=lambda: {GROUP: read_mtp_scales(target.family, target.checkpoint)},
    )


def _assistant(name: str, load_format: str, target: DraftTarget) -> Prepared:
    checkpoint = open_checkpoint(name, load_format, is_model=False)
    registry, kernels = target.store.registry, target.kernels
    config = fit_assistant(checkpoint, target.family)
    for group in config.model.groups:
        kernels.refuse(group.reader_heads, target.float8_kv)
    weights = load_assistant(
        config, target.family, checkpoint, target.store.apart(), target.progress, target.ranks
    )
    vocabulary = target.vocabulary
    return Prepared(
        (),
        (target.family.num_layers,),
        lambda tables, pending, kv: AssistantDrafter(
            config, target.family, vocabulary, weights, kernels, registry, tables, pending, kv
        ),
    )


def _eagle(settings: EngineConfig, target: DraftTarget) -> Prepared:
    wanted = settings.speculative
    assert wanted is not None
    checkpoint = _open_head(settings)
    if checkpoint is None:
        config = random_eagle(target.family, wanted)
    else:
        config = parse_eagle(checkpoint, target.family, wanted)
    registry, kernels = target.store.registry, target.kernels
    kernels.refuse(config.group.heads, target.float8_kv)
    weights = load_head(config, checkpoint, target.vocabulary, target.store, settings.weights_seed)
    layer = LayerForward(_head_layer(config), BlockContext(kernels))
    return Prepared(
        (config.group,),
        config.taps,
        lambda tables, pending, kv: EagleDrafter(
            wanted, config, layer, [weights], None, kernels, registry, tables, pending, kv[GROUP]
        ),
    )


def _head_layer(config: EagleConfig) -> DecoderLayer:
    hidden = config.hidden_size
    in_features = 2 * hidden if config.is_third else hidden
    return DecoderLayer(
        LayerNorms(hidden, config.norm_eps),
        Attention(config.group, hidden, in_features=in_features),
        DenseMlp(hidden, config.intermediate_size, "silu"),
    )


def _open_head(settings: EngineConfig) -> Checkpoint | None:
    """Return the head's checkpoint, or None for a random head of a random model. A packaged head's
    name has precedence over a path."""
    name, wanted = settings.speculative_model, settings.speculative
    if name is None:
        if settings.load_format == "dummy" or settings.model.startswith("tiny:"):
            return None
        if settings.model != DEFAULT_MODEL or wanted != "eagle3":
            raise ConfigError(
                f"speculative={wanted}: there is no packaged head for {settings.model}; name one "
                "with --speculative-model, or train an eagle3 head with slotzero train-eagle"
            )
        name = DEFAULT_MODEL
    if name == DEFAULT_MODEL:
        return FolderCheckpoint(PACKAGED_HEAD)
    return open_checkpoint(name, "auto", is_model=False)


def _draft_model(settings: EngineConfig, target: DraftTarget) -> Prepared:
    if settings.speculative_model is None:
        raise ConfigError("speculative=draft: name the draft model with --speculative-model")
    checkpoint = open_checkpoint(settings.speculative_model, settings.load_format, is_model=False)
    if checkpoint.config.get("model_type") == MODEL_TYPE:
        raise ConfigError(
            f"speculative=draft: {checkpoint.name} is an assistant, which reads its target's KV; "
            "use --speculative mtp"
        )
    config = parse_config(checkpoint.config)
    if config.recurrent is not None:
        raise UnsupportedModelError(
            f"draft model {checkpoint.name} has recurrent layers, whose states would have to be "
            "rolled back after every rejected draft: choose a model with attention layers only, or "
            "another --speculative"
        )
    _require_same_tokens(config, checkpoint, target)
    _refuse_short_windows(settings, config, checkpoint)
    registry, kernels = target.store.registry, target.kernels
    config = config.with_groups(lambda group: replace(group, name=f"{GROUP}_{group.name}"))
    groups = config.groups
    for group in groups:
        for heads in group.shapes:
            kernels.refuse(heads, target.float8_kv)
        if group.rope.depends_on_prompt:
            raise UnsupportedModelError(
                f"{checkpoint.name}: a draft model with {group.rope.kind} rope scaling is not "
                "implemented"
            )
    if settings.load_format == "dummy":
        weights = random_weights(
            config, target.store.apart(), settings.weights_seed + 1, f"{GROUP}.", target.ranks
        )
    else:
        weights = load_weights(
            config, checkpoint, target.store.apart(), target.progress, f"{GROUP}.",
            ranks=target.ranks,
        )  # fmt: skip
    turns = {
        g.name: registry.constant(f"rope_{g.name}", frequencies(g.rope).to(registry.device))
        for g in groups
    }
    mine = config.shard(target.ranks)
    routing = Routing.of(mine, registry, f"{EXPERT_STARTS}_{GROUP}")
    decoder = Decoder(mine, weights, turns, kernels, routing, target.ranks)
    return Prepared(
        mine.groups,
        (),
        lambda tables, pending, kv: ModelDrafter(
            decoder, kernels, tables, pending, {group.name: kv[group.name] for group in groups}
        ),
        read_cache_scales=lambda: read_cache_scales(config, checkpoint),
    )


def _refuse_short_windows(
    settings: EngineConfig, config: ModelShape, checkpoint: Checkpoint
) -> None:
    """Refuse trees that are deeper than a sliding window, and those in chunks, which may end within
    a tree: what a token sees of its branch does not depend on the layer."""
    if settings.tree is not None and any(group.heads.is_chunked for group in config.groups):
        raise UnsupportedModelError(
            f"{checkpoint.name}: layers with chunked attention do not support trees; use "
            "--speculative-topk 1"
        )
    for window in (group.heads.window for group in config.groups):
        if settings.tree is not None and window is not None and window <= settings.tree.steps:
            raise UnsupportedModelError(
                f"{checkpoint.name}: layers with a window of {window} do not support trees of "
                f"{settings.tree.steps} steps; lower --speculative-steps, or use "
                "--speculative-topk 1"
            )


def _require_same_tokens(config: ModelConfig, checkpoint: Checkpoint, target: DraftTarget) -> None:
    """Refuse a draft model with another vocabulary. If one of the two has no tokenizer, only the
    vocabulary sizes are compared."""
    remedy = "a draft model needs the target's tokenizer; choose one of the same family"
    if config.vocab_size != target.config.vocab_size:
        raise UnsupportedModelError(
            f"draft model {checkpoint.name} has {config.vocab_size} tokens, the target "
            f"{target.config.vocab_size}: {remedy}"
        )
    try:
        ours, theirs = target.checkpoint.tokenizer(), checkpoint.tokenizer()
    except TokenizerMissingError:
        return
    found = ours.first_difference(theirs, config.vocab_size)
    if found is not None:
        index, wanted, got = found
        raise UnsupportedModelError(
            f"draft model {checkpoint.name}: its token {index} is {_quoted(got)}, the target's "
            f"{_quoted(wanted)}: {remedy}"
        )


def _quoted(text: str | None) -> str:
    return "missing" if text is None else repr(text)
