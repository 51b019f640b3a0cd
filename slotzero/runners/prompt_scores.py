"""Log probabilities of the tokens of prompts, computed in a prefill step.

After a token of a prompt, the next token is known: its log probability, and those of the most
likely tokens, are what `sample` reports for a row in which that token must be chosen. Few tokens
are scored at a time, because logits of a whole step would take gigabytes.
"""

import torch
from torch import Tensor

from slotzero.graph import Registry
from slotzero.kernels.contract import Kernels
from slotzero.kernels.types import Normed, Tokens
from slotzero.models.model import Model
from slotzero.pools.tables import SlotTables
from slotzero.sampling.params import MAX_LOGPROBS
from slotzero.sampling.tables import (
    SAMPLING_TABLES,
    Sampled,
    SamplingTables,
    TableSpec,
    mask_tables,
)

SCORES, SCORE_TOP_IDS = "scores", "score_top_ids"
SCORED = (SCORES, SCORE_TOP_IDS)
BLOCK = 64  # tokens that are scored together
CERTAIN = 1e30  # a bias that no finite logit exceeds


class PromptScores:
    """By token of the step: the scores of the token after it, or zeros if that is not known yet."""

    def __init__(
        self,
        registry: Registry,
        decoder: Model,
        kernels: Kernels,
        tables: SlotTables,
        max_tokens: int,
        dtype: torch.dtype,
    ) -> None:
        """`dtype`: that of logits."""
        self._decoder, self._kernels, self._tables = decoder, kernels, tables
        self._dtype = dtype
        # column 0: the log probability of the next token; then those of the most likely tokens
        shape = max_tokens, 1 + MAX_LOGPROBS
        self._scores = registry.output(SCORES, shape, torch.float32, per="token")
        self._top_ids = registry.output(
            SCORE_TOP_IDS, (max_tokens, MAX_LOGPROBS), torch.int32, per="token", chosen_from=SCORES
        )

    def write(self, tokens: Tokens, normed: Normed) -> None:
        """Score the token after each of `tokens`, whose final hidden states are `normed`."""
        device = tokens.slots.device
        vocab = self._decoder.config.vocab_size
        specs = (*SAMPLING_TABLES, *mask_tables(vocab))
        own = {spec.name: _neutral(spec, device) for spec in specs}
        own["num_logprobs"].fill_(MAX_LOGPROBS)
        own["bias_values"][:, 0].fill_(CERTAIN)
        no_tokens = torch.zeros(BLOCK + 1, 1, dtype=torch.int32, device=device)
        rules = SamplingTables(no_tokens, **own)
        slots, position = tokens.slots, tokens.positions + 1
        following = self._tables.tokens[slots, position.clamp_max(self._tables.tokens.shape[1] - 1)]
        is_known = (slots != 0) & (position < self._tables.target[slots])
        rows = torch.arange(1, BLOCK + 1, dtype=torch.int32, device=device)
        for first in range(0, len(slots), BLOCK):
            part = slice(first, min(first + BLOCK, len(slots)))
            size = part.stop - first
            known = is_known[part]
            rules.bias_ids[1 : size + 1, 0] = following[part]
            logits = torch.empty(size, vocab, dtype=self._dtype, device=device)
            index = torch.arange(first, part.stop, device=device)
            self._decoder.logits(normed.select(index), slots[part] * known, logits)
            top_ids, scores = self._top_ids[part], self._scores[part]
            out = Sampled(
                torch.empty_like(rows[:size]),
                torch.empty(size, dtype=torch.float32, device=device),
                top_ids,
                torch.empty(size, MAX_LOGPROBS, dtype=torch.float32, device=device),
            )
            self._kernels.sample(logits, rows[:size] * known, no_tokens[:size, 0], rules, out)
            scores[:, 0] = out.logprobs
            scores[:, 1:] = out.top_logprobs


def _neutral(spec: TableSpec, device: torch.device) -> Tensor:
    """Return a table of which every row is neutral, for the rows of a block after row 0."""
    dtype = {"int32": torch.int32, "float32": torch.float32}[spec.dtype]
    return torch.full(spec.shape(BLOCK), spec.neutral, dtype=dtype, device=device)
