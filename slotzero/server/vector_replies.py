"""Replies with embeddings and scores, in OpenAI's and vLLM's shapes."""

from typing import Literal

from slotzero.server.replies import CachedTokens, ReplyModel


class VectorUsage(ReplyModel):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class EmbeddingData(ReplyModel):
    index: int
    object: Literal["embedding"]
    embedding: list[float] | str  # in base64: float32, little-endian


class EmbeddingReply(ReplyModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingData]
    usage: VectorUsage


class ScoreData(ReplyModel):
    index: int
    object: Literal["score"]
    score: float


class ScoreReply(ReplyModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreData]
    usage: VectorUsage


class RerankDocument(ReplyModel):
    text: str


class RerankResult(ReplyModel):
    index: int
    document: RerankDocument | None = None
    relevance_score: float


class RerankReply(ReplyModel):
    id: str
    model: str
    usage: VectorUsage
    results: list[RerankResult]
