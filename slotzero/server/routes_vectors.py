"""Routes for embeddings, scores and reranking.

They know requests and replies; pooled.py gets the vectors from the engine.
"""

import asyncio
import base64
import time
import uuid
from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from slotzero.models.pooling import Vector
from slotzero.server.app_state import AppState
from slotzero.server.events import unless_gone
from slotzero.server.generation_requests import about
from slotzero.server.pooled import pooled, usage
from slotzero.server.scores import Scores, score_pairs
from slotzero.server.streaming import responses, told
from slotzero.server.vector_inputs import embedding_inputs, listed
from slotzero.server.vector_replies import (
    EmbeddingData,
    EmbeddingReply,
    RerankDocument,
    RerankReply,
    RerankResult,
    ScoreData,
    ScoreReply,
)
from slotzero.server.vector_requests import (
    EmbeddingRequest,
    PairFields,
    RerankRequest,
    ScoreRequest,
    VectorFields,
)
from slotzero.vectors import pairs


def vector_routes(state: AppState) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/embeddings", responses=responses(EmbeddingReply), response_model=None)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        state.check_model(body.model)
        pooling = state.pooling
        pooling.check_embeds()
        pooling.check_dimensions(body.dimensions)
        with about("input"):
            prompts = await asyncio.to_thread(embedding_inputs, state, body)
        state.log_prompt(request.state.request_id, body.input)
        work = pooled(state, prompts, body.cache_salt, "input")
        found = await unless_gone(request.receive, work)

        def reply() -> Response:
            is_text = body.encoding_format == "base64"
            made = [
                pooling.embedding(prompt.vector, body.dimensions, body.use_activation)
                for prompt in found
            ]
            data = [
                EmbeddingData(
                    index=i,
                    object="embedding",
                    embedding=_base64(vector) if is_text else vector.tolist(),
                )
                for i, vector in enumerate(made)
            ]
            return told(
                EmbeddingReply(
                    id=_id("embd", body),
                    object="list",
                    created=int(time.time()),
                    model=state.names[0],
                    data=data,
                    usage=usage(found),
                )
            )

        return await asyncio.to_thread(reply)

    @router.post("/v1/score", responses=responses(ScoreReply), response_model=None)
    @router.post("/score", responses=responses(ScoreReply), response_model=None)
    async def score(body: ScoreRequest, request: Request) -> Response:
        one, other = (listed(getattr(body, name), name) for name in body.names)
        with about(body.names[1]):
            chosen = pairs(one, other)
        scores = await scored(body, request, [(one[i], other[j]) for i, j in chosen], body.names)
        data = [
            ScoreData(index=i, object="score", score=value) for i, value in enumerate(scores.values)
        ]
        return told(
            ScoreReply(
                id=_id("score", body),
                object="list",
                created=int(time.time()),
                model=state.names[0],
                data=data,
                usage=scores.usage,
            )
        )

    @router.post("/v1/rerank", responses=responses(RerankReply), response_model=None)
    @router.post("/rerank", responses=responses(RerankReply), response_model=None)
    @router.post("/v2/rerank", responses=responses(RerankReply), response_model=None)
    async def rerank(body: RerankRequest, request: Request) -> Response:
        documents = listed(body.documents, "documents")
        (query,) = listed(body.query, "query")
        texts = [(query, document) for document in documents]
        scores = await scored(body, request, texts, ("query", "documents"))
        order = sorted(range(len(texts)), key=lambda i: -scores.values[i])
        results = [RerankResult(index=i, relevance_score=scores.values[i]) for i in order]
        if body.return_documents:
            for result in results:
                result.document = RerankDocument(text=documents[result.index])
        return told(
            RerankReply(
                id=_id("rerank", body),
                model=state.names[0],
                usage=scores.usage,
                results=results[: body.top_n or None],
            )
        )

    async def scored(
        body: PairFields,
        request: Request,
        texts: Sequence[tuple[str, str]],
        names: tuple[str, str],
    ) -> Scores:
        state.check_model(body.model)
        state.log_prompt(request.state.request_id, texts)
        return await unless_gone(request.receive, score_pairs(state, body, texts, names))

    return router


def _base64(vector: Vector) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _id(prefix: str, body: VectorFields) -> str:
    return f"{prefix}-{body.request_id or uuid.uuid4().hex}"
