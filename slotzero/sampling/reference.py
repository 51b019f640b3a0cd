"""Reference implementation of sampling: the slow, plain definition.

It is a pure function of (logits, slots, positions, tables). It runs inside the captured step, so it
never reads a value back to the host and no shape depends on data. It knows neither requests nor
batches; it writes nothing.

The rules it keeps:

- The sample of a row depends only on its own logits, its slot's rows and its position. Other rows,
  order and padding cannot change it. Rows of slot 0 return zeros.
- There is no state. Occurrences of a token are counted from the token table each time, so no count
  can be stale. Token ids outside the vocabulary, and whatever is in the table at or past the
  position, are not counted.
- A token that a grammar forbids has the logit -inf before anything else is done, whatever it was.
- Log probabilities report the model: the softmax of the logits as they came in.
- Every filter is a threshold. Token i stays if the weight strictly above it is less than a budget
  (top-k: one each, budget k; top-p: its probability, budget top_p), so equal logits are kept or
  dropped together, and the three filters are one comparison with the highest threshold.
- A row without a finite maximum (NaN anywhere, +inf anywhere, or nothing but -inf) has no
  distribution to choose from. It yields token 0, an id that is always valid, so the next step reads
  valid memory and other rows are not affected. This is not hidden: if the incoming logits were
  broken, the requested log probabilities are NaN.

Scaled logits are (logit - maximum) / temperature rather than logit / temperature: the same
distribution, but it cannot overflow, however small the temperature.
"""

import torch
from torch import Tensor

from slotzero.sampling.noise import gumbel
from slotzero.sampling.params import MAX_LOGPROBS
from slotzero.sampling.tables import Sampled, SamplingTables


def sample(logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables) -> Sampled:
    """Sample one token per row. `logits` [rows, vocab]; `positions` [rows]: the index that the new
    token will have."""
    own = SamplingTables(*(table[slots.long()] for table in tables))  # one row per row
    adjusted = adjust(logits, positions, own)
    peak = adjusted.amax(-1, keepdim=True)
    scaled = (adjusted - peak) / torch.where(own.temperature > 0, own.temperature, 1.0)[:, None]
    kept = scaled.masked_fill(scaled < floor(scaled, own)[:, None], -torch.inf)
    noisy = kept + gumbel(own.seed, positions, logits.shape[-1])
    chosen = torch.where(own.temperature > 0, noisy.argmax(-1), adjusted.argmax(-1))
    chosen = torch.where(peak[:, 0].isfinite() & (slots != 0), chosen, 0)
    return _report(logits, chosen, torch.where(slots != 0, own.num_logprobs, -1))


def adjust(logits: Tensor, positions: Tensor, own: SamplingTables) -> Tensor:
    """Apply mask, penalties, bias and min_tokens, in that order: [rows, vocab]."""
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
    """Return the lowest scaled logit that may be chosen: [rows]. The maximum of `scaled` is 0."""
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
    """Return the log softmax with a float64 sum. torch's own adds 50,000 values in float32 and is
    off by 7e-5."""
    shifted = logits - logits.amax(-1, keepdim=True)
    total = shifted.exp().sum(-1, keepdim=True, dtype=torch.float64)
    return shifted - total.log().to(torch.float32)


def _report(logits: Tensor, chosen: Tensor, num_wanted: Tensor) -> Sampled:
    logprobs = log_softmax(logits)
    top = logits.sort(dim=-1, descending=True, stable=True).indices[:, :MAX_LOGPROBS]
    wanted = torch.arange(top.shape[-1], device=logits.device) < num_wanted[:, None]
    sound = logits.amax(-1, keepdim=True).isfinite()
    missing = (0, MAX_LOGPROBS - top.shape[-1])  # a vocabulary smaller than the output
    return Sampled(
        tokens=chosen.to(torch.int32),
        logprobs=torch.where(num_wanted >= 0, logprobs.gather(-1, chosen[:, None])[:, 0], 0.0),
        top_ids=_pad(torch.where(wanted & sound, top, 0).to(torch.int32), missing),
        top_logprobs=_pad(torch.where(wanted, logprobs.gather(-1, top), 0.0), missing),
    )


def _forbidden(own: SamplingTables, vocab: int) -> Tensor:
    """Return the tokens that a grammar forbids: [rows, vocab] bool."""
    token = torch.arange(vocab, device=own.allowed.device)
    bits = own.allowed[:, token // 32] >> (token % 32)
    return (own.is_masked != 0)[:, None] & (bits & 1 == 0)


def _count(ids: Tensor, counted: Tensor, vocab: int) -> Tensor:
    """Return how often each id occurs where `counted`: [rows, vocab] int32."""
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
