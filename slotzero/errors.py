"""Every error that Slotzero raises on purpose, as one tree, and what each means to a caller.

    SlotzeroError
    ├── InvalidInputError          the caller can correct it
    │   ├── RequestError           one request: prompt, sampling parameters
    │   │   ├── ContextError       its prompt is longer than the context
    │   │   └── UnknownModelError  it names a model that is not served
    │   ├── ConfigError            one setting of the engine or a flag
    │   └── ModelError             the checkpoint
    │       ├── ModelNotFoundError
    │       ├── UnsupportedModelError
    │       ├── CorruptCheckpointError
    │       └── TokenizerMissingError
    ├── RankLostError              a rank has ended or does not reply
    ├── StepFailedError            a step of another call failed, with requests of this call in it
    ├── CapacityError              this machine is too small for what was asked
    ├── ContractError              a rule of a graph-visible tensor was broken
    │   └── SanitizerError         the sanitizer saw it on live traffic
    ├── RecordingError             a size could not be captured
    ├── PoolError                  a slot or page was released twice, or by the wrong owner
    ├── EngineUnavailableError     the server's engine is loading, restarting, stopping or failed
    │   └── EngineDiedError        it ended with this request in it
    ├── DeadlineError              the answer took longer than --request-timeout
    ├── OverloadedError            too many requests wait already
    └── RequestRefusedError        the engine's process refused or lost this request

A message is one line: it names the thing and then the remedy. ERROR_OUTCOMES, at the end, maps
errors to exit codes and to OpenAI error replies.
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
    """One request is wrong.

    `param` is the field that is wrong, as SamplingParams names it. `label` is how the message
    begins if it begins with the field's name; an API with other names replaces it, see `renamed`.
    """

    def __init__(self, message: str, param: str | None = None, label: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if label is None:
            label = param if param and message.startswith(param) else ""
        self.label = label

    def renamed(self, names: Mapping[str, str]) -> "RequestError":
        """Return the error with the field's name in another API, if it has one there."""
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


class ConfigError(InvalidInputError):
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
    """A step of another call failed; `__cause__` is the error that the other call raised."""


class CapacityError(SlotzeroError):
    pass


class ContractError(SlotzeroError):
    """A rule was broken; `tensor` is the name of the tensor, if it is one tensor's rule."""

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
        """`exit_code`: that of the engine's process, if its end is the reason."""
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
    """The error of another process: `error` is the name of a class in errors.py, or of another
    exception if the engine is at fault. `param` and `label` are those of a RequestError."""

    def __init__(
        self, error: str, message: str, param: str | None = None, label: str | None = None
    ) -> None:
        super().__init__(message)
        self.error, self.message = error, message
        self.param, self.label = param, label


class ErrorOutcome(NamedTuple):
    """What an error means to the caller: the exit code of a command, and OpenAI's error reply."""

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
    ConfigError: ErrorOutcome(2, *_BUG),  # a setting of the server, which no request can correct
    ModelError: ErrorOutcome(3, *_BUG),
    TokenizerMissingError: ErrorOutcome(3, 400, _INVALID),
    CapacityError: ErrorOutcome(4, 503, _UNAVAILABLE, "capacity"),
    ContractError: ErrorOutcome(5, *_BUG),
    RecordingError: ErrorOutcome(5, *_BUG),
    PoolError: ErrorOutcome(5, *_BUG),
    OverloadedError: ErrorOutcome(1, 429, "rate_limit_error", "rate_limit_exceeded"),
    EngineUnavailableError: ErrorOutcome(1, 503, _UNAVAILABLE, "engine_unavailable"),
    EngineDiedError: ErrorOutcome(1, 503, _UNAVAILABLE, "engine_died"),
    # 408 is for a client that is slow to send; here the engine is slow to answer its gateway
    DeadlineError: ErrorOutcome(1, 504, "timeout_error", "request_timeout"),
}


def outcome_of(kind: type) -> ErrorOutcome:
    """Return the outcome of an error's class, or of the nearest class above it; any other
    exception is a bug."""
    return next(
        (ERROR_OUTCOMES[k] for k in kind.__mro__ if k in ERROR_OUTCOMES),
        ERROR_OUTCOMES[SlotzeroError],
    )
