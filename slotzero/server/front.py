"""What all routes share: the fleet of engines, the tokenizer, the settings, and what follows from
them. It knows no request in particular.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from slotzero.config import DEFAULT_MODEL
from slotzero.errors import ContextError, UnknownModelError
from slotzero.server.answers import Ask
from slotzero.server.metrics import Metrics
from slotzero.server.runs import Client, Run
from slotzero.server.settings import ServerSettings
from slotzero.server.tools import choose_format
from slotzero.text.tokenizer import Tokenizer


class Front:
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
        self.call_format = choose_format(settings.tool_call_parser, tokenizer.tool_template)
        self._max_token_len = max(
            len(tokenizer.decode([token], skip_special_tokens=False))
            for token in range(tokenizer.vocab_size)
        )
        self.is_closing = False
        """Set when the server is asked to end: what would never end by itself does so now."""

    @property
    def state(self) -> str:
        """The engine's, unless the server ends before it."""
        is_stopping = self.is_closing and self.client.state != "failed"
        return "stopping" if is_stopping else self.client.state

    @property
    def max_model_len(self) -> int | None:
        """Known once the engine is ready."""
        limits = self.client.info.get("limits")
        return int(limits["max_model_len"]) if limits else None

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            served = ", ".join(self.names)
            raise UnknownModelError(f"no model {name[:80]!r} here; there is: {served}", "model")

    def check_text(self, text: str, param: str) -> None:
        """Refuses what cannot fit, however it is tokenised, before that takes its time."""
        limit = self.max_model_len
        if limit is not None and len(text) > limit * self._max_token_len:
            raise ContextError(
                f"{param}: {len(text)} characters, and the context holds {limit} tokens", param
            )

    def check_tokens(self, tokens: Sequence[int], param: str, has_answer: bool = True) -> None:
        """An answer needs one more."""
        limit = self.max_model_len
        if limit is not None and len(tokens) + has_answer > limit:
            rest = ", one of them for the answer" if has_answer else ""
            raise ContextError(
                f"{param}: {len(tokens)} tokens, and the context holds {limit}{rest}", param
            )

    async def run(self, asks: Sequence[Ask]) -> Run:
        self.metrics.arrived()
        timeout = self.settings.request_timeout
        run = Run(self.client, self.tokenizer, self.metrics, asks, timeout)
        await run.submit()
        return run
