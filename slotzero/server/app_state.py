"""State that all routes share: the fleet of engines, the tokenizer, the settings and the metrics.

It knows no single request.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from slotzero.config import DEFAULT_MODEL
from slotzero.errors import ContextError, EngineUnavailableError, UnknownModelError
from slotzero.models.pooling import Pooling
from slotzero.server.admin import Admin
from slotzero.server.answers import GenerationRequest
from slotzero.server.generation import Client, Generation
from slotzero.server.metrics import Metrics
from slotzero.server.response_store import response_store
from slotzero.server.settings import ServerSettings
from slotzero.server.tool_support import reasoning_of, tool_support
from slotzero.text.score_template import ScoreTemplate
from slotzero.text.tokenizer import Tokenizer

log = logging.getLogger("slotzero.server")


class AppState:
    def __init__(
        self,
        client: Client,
        tokenizer: Tokenizer,
        settings: ServerSettings,
        metrics: Metrics,
        sampling: Mapping[str, Any],
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.settings = settings
        self.metrics = metrics
        self.sampling = sampling
        self.started_at = int(time.time())
        self.names = settings.served_model_name or (DEFAULT_MODEL,)
        template = tokenizer.tool_template
        self.tools = tool_support(settings.tool_call_parser, template)
        self.reasoning = reasoning_of(settings.reasoning_parser, template)
        self._max_token_len = max(
            len(tokenizer.decode([token], skip_special_tokens=False))
            for token in range(tokenizer.vocab_size)
        )
        self.score_template = ScoreTemplate(client.settings.get("score_template"))
        self.responses = response_store(settings.response_store, settings.max_stored_responses)
        self.admin = Admin(client)
        self.admin_paths: Callable[[], Collection[str]] = frozenset
        """Returns the paths of the routes for administrators, on or off."""
        self.is_closing = False
        """Set when the server shuts down, to end streams that would never end by themselves."""

    @property
    def engine_state(self) -> str:
        """The engines' state, or "stopping" while the server shuts down."""
        is_stopping = self.is_closing and self.client.state != "failed"
        return "stopping" if is_stopping else self.client.state

    @property
    def max_model_len(self) -> int | None:
        """Known once the engine is ready."""
        limits = self.client.info.get("limits")
        return int(limits["max_model_len"]) if limits else None

    @property
    def pooling(self) -> Pooling:
        """How vectors are made; known once an engine was ready."""
        known = self.client.info.get("pooling")
        if known is None:
            raise EngineUnavailableError(f"the engine is {self.engine_state}: try again later")
        return Pooling(**known)

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            served = ", ".join(self.names)
            raise UnknownModelError(
                f"model {name[:80]!r} is not served here; available: {served}", "model"
            )

    def check_text(self, text: str, param: str) -> None:
        """Refuse text that cannot fit into the context, before spending time on tokenising it."""
        limit = self.max_model_len
        if limit is not None and len(text) > limit * self._max_token_len:
            raise ContextError(
                f"{param}: {len(text)} characters do not fit into the context of {limit} tokens",
                param,
            )

    def check_tokens(self, tokens: Sequence[int], param: str, has_answer: bool = True) -> None:
        """Refuse tokens that do not fit into the context; an answer needs one more token."""
        limit = self.max_model_len
        if limit is not None and len(tokens) + has_answer > limit:
            rest = ", of which the answer needs at least one" if has_answer else ""
            raise ContextError(
                f"{param}: {len(tokens)} tokens do not fit into the context of {limit}{rest}",
                param,
            )

    def log_prompt(self, request_id: str, prompt: Any) -> None:
        if self.settings.log_requests:
            log.info("%s: prompt: %r", request_id, prompt)

    async def run(self, requests: Sequence[GenerationRequest]) -> Generation:
        self.metrics.arrived()
        timeout = self.settings.request_timeout
        generation = Generation(self.client, self.tokenizer, self.metrics, requests, timeout)
        await generation.submit()
        return generation
