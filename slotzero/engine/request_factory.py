"""Validation of a caller's input: the result is a request that the scheduler can run, or an error.

It knows the limits of the engine, and neither queues nor grammars.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from slotzero.errors import RequestError
from slotzero.models.pooling import Pooling
from slotzero.request import Request
from slotzero.sampling.params import MAX_STOP_IDS, SamplingParams


@dataclass
class RequestFactory:
    max_model_len: int
    max_position: int
    """Longest context that the model supports: what --max-model-len can be raised to."""
    vocab_size: int
    eos_token_ids: Sequence[int]
    pooling: Pooling
    max_pooled_len: int
    """Longest prompt of which a vector can be computed."""
    generates: bool = True
    """Whether the model has a language model head."""
    has_priorities: bool = False
    """Whether requests may have priorities."""

    def create(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> Request:
        """Create a request without seed, arrival and grammar; raises RequestError."""
        if params.pooled and self.pooling.refusal:
            raise RequestError(self.pooling.refusal)
        if not (params.pooled or self.generates):
            raise RequestError(
                "this checkpoint has no lm_head, so it cannot generate: use LLM.embed or "
                "/v1/embeddings"
            )
        tokens = self._token_ids(prompt, params)
        self._check_vocabulary(tokens, params)
        if params.priority and not self.has_priorities:
            raise RequestError(
                f"priority={params.priority}: this engine serves requests as they come; leave it "
                "out, or start the engine with --scheduling-policy priority",
                param="priority",
            )
        stop_ids = params.ends_at(self.eos_token_ids)
        if len(stop_ids) > MAX_STOP_IDS:
            raise RequestError(
                f"{len(stop_ids)} stop ids with the model's own: at most {MAX_STOP_IDS} fit, "
                "name fewer stop_token_ids",
                param="stop_token_ids",
            )
        room = self.max_model_len - len(tokens)
        return Request(
            id=request_id,
            prompt_token_ids=tokens,
            params=params,
            seed=params.seed or 0,  # the engine draws one where none was given
            arrival=0,
            stop_ids=stop_ids,
            max_len=len(tokens) + (1 if params.pooled else min(params.max_tokens or room, room)),
            is_averaged=params.pooled and self.pooling.kind == "mean",
        )

    def _token_ids(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        limit, most = self.max_model_len, self.max_position
        try:
            tokens = [operator.index(token) for token in prompt]
        except TypeError:
            raise RequestError("the prompt must be a list of token ids", "prompt") from None
        if not tokens:
            raise RequestError("the prompt is empty: give at least one token", "prompt")
        if len(tokens) > (self.max_pooled_len if params.pooled else limit - 1):
            for_answer = "" if params.pooled else ", one of them for the answer"
            raise RequestError(
                f"the prompt has {len(tokens)} tokens and the context holds {limit}{for_answer}: "
                "shorten the prompt"
                + (f" or raise --max-model-len, up to {most}" if limit < most else ""),
                param="prompt",
            )
        return tokens

    def _check_vocabulary(self, tokens: Sequence[int], params: SamplingParams) -> None:
        for what, ids in (
            ("prompt", tokens),
            ("logit_bias", params.logit_bias),
            ("banned_sequences", [i for sequence in params.banned_sequences for i in sequence]),
            ("stop_token_ids", params.stop_token_ids),
        ):
            bad = next((t for t in ids if not 0 <= t < self.vocab_size), None)
            if bad is not None:
                raise RequestError(
                    f"{what}: token id {bad} is not in the vocabulary of {self.vocab_size}",
                    param=what,
                )
