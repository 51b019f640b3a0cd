"""Offline embeddings and scores: parameters and outputs of `LLM.embed` and `LLM.score`.

Names are those of vLLM. This module computes no vector and no score.
"""

from dataclasses import dataclass

from slotzero.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    dimensions: int | None = None
    """Length of the embedding, if the model was trained for several (Matryoshka)."""
    normalize: bool | None = None
    """Whether to divide the embedding by its length; None: as the checkpoint says."""

    def __post_init__(self) -> None:
        if self.dimensions is not None and type(self.dimensions) is not int:
            raise RequestError(
                f"dimensions: must be an integer, got {self.dimensions!r}", "dimensions"
            )
        if self.normalize not in (None, True, False):
            raise RequestError(
                f"normalize: must be true or false, got {self.normalize!r}", "normalize"
            )


@dataclass(frozen=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    num_cached_tokens: int
    weight_version: str = "0"
    finished: bool = True


@dataclass(frozen=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True)
class ScoringRequestOutput:
    request_id: str
    prompt_token_ids: list[int]
    """Tokens of the pair; without --score-tokens those of the first text, then of the second."""
    outputs: ScoringOutput
    num_cached_tokens: int
    weight_version: str = "0"
    finished: bool = True


def pairs(data_1: str | list[str], data_2: str | list[str]) -> list[tuple[int, int]]:
    """Return the pairs of texts to score, as indices into both lists: one text with each of the
    other list, or texts at the same place."""
    num_1, num_2 = (1 if isinstance(data, str) else len(data) for data in (data_1, data_2))
    if not num_1 or not num_2:
        raise RequestError("a list of texts to score is empty: give at least one text")
    if num_1 == 1:
        return [(0, i) for i in range(num_2)]
    if num_1 != num_2:
        raise RequestError(
            f"{num_1} texts cannot be paired with {num_2}: give one, or the same number"
        )
    return [(i, i) for i in range(num_1)]
