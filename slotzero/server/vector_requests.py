"""Request models of embeddings, scores and reranking: OpenAI's fields, and vLLM's.

The rules are those of protocol.py: a field works, or it is neutral, or it is refused by name.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from slotzero.errors import RequestError
from slotzero.server.chat_messages import RequestModel
from slotzero.server.protocol import Texts, Tokens, refuse_values

MAX_INPUTS = 2048  # OpenAI's
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "padding": ("do_not_pad",),
    "priority": (0,),
}
_PAIRS = (
    ("data_1", "data_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("text_1", "text_2"),
)
"""Names of the two lists of texts of a score request."""


class VectorFields(RequestModel):
    """Fields that all requests for vectors have in common."""

    model: str | None = None
    user: str | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")] | None = None
    priority: Any = None
    padding: Any = None

    @model_validator(mode="after")
    def _refuse(self) -> Self:
        refuse_values(self, _NEUTRAL)
        return self


class EmbeddingRequest(VectorFields):
    input: str | Texts | Tokens | Annotated[list[Tokens], Field(fail_fast=True)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    # vLLM's
    add_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = None
    embed_dtype: Any = None
    endianness: Any = None


class PairFields(VectorFields):
    """Fields of requests that score pairs of texts."""

    max_tokens_per_query: Annotated[int, Field(ge=0)] = 0
    max_tokens_per_doc: Annotated[int, Field(ge=0)] = 0
    instruction: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ScoreRequest(PairFields):
    data_1: str | Texts | None = None
    data_2: str | Texts | None = None
    queries: str | Texts | None = None
    documents: str | Texts | None = None
    items: str | Texts | None = None
    text_1: str | Texts | None = None
    text_2: str | Texts | None = None

    @property
    def names(self) -> tuple[str, str]:
        """The names under which this request has its texts."""
        given = {name for pair in _PAIRS for name in pair if getattr(self, name) is not None}
        for pair in _PAIRS:
            if given == {*pair}:
                return pair
        raise RequestError(
            "queries: give the texts to score as queries and documents, queries and items, text_1 "
            "and text_2, or data_1 and data_2",
            "queries",
        )


class RerankRequest(PairFields):
    query: str
    documents: str | Texts
    top_n: Annotated[int, Field(ge=0)] = 0
    return_documents: bool = True
