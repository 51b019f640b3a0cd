"""How a prompt becomes one vector: which hidden states, and what is done with them afterwards.

A folder of sentence-transformers says it in modules.json, and in the config.json of each module; a
setting of the engine overrides which hidden states. For a reranker that answers in words, the
vector has the logits of two tokens. This module does not know requests or runners.

The rule: a module or a way of pooling that is not implemented is refused by name when a vector is
requested; the model can still generate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from slotzero.errors import ConfigError, RequestError, SlotzeroError
from slotzero.models.checkpoint import Checkpoint

Vector = NDArray[np.float32]
Kind = Literal["last", "mean", "labels"]
AUTO = "auto"
NUM_LABELS = 2
_MODES: Mapping[str, Kind] = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
_MODE = "pooling_mode"


@dataclass(frozen=True)
class Pooling:
    """How an engine turns a prompt into one vector."""

    kind: Kind = "last"
    """The hidden state of the last token under the final norm, the mean of all of them, or the
    logits of `labels` after the last token."""
    size: int = 0
    """Length of the vector."""
    normalize: bool = True
    """Whether embeddings are divided by their length, if the request does not say."""
    is_matryoshka: bool = False
    """Whether the beginning of an embedding is an embedding too."""
    matryoshka_dimensions: tuple[int, ...] = ()
    """The lengths that a request may ask for; empty: any."""
    labels: tuple[int, ...] = ()
    """Two tokens: the answers "no" and "yes"."""
    refusal: str = ""
    """Why there are no vectors."""
    is_expected: bool = False
    """Whether the model is for vectors, so that they are prepared at start-up."""

    def check_embeds(self) -> None:
        """Raise RequestError if there are no embeddings."""
        if self.kind == "labels":
            raise RequestError(
                "this engine scores pairs of texts and has no embeddings: start another one "
                "without --score-tokens"
            )
        if self.refusal:
            raise RequestError(self.refusal)

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raise RequestError unless embeddings may have this length."""
        if dimensions is None:
            return
        if not self.is_matryoshka:
            raise RequestError(
                "dimensions: by its config.json, this model was not trained for shorter embeddings "
                '(Matryoshka); leave it out, or set "is_matryoshka": true there',
                "dimensions",
            )
        if self.matryoshka_dimensions and dimensions not in self.matryoshka_dimensions:
            known = ", ".join(map(str, self.matryoshka_dimensions))
            raise RequestError(f"dimensions: {dimensions} is not one of {known}", "dimensions")
        if not 1 <= dimensions <= self.size:
            raise RequestError(
                f"dimensions: {dimensions} is not between 1 and {self.size}", "dimensions"
            )

    def embedding(
        self, vector: Vector, dimensions: int | None = None, normalize: bool | None = None
    ) -> Vector:
        """Return the embedding of a prompt with this vector, after `check_dimensions`."""
        vector = _finite(vector)[:dimensions]
        if not (self.normalize if normalize is None else normalize):
            return vector
        norm = float(np.linalg.norm(vector.astype(np.float64)))
        return vector / np.float32(max(norm, 1e-12))

    def probability(self, logits: Vector) -> float:
        """Return the probability of the second label, if the answer is one of the two."""
        no, yes = _finite(logits).astype(np.float64).tolist()
        return float(1 / (1 + np.exp(np.clip(no - yes, -700, 700))))


def similarity(a: Vector, b: Vector) -> float:
    """Return the cosine of the angle between two embeddings."""
    one, other = a.astype(np.float64), b.astype(np.float64)
    product = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / max(product, 1e-12)


def read_pooling(
    checkpoint: Checkpoint, size: int, wanted: str, score_tokens: str | None
) -> Pooling:
    """Return how this checkpoint's vectors are made. `size`: of a hidden state; `wanted`: last or
    mean, or auto for what the checkpoint says; `score_tokens`: two tokens, as in "no,yes"."""
    if score_tokens is not None:
        if not checkpoint.has_head:
            raise ConfigError(f"score_tokens={score_tokens!r}: the checkpoint has no lm_head")
        labels = _labels(checkpoint, score_tokens)
        return Pooling("labels", NUM_LABELS, labels=labels, is_expected=True)
    config = checkpoint.config
    dimensions = config.get("matryoshka_dimensions")
    made = replace(
        _of_modules(checkpoint.modules(), wanted),
        size=size,
        is_matryoshka=bool(config.get("is_matryoshka")) or dimensions is not None,
        matryoshka_dimensions=tuple(dimensions or ()),
    )
    if wanted == AUTO:
        return made
    return replace(made, kind="mean" if wanted == "mean" else "last", is_expected=True)


def _of_modules(modules: Sequence[tuple[str, Mapping[str, Any]]], wanted: str) -> Pooling:
    """Return what the modules of sentence-transformers say; without any, the last token is taken,
    as in vLLM."""
    if not modules:
        return Pooling()
    made = Pooling(normalize=False, is_expected=True)
    for kind, config in modules:
        match kind.rpartition(".")[2]:
            case "Transformer":
                continue
            case "Pooling":
                made = _of_modes(made, config, wanted)
            case "Normalize":
                made = replace(made, normalize=True)
            case other:
                refusal = f"embeddings: the module {other} in modules.json is not supported"
                made = replace(made, refusal=refusal)
    return made


def _of_modes(made: Pooling, config: Mapping[str, Any], wanted: str) -> Pooling:
    """Return a way of pooling with the mode that the config of a Pooling module says."""
    modes = {name for name, value in config.items() if name.startswith(_MODE) and value is True}
    if isinstance(mode := config.get(_MODE), str):  # newer folders have one field
        modes = {f"{_MODE}_{mode}", f"{_MODE}_{mode}_tokens"} & _MODES.keys() or {mode}
    kinds = {_MODES.get(mode) for mode in modes}
    if len(kinds) == 1 and (kind := kinds.pop()) is not None:
        return replace(made, kind=kind)
    if wanted != AUTO:
        return made
    shown = " and ".join(sorted(modes)) or "none"
    return replace(
        made,
        refusal=f"embeddings: this checkpoint's way of pooling ({shown}) is not supported; choose "
        "one with --pooling last or mean",
    )


def _labels(checkpoint: Checkpoint, score_tokens: str) -> tuple[int, ...]:
    texts = score_tokens.split(",")
    if len(texts) != NUM_LABELS:
        raise ConfigError(f"score_tokens={score_tokens!r}: give two tokens, such as no,yes")
    tokenizer = checkpoint.tokenizer()
    labels = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise ConfigError(
                f"score_tokens={score_tokens!r}: {text!r} is {len(ids)} tokens of this model, and "
                "must be one"
            )
        labels += ids
    if labels[0] == labels[1]:
        raise ConfigError(f"score_tokens={score_tokens!r}: give two different tokens")
    return tuple(labels)


def _finite(vector: Vector) -> Vector:
    if not np.isfinite(vector).all():
        raise SlotzeroError("the model computed a vector that is not finite")
    return vector
