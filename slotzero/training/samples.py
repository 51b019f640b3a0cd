"""Training samples: sequences with the target's hidden states, and padded batches of them.

This module knows neither heads nor where samples come from. A sample may be on any device; a batch
is on the device that trains.

The rule: a place counts if its token is part of an answer and has two tokens before it. `wanted` is
the only mask, and it masks places, never rows.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from slotzero.errors import ConfigError

MIN_LEN = 3  # a feature, the token fed beside it, and the token to predict


class Sample(NamedTuple):
    tokens: Tensor  # [n] int64
    features: Tensor  # [n, 3 * hidden], in the target's dtype
    final: Tensor  # [n, hidden]: the target's hidden states under its final norm
    first: int  # index of the answer's first token


class TrainingBatch(NamedTuple):
    tokens: Tensor  # [batch, places]
    features: Tensor  # [batch, places, 3 * hidden]
    final: Tensor  # [batch, places, hidden]
    wanted: Tensor  # [batch, places] bool: tokens to predict


def check_samples(what: str, samples: Sequence[Sample], hidden_size: int) -> None:
    if not samples:
        raise ConfigError(f"no {what}: give at least one")
    for i, (tokens, features, final, first) in enumerate(samples):
        num = len(tokens)
        if num < MIN_LEN:
            raise ConfigError(f"{what}[{i}] has {num} tokens: at least {MIN_LEN} are needed")
        for name, tensor, width in (
            ("features", features, 3 * hidden_size),
            ("final", final, hidden_size),
        ):
            if tensor.shape != (num, width):
                raise ConfigError(
                    f"{what}[{i}].{name} is [{num}, {width}], got {list(tensor.shape)}"
                )
        if not 1 <= first < num:
            raise ConfigError(f"{what}[{i}].first must be 1 to {num - 1}, got {first}")


def training_batches(
    samples: Sequence[Sample],
    batch_tokens: int,
    max_len: int,
    seed: int,
    device: torch.device,
) -> Iterator[TrainingBatch]:
    """Yield batches endlessly: every sample once per epoch, with samples of similar length
    together."""
    rng = random.Random(seed)
    lengths = [min(len(sample.tokens), max_len) for sample in samples]
    while True:
        order = sorted(range(len(samples)), key=lambda i: lengths[i] * rng.uniform(0.8, 1.25))
        groups = list(_groups(order, lengths, batch_tokens))
        rng.shuffle(groups)
        for group in groups:
            yield pack([crop(samples[i], max_len, rng) for i in group], device)


def whole_batches(
    samples: Sequence[Sample], batch_tokens: int, device: torch.device
) -> Iterator[tuple[list[int], TrainingBatch]]:
    """Yield each sample once and uncropped: their indices and the batch."""
    lengths = [len(sample.tokens) for sample in samples]
    order = sorted(range(len(samples)), key=lengths.__getitem__)
    for group in _groups(order, lengths, batch_tokens):
        yield group, pack([samples[i] for i in group], device)


def _groups(order: Iterable[int], lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield groups of neighbours that have at most batch_tokens after padding, or one sample."""
    group: list[int] = []
    longest = 0
    for i in order:
        longest = max(longest, lengths[i])
        if group and longest * (len(group) + 1) > batch_tokens:
            yield group
            group, longest = [], lengths[i]
        group.append(i)
    yield group


def crop(sample: Sample, max_len: int, rng: random.Random) -> Sample:
    """Return a random window that contains part of the answer."""
    last = len(sample.tokens) - max_len
    if last <= 0:
        return sample
    start = rng.randint(min(max(sample.first - max_len // 2, 0), last), last)
    taken = slice(start, start + max_len)
    tokens, features, final, first = sample
    return Sample(tokens[taken], features[taken], final[taken], max(first - start, 0))


def pack(samples: Sequence[Sample], device: torch.device) -> TrainingBatch:
    tokens, features, final = (
        pad_sequence(list(rows), batch_first=True).to(device)
        for rows in zip(*(sample[:3] for sample in samples), strict=True)
    )
    lengths = torch.tensor([len(sample.tokens) for sample in samples], device=device)
    first = torch.tensor([max(sample.first, MIN_LEN - 1) for sample in samples], device=device)
    places = torch.arange(tokens.shape[1], device=device)
    wanted = (places >= first[:, None]) & (places < lengths[:, None])
    return TrainingBatch(tokens, features, final, wanted)
