"""The handle of one request in the engine, which `Engine.add` returns."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from slotzero.engine.output_text import OutputText
from slotzero.errors import RequestError
from slotzero.executor.results import RowLogprobs
from slotzero.models.pooling import Vector
from slotzero.request import FinishReason, Request, RequestStatus


@dataclass(eq=False)  # two requests with equal outputs are still two requests
class RequestHandle:
    """One request in the engine, with the output that it has so far."""

    request: Request
    output_text: OutputText | None = None
    logprobs: list[RowLogprobs] = field(default_factory=list)
    prompt_logprobs: list[RowLogprobs] = field(default_factory=list)
    """Log probabilities of the prompt from its second token on, if requested."""
    vector: Vector | None = None
    """The vector of the prompt, if the request asks for one; see models/pooling.py."""
    stored_experts: np.ndarray | None = None
    """The chosen experts of its tokens, and more rows, from when it last released its pages."""
    error: BaseException | None = None
    """The error of the step that failed with this request in it; else None."""
    listener: "Callable[[RequestHandle], None] | None" = None
    """Called whenever the output has grown or ended, with the engine's lock held."""
    weight_version: str = ""
    """The version of the weights that computed the newest token."""
    num_taken: int = 0
    """Number of tokens that `take` has returned."""

    def take(self) -> tuple[list[int], list[RowLogprobs]]:
        """Return the tokens since the last call, and their log probabilities if requested."""
        first, self.num_taken = self.num_taken, len(self.token_ids)
        return self.token_ids[first:], self.logprobs[first:]

    def take_scores(self, start: int, scores: list[RowLogprobs]) -> None:
        """Take the log probabilities of the prompt's tokens after position `start`. A request that
        was preempted gets some of them again."""
        self.prompt_logprobs[start:] = scores

    def notify(self) -> None:
        if self.listener is not None:
            self.listener(self)

    @property
    def finished(self) -> bool:
        return self.request.status is RequestStatus.FINISHED

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.request.finish_reason

    @property
    def refusal(self) -> RequestError | None:
        """The error of its grammar, if that ended it, for the caller to correct; else None."""
        grammar = self.request.grammar
        return grammar.error if grammar is not None and self.finish_reason == "abort" else None

    @property
    def failure(self) -> str:
        """The message of `refusal`, or empty."""
        return "" if self.refusal is None else str(self.refusal)

    @property
    def token_ids(self) -> list[int]:
        return self.request.output_token_ids

    @property
    def routed_experts(self) -> np.ndarray | None:
        """The experts of each token but the last, which no layer has seen: [tokens - 1, MoE layers,
        top_k]. None if they are not wanted, or if it was ended with an error."""
        if self.stored_experts is None or self.finish_reason == "abort":
            return None
        return self.stored_experts[: self.request.num_tokens - 1]

    @property
    def text(self) -> str:
        return self.output_text.text if self.output_text else ""
