"""Sampling tables: the sampling parameters of every request, one row per slot.

A step publishes slots only; inside the captured step, the parameters of each slot are read from
these tables. This module defines names, widths and neutral values. It does not allocate (the
registry does), does not know logits, and imports torch for types only.

The rule: row 0 belongs to no request and has neutral values, and a row is always written as a
whole, so no value of an earlier owner of the slot remains.

The parameters of a request are written once, when it is admitted. The mask of its grammar is
written before each of its samples, and is not read while `is_masked` is 0.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from slotzero.config import LOGPROBS_MODES
from slotzero.errors import RequestError
from slotzero.sampling.params import MAX_LOGIT_BIAS, MAX_STOP_IDS, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

INT32_MAX = 2**31 - 1
FLOAT32_MAX = (2 - 2**-23) * 2.0**127


@dataclass(frozen=True)
class TableSpec:
    """Name, width, dtype and neutral value of one table."""

    name: str
    width: int
    dtype: Literal["int32", "float32"]
    neutral: int | float
    """Value of row 0 and of every unused column."""
    is_matrix: bool = False
    """Whether the table has two axes even if its width, which may depend on settings, is 1."""
    chosen_from: str = ""
    """For a table that a step writes: the tensor from which the written values are computed."""

    def shape(self, slots: int) -> tuple[int, ...]:
        is_vector = self.width == 1 and not self.is_matrix
        return (slots + 1,) if is_vector else (slots + 1, self.width)


SAMPLING_TABLES = (
    TableSpec("temperature", 1, "float32", 0.0),  # 0: greedy
    TableSpec("top_k", 1, "int32", 0),  # 0: all
    TableSpec("top_p", 1, "float32", 1.0),
    TableSpec("min_p", 1, "float32", 0.0),
    TableSpec("repetition_penalty", 1, "float32", 1.0),
    TableSpec("presence_penalty", 1, "float32", 0.0),
    TableSpec("frequency_penalty", 1, "float32", 0.0),
    TableSpec("seed", 2, "int32", 0),  # low word, high word
    TableSpec("prompt_len", 1, "int32", 0),
    TableSpec("min_tokens", 1, "int32", 0),
    TableSpec("num_logprobs", 1, "int32", -1),  # -1: none wanted
    TableSpec("logprobs_mode", 1, "int32", 0),  # index in LOGPROBS_MODES
    TableSpec("stop_ids", MAX_STOP_IDS, "int32", -1),
    TableSpec("bias_ids", MAX_LOGIT_BIAS, "int32", -1),
    TableSpec("bias_values", MAX_LOGIT_BIAS, "float32", 0.0),
)


def mask_tables(vocab_size: int) -> tuple[TableSpec, ...]:
    """Return the tables for grammar masks.

    Bit i % 32 of word i // 32 is set if token i is allowed.
    """
    return (
        TableSpec("is_masked", 1, "int32", 0),  # 0: every token is allowed
        TableSpec("allowed", -(-vocab_size // 32), "int32", -1, is_matrix=True),
    )


class SamplingTables(NamedTuple):
    """The tensors: the token table, then those of `SAMPLING_TABLES` and `mask_tables`, in order."""

    tokens: "Tensor"  # [slots + 1, max_len] int32, by position
    temperature: "Tensor"
    top_k: "Tensor"
    top_p: "Tensor"
    min_p: "Tensor"
    repetition_penalty: "Tensor"
    presence_penalty: "Tensor"
    frequency_penalty: "Tensor"
    seed: "Tensor"  # [slots + 1, 2]
    prompt_len: "Tensor"
    min_tokens: "Tensor"
    num_logprobs: "Tensor"
    logprobs_mode: "Tensor"  # bit 0: of processed logits; bit 1: the logits themselves
    stop_ids: "Tensor"  # [slots + 1, MAX_STOP_IDS]
    bias_ids: "Tensor"  # [slots + 1, MAX_LOGIT_BIAS]
    bias_values: "Tensor"  # [slots + 1, MAX_LOGIT_BIAS]
    is_masked: "Tensor"
    allowed: "Tensor"  # [slots + 1, at least vocab / 32], 32 tokens per word


class Sampled(NamedTuple):
    """Results of sampling by row; rows of slot 0 are zeros."""

    tokens: "Tensor"  # [rows] int32
    logprobs: "Tensor"  # [rows] float32
    top_ids: "Tensor"  # [rows, MAX_LOGPROBS] int32, most likely first
    top_logprobs: "Tensor"  # [rows, MAX_LOGPROBS] float32


def encode(
    params: SamplingParams,
    seed: int,
    prompt_len: int,
    stop_ids: Iterable[int],
    logprobs_mode: str = LOGPROBS_MODES[0],
) -> dict[str, list[int] | list[float]]:
    """Return one request's row in each of `SAMPLING_TABLES`.

    `seed` is never None: the caller draws one if the request has none. `stop_ids` are all ids that
    end the answer, including end-of-sequence; `min_tokens` forbids them. `logprobs_mode` is a
    setting of the engine.
    """
    values: dict[str, list[int] | list[float]] = {
        "temperature": [_float32(params.temperature)],
        "top_k": [min(max(params.top_k, 0), INT32_MAX)],
        "top_p": [params.top_p],
        "min_p": [params.min_p],
        "repetition_penalty": [params.repetition_penalty],
        "presence_penalty": [params.presence_penalty],
        "frequency_penalty": [params.frequency_penalty],
        "seed": [_signed_word(seed), _signed_word(seed >> 32)],
        "prompt_len": [prompt_len],
        "min_tokens": [min(params.min_tokens, INT32_MAX)],
        "num_logprobs": [-1 if params.logprobs is None else params.logprobs],
        "logprobs_mode": [LOGPROBS_MODES.index(logprobs_mode)],
        "stop_ids": _stop_row(stop_ids),
        "bias_ids": list(params.logit_bias),
        "bias_values": [_float32(value) for value in params.logit_bias.values()],
    }
    return {spec.name: _filled(spec, values[spec.name]) for spec in SAMPLING_TABLES}


def _filled(spec: TableSpec, values: list[int] | list[float]) -> list[int] | list[float]:
    return [*values, *[spec.neutral] * (spec.width - len(values))]


def _stop_row(stop_ids: Iterable[int]) -> list[int]:
    unique = list(dict.fromkeys(stop_ids))
    if len(unique) > MAX_STOP_IDS:
        raise RequestError(
            f"{len(unique)} stop ids, including the model's end-of-sequence tokens: at most "
            f"{MAX_STOP_IDS} are supported; pass fewer stop_token_ids"
        )
    return unique


def _float32(value: float) -> float:
    # A finite double can be infinite in float32, and infinity would become NaN on the device.
    return min(max(value, -FLOAT32_MAX), FLOAT32_MAX)


def _signed_word(value: int) -> int:
    word = value & 0xFFFFFFFF
    return word - 2**32 if word >= 2**31 else word
