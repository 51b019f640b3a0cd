"""Reference implementation of sampling: slow, but the definition of what kernels must compute.

It is a pure function of (logits, slots, positions, tables) and writes nothing. It runs inside the
captured step, so it never reads a value back to the host, and no shape depends on data. It does not
know requests or batches.

Its rules:

- The sample of a row depends only on its own logits, the table rows of its slot, and its position.
  Other rows, their order and padding cannot change it. Rows of slot 0 return zeros.
- There is no state. Occurrences of a token are counted in the token table each time, so counts
  cannot be stale. Token ids outside the vocabulary, and table entries at or after the position, are
  not counted.
- A token that the grammar forbids gets the logit -inf first, before any other adjustment.
- Log probabilities are, by `logprobs_mode`, those of the model, the log softmax of the unmodified
  logits; or those of the distribution that is sampled. That is the log softmax of the processed
  logits: adjusted, divided by the temperature, and -inf where a filter drops a token. A greedy row
  has temperature 1 and no filters there. Or the logits themselves are reported, of either kind. The
  most likely tokens are those with the highest unmodified or adjusted logits.
- Every filter is a threshold. A token is kept if the total weight of all tokens with higher logits
  is less than a budget (top-k: weight 1 each, budget k; top-p: their probabilities, budget top_p).
  So equal logits are kept or dropped together, and the three filters are one comparison with the
  highest threshold.
- A row without a finite maximum (it contains NaN or +inf, or only -inf) has no distribution. It
  yields token 0, a valid id, so that the next step reads valid memory and other rows are not
  affected. The error stays visible: the requested log probabilities are NaN if the logits of which
  they would be are invalid.

Scaled logits are (logit - maximum) / temperature instead of logit / temperature. The distribution
is the same, but small temperatures cannot cause an overflow.
"""

import torch
from torch import Tensor

from slotzero.sampling.noise import gumbel
from slotzero.sampling.params import MAX_LOGPROBS
from slotzero.sampling.tables import Sampled, SamplingTables


def sample(logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables) -> Sampled:
    """Sample one token per row from `logits` [rows, vocab].

    `positions` [rows] are the positions that the new tokens will have.
    """
    own = SamplingTables(*(table[slots.long()] for table in tables))  # [rows, ...] each
    is_sampled = own.temperature > 0
    adjusted = adjust(logits, positions, own)
    peak = adjusted.amax(-1, keepdim=True)
    temperature = torch.where(is_sampled, own.temperature, 1.0)[:, None]
    scaled = (adjusted - peak) / temperature
    is_dropped = is_sampled[:, None] & (scaled < floor(scaled, own)[:, None])
    kept = scaled.masked_fill(is_dropped, -torch.inf)
    noisy = kept + gumbel(own.seed, positions, logits.shape[-1])
    chosen = torch.where(is_sampled, noisy.argmax(-1), adjusted.argmax(-1))
    chosen = torch.where(peak[:, 0].isfinite() & (slots != 0), chosen, 0)
    is_processed = (own.logprobs_mode & 1 != 0)[:, None]
    processed = (adjusted / temperature).masked_fill(is_dropped, -torch.inf)
    values = torch.where(
        (own.logprobs_mode & 2 != 0)[:, None],
        torch.where(is_processed, processed, logits),
        log_softmax(torch.where(is_processed, kept, logits)),
    )
    likely = torch.where(is_processed, adjusted, logits)
    return _report(values, likely, chosen, torch.where(slots != 0, own.num_logprobs, -1))


def adjust(logits: Tensor, positions: Tensor, own: SamplingTables) -> Tensor:
    """Apply grammar mask, penalties, bias and min_tokens, in that order; return [rows, vocab]."""
    vocab = logits.shape[-1]
    logits = logits.masked_fill(_forbidden(own, vocab), -torch.inf)
    index = torch.arange(own.tokens.shape[-1], device=logits.device)
    known = index < positions[:, None]
    seen = _count(own.tokens, known, vocab) > 0
    uses = _count(own.tokens, known & (index >= own.prompt_len[:, None]), vocab)
    penalty = own.repetition_penalty[:, None]
    repeated = torch.where(logits > 0, logits / penalty, logits * penalty)
    adjusted = torch.where(seen, repeated, logits)
    adjusted = adjusted - own.frequency_penalty[:, None] * uses.to(torch.float32)
    adjusted = adjusted - own.presence_penalty[:, None] * (uses > 0).to(torch.float32)
    adjusted = adjusted + _bias(own.bias_ids, own.bias_values, vocab)
    early = (positions - own.prompt_len < own.min_tokens)[:, None]
    banned = _count(own.stop_ids, early.expand_as(own.stop_ids), vocab) > 0
    return adjusted.masked_fill(banned, -torch.inf)


def floor(scaled: Tensor, own: SamplingTables) -> Tensor:
    """Return the lowest scaled logit that top-k, top-p and min-p keep, [rows].

    The maximum of each row of `scaled` is 0.
    """
    vocab = scaled.shape[-1]
    ordered = scaled.sort(dim=-1, descending=True).values
    num_kept = torch.where(own.top_k > 0, own.top_k.clamp(max=vocab), vocab)
    floor_k = ordered.gather(-1, (num_kept - 1).long()[:, None])
    mass = ordered.double().exp().masked_fill(ordered < floor_k, 0.0)
    above = mass.cumsum(-1) - mass
    inside = above < own.top_p.double()[:, None] * mass.sum(-1, keepdim=True)
    floor_p = ordered.masked_fill(~inside, torch.inf).amin(-1)
    floor_p = torch.where(own.top_p < 1, floor_p, -torch.inf)
    return torch.maximum(torch.maximum(floor_k[:, 0], floor_p), own.min_p.log())


def log_softmax(logits: Tensor) -> Tensor:
    """Return the log softmax, summed in float64.

    torch's own function sums in float32, and with 50,000 values its error is 7e-5.
    """
    shifted = logits - logits.amax(-1, keepdim=True)
    total = shifted.exp().sum(-1, keepdim=True, dtype=torch.float64)
    return shifted - total.log().to(torch.float32)


def _report(values: Tensor, likely: Tensor, chosen: Tensor, num_wanted: Tensor) -> Sampled:
    """Report the values of the chosen tokens, and of those where `likely` is highest."""
    top = likely.sort(dim=-1, descending=True, stable=True).indices[:, :MAX_LOGPROBS]
    wanted = torch.arange(top.shape[-1], device=values.device) < num_wanted[:, None]
    is_valid = likely.amax(-1, keepdim=True).isfinite()
    values = torch.where(is_valid, values, torch.nan)
    missing = (0, MAX_LOGPROBS - top.shape[-1])  # if the vocabulary is smaller than the output
    return Sampled(
        tokens=chosen.to(torch.int32),
        logprobs=torch.where(num_wanted >= 0, values.gather(-1, chosen[:, None])[:, 0], 0.0),
        top_ids=_pad(torch.where(wanted & is_valid, top, 0).to(torch.int32), missing),
        top_logprobs=_pad(torch.where(wanted, values.gather(-1, top), 0.0), missing),
    )


def _forbidden(own: SamplingTables, vocab: int) -> Tensor:
    """Return the tokens that a grammar forbids: [rows, vocab] bool."""
    token = torch.arange(vocab, device=own.allowed.device)
    bits = own.allowed[:, token // 32] >> (token % 32)
    return (own.is_masked != 0)[:, None] & (bits & 1 == 0)


def _count(ids: Tensor, counted: Tensor, vocab: int) -> Tensor:
    """Return how often each id occurs where `counted` is true: [rows, vocab] int32."""
    target = torch.where(counted & (ids >= 0) & (ids < vocab), ids, vocab).long()
    counts = torch.zeros(ids.shape[0], vocab + 1, dtype=torch.int32, device=ids.device)
    ones = torch.ones_like(target, dtype=torch.int32)
    return counts.scatter_add(-1, target, ones)[:, :vocab]  # the last column is discarded


def _bias(ids: Tensor, values: Tensor, vocab: int) -> Tensor:
    target = torch.where((ids >= 0) & (ids < vocab), ids, vocab).long()
    bias = torch.zeros(ids.shape[0], vocab + 1, dtype=values.dtype, device=ids.device)
    return bias.scatter_add(-1, target, values)[:, :vocab]


def _pad(tensor: Tensor, missing: tuple[int, int]) -> Tensor:
    return torch.nn.functional.pad(tensor, missing)
