"""Every error that Slotzero raises on purpose, as one tree.

    SlotzeroError
    ├── InvalidInputError          the caller can mend it
    │   ├── RequestError           one request: prompt, sampling parameters
    │   ├── ConfigError            one setting of the engine or a flag
    │   └── ModelError             the checkpoint
    │       ├── ModelNotFoundError
    │       ├── UnsupportedModelError
    │       ├── CorruptCheckpointError
    │       └── TokenizerMissingError
    ├── RankLostError              of several ranks one is gone, or does not answer
    ├── StepFailedError            another call's step failed, with requests of this call in it
    ├── CapacityError              this machine is too small for what was asked
    ├── ContractError              a rule of a graph-visible tensor was broken
    │   └── SanitizerError         the sanitizer saw it on live traffic
    ├── RecordingError             a size could not be recorded
    ├── PoolError                  a slot or page was given back twice, or is not ours
    ├── EngineUnavailableError     of the server: loading, restarting, stopping, or failed
    │   └── EngineDiedError        with this request in it
    ├── OverloadedError            too many requests wait already
    └── RequestRefusedError        this one cannot run, or its step failed; others go on

A message is one line: it names the thing and then the remedy. It does not know how it is shown;
`exit_code` is what a command ends with.
"""


class SlotzeroError(Exception):
    exit_code = 1


class InvalidInputError(SlotzeroError):
    exit_code = 2


class RequestError(InvalidInputError):
    pass


class ConfigError(InvalidInputError):
    pass


class ModelError(InvalidInputError):
    exit_code = 3


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
    """Its `__cause__` is the error that the other call raised."""


class CapacityError(SlotzeroError):
    exit_code = 4


class ContractError(SlotzeroError):
    exit_code = 5


class SanitizerError(ContractError):
    pass


class RecordingError(SlotzeroError):
    exit_code = 5


class PoolError(SlotzeroError):
    exit_code = 5


class EngineUnavailableError(SlotzeroError):
    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        """What the engine's process ended with, if that is why."""


class EngineDiedError(EngineUnavailableError):
    pass


class OverloadedError(SlotzeroError):
    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds."""


class RequestRefusedError(SlotzeroError):
    def __init__(self, error: str, message: str) -> None:
        super().__init__(message)
        self.error = error
        """The name of a class in errors.py, or of another exception if the engine is at fault."""
        self.message = message
