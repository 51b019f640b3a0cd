"""All errors that Slotzero raises on purpose, as one tree, and their meaning to a caller.

    SlotzeroError
    ├── InvalidInputError          the input is invalid, and the caller can correct it
    │   ├── RequestError           in one request: prompt, sampling parameters
    │   │   ├── ContextError       the prompt is longer than the context
    │   │   ├── UnknownModelError  the request names a model that is not served
    │   │   └── UnknownResponseError  the request names a response that is not stored
    │   ├── ConfigError            in a setting of the engine or a flag
    │   ├── WeightUpdateError      in new weights for a running model, which keeps the old ones
    │   └── ModelError             in the checkpoint
    │       ├── ModelNotFoundError
    │       ├── UnsupportedModelError
    │       ├── CorruptCheckpointError
    │       └── TokenizerMissingError
    ├── RankLostError              a rank has ended or does not reply
    ├── StepFailedError            a step that another call ran has failed
    ├── CapacityError              this machine does not have enough memory
    ├── ContractError              a rule of a graph-visible tensor was broken
    │   └── SanitizerError         the sanitizer found it in live traffic
    ├── RecordingError             a size could not be captured
    ├── PoolError                  a slot or page was released twice, or by the wrong owner
    ├── EngineUnavailableError     the server's engine is loading, restarting, stopping or failed
    │   └── EngineDiedError        the engine ended while it had this request
    ├── DeadlineError              the answer took longer than --request-timeout
    ├── OverloadedError            too many requests are waiting already
    └── RequestRefusedError        the engine's process refused or lost this request

A message is one line: what is wrong, then the remedy. ERROR_OUTCOMES, at the end, maps errors to
exit codes and to OpenAI error replies.
"""

from collections.abc import Mapping
from typing import NamedTuple


class SlotzeroError(Exception):
    @property
    def exit_code(self) -> int:
        """Exit code of a command that fails with this error."""
        return outcome_of(type(self)).exit_code


class InvalidInputError(SlotzeroError):
    pass


class RequestError(InvalidInputError):
    """A request is invalid.

    `param` is the name of the invalid field in SamplingParams. `label` is the beginning of the
    message if that is the field's name; `renamed` replaces it for an API with other names.
    """

    def __init__(self, message: str, param: str | None = None, label: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if label is None:
            label = param if param and message.startswith(param) else ""
        self.label = label

    def renamed(self, names: Mapping[str, str]) -> "RequestError":
        """Return the error with the name that the field has in another API, if it has one there."""
        name = names.get(self.param or "")
        if name is None:
            return self
        message = str(self)
        if self.label:
            message = name + message.removeprefix(self.label)
        return RequestError(message, param=name)


class ContextError(RequestError):
    pass


class UnknownModelError(RequestError):
    pass


class UnknownResponseError(RequestError):
    pass


class ConfigError(InvalidInputError):
    pass


class WeightUpdateError(InvalidInputError):
    pass


class ModelError(InvalidInputError):
    pass


class ModelNotFoundError(ModelError):
    pass


class UnsupportedModelError(ModelError):
    pass


class CorruptCheckpointError(ModelError):
    pass


class TokenizerMissingError(ModelError):
    pass


class RankLostError(SlotzeroError):
    pass


class StepFailedError(SlotzeroError):
    """A step that another call ran has failed; `__cause__` is the error raised in that call."""


class CapacityError(SlotzeroError):
    pass


class ContractError(SlotzeroError):
    """A rule was broken; `tensor` is the name of the tensor, if the rule is about one tensor."""

    def __init__(self, message: str, tensor: str | None = None) -> None:
        super().__init__(message)
        self.tensor = tensor


class SanitizerError(ContractError):
    pass


class RecordingError(SlotzeroError):
    pass


class PoolError(SlotzeroError):
    pass


class EngineUnavailableError(SlotzeroError):
    def __init__(self, message: str, exit_code: int = 1) -> None:
        """`exit_code` is that of the engine's process, if its end is the reason."""
        super().__init__(message)
        self._exit_code = exit_code

    @property
    def exit_code(self) -> int:
        return self._exit_code


class EngineDiedError(EngineUnavailableError):
    pass


class DeadlineError(SlotzeroError):
    pass


class OverloadedError(SlotzeroError):
    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds."""


class RequestRefusedError(SlotzeroError):
    """An error in the engine's process.

    `error` is the name of a class in this module, or of another exception if the engine has a bug.
    `param` and `label` are those of a RequestError.
    """

    def __init__(
        self, error: str, message: str, param: str | None = None, label: str | None = None
    ) -> None:
        super().__init__(message)
        self.error, self.message = error, message
        self.param, self.label = param, label


class ErrorOutcome(NamedTuple):
    """Exit code of a command that fails with an error, and OpenAI's error reply."""

    exit_code: int
    status: int
    """HTTP status."""
    type: str
    code: str | None = None


_INVALID = "invalid_request_error"
_UNAVAILABLE = "service_unavailable_error"
_BUG = (500, "internal_error", "internal_error")
ERROR_OUTCOMES: Mapping[type[SlotzeroError], ErrorOutcome] = {
    SlotzeroError: ErrorOutcome(1, *_BUG),
    InvalidInputError: ErrorOutcome(2, 400, _INVALID),
    RequestError: ErrorOutcome(2, 400, _INVALID),
    ContextError: ErrorOutcome(2, 400, _INVALID, "context_length_exceeded"),
    UnknownModelError: ErrorOutcome(2, 404, _INVALID, "model_not_found"),
    UnknownResponseError: ErrorOutcome(2, 404, _INVALID, "response_not_found"),
    ConfigError: ErrorOutcome(2, *_BUG),  # a setting of the server: clients cannot correct it
    ModelError: ErrorOutcome(3, *_BUG),
    TokenizerMissingError: ErrorOutcome(3, 400, _INVALID),
    CapacityError: ErrorOutcome(4, 503, _UNAVAILABLE, "capacity"),
    ContractError: ErrorOutcome(5, *_BUG),
    RecordingError: ErrorOutcome(5, *_BUG),
    PoolError: ErrorOutcome(5, *_BUG),
    OverloadedError: ErrorOutcome(1, 429, "rate_limit_error", "rate_limit_exceeded"),
    EngineUnavailableError: ErrorOutcome(1, 503, _UNAVAILABLE, "engine_unavailable"),
    EngineDiedError: ErrorOutcome(1, 503, _UNAVAILABLE, "engine_died"),
    # Not 408, which means that the client is too slow to send its request.
    DeadlineError: ErrorOutcome(1, 504, "timeout_error", "request_timeout"),
}


def outcome_of(kind: type) -> ErrorOutcome:
    """Return the outcome for an error's class or its nearest base class.

    Other exceptions are treated as bugs.
    """
    return next(
        (ERROR_OUTCOMES[k] for k in kind.__mro__ if k in ERROR_OUTCOMES),
        ERROR_OUTCOMES[SlotzeroError],
    )
