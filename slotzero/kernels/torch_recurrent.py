"""The operations of recurrent layers in plain torch: the definition of every fused kernel.

Rows of many tokens are computed token by token, so that a token's arithmetic is the same in a
prompt, among drafts and alone. The host reads no value.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from slotzero.kernels.contract.recurrent import RecurrentKernels
from slotzero.kernels.torch_speculation import put, up_to
from slotzero.kernels.types import Activation
from slotzero.kernels.types_recurrent import RecurrentStep, Scan, ScanWeights, States, Trail

L2_EPS = 1e-6  # for the L2 norm of keys and queries of a delta rule
Advance = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Advance states [n, ...] by one token each, given by index -> new states, and outputs."""


class TorchRecurrent(RecurrentKernels):
    @abstractmethod
    def rms_norm(
        self, x: Tensor, weight: Tensor | None, eps: float, is_centred: bool = False
    ) -> Tensor:
        """Apply RMSNorm to the last axis of x."""

    @abstractmethod
    def gate(self, gates: Tensor, values: Tensor, activation: Activation) -> Tensor:
        """Return activation(gates) * values."""

    def convolve(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        step: RecurrentStep,
        shape: Scan,
    ) -> Tensor:
        gates = None
        if shape.kind == "conv":
            own, gates, values = x.chunk(3, dim=1)
            x, gates = own * values, gates.float()

        def advance(inputs: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
            seen = torch.cat((inputs, x[at][:, :, None].float()), dim=-1)
            summed = (seen * weight.float()).sum(-1)
            if bias is not None:
                summed = summed + bias.float()
            return seen[:, :, 1:], F.silu(summed) if gates is None else gates[at] * summed

        states, trail = step.states, step.trail
        into = None if trail is None else trail.conv
        tables = _Tables(states.conv, states.conv_kept, states.rows, into)
        return _scan_tokens(advance, step, tables, shape).to(x.dtype)

    def scan(
        self,
        mixed: Tensor,
        gates: Tensor,
        beta: Tensor | None,
        weights: ScanWeights,
        step: RecurrentStep,
        shape: Scan,
    ) -> Tensor:
        dt = F.softplus(gates.float() + weights.dt_bias.float())
        if shape.kind == "mamba":
            dt = dt.clamp(*shape.dt_limit)
        dt = dt.view(len(dt), shape.num_heads, -1)
        rate = torch.exp(weights.a_log.float())[:, None]
        decay = torch.exp(-rate * dt)[:, :, None]  # [T, heads, 1, 1], or kda: [T, heads, 1, state]
        first, second, third = torch.split(mixed.float(), [*shape.sizes], dim=-1)

        def of_heads(keys: Tensor) -> Tensor:
            keys = keys.view(len(keys), shape.num_groups, shape.state_size)
            return keys.repeat_interleave(shape.num_heads // shape.num_groups, dim=1)

        if shape.kind == "mamba":
            assert weights.d is not None
            values, keys, queries = first.view(-1, *shape.scan_shape[:2]), second, third
            keys, queries, skip = (
                of_heads(keys),
                of_heads(queries),
                weights.d.float()[:, None] * values,
            )
            added = (dt * values)[..., None] * keys[:, :, None]

            def advance(h: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
                h = h * decay[at] + added[at]
                return h, (h * queries[at][:, :, None]).sum(-1) + skip[at]
        else:
            assert beta is not None
            queries, keys = _unit(of_heads(first)) * shape.state_size**-0.5, _unit(of_heads(second))
            values, strength = third.view(-1, *shape.scan_shape[:2]), beta.float().sigmoid()

            def advance(h: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
                h, key = h * decay[at], keys[at][:, :, None]
                missing = (values[at] - (h * key).sum(-1)) * strength[at][:, :, None]
                h = h + missing[..., None] * key
                return h, (h * queries[at][:, :, None]).sum(-1)

        states, trail = step.states, step.trail
        assert states.scan is not None
        into = None if trail is None else trail.scan
        tables = _Tables(states.scan, states.scan_kept, states.rows, into)
        out = _scan_tokens(advance, step, tables, shape)
        return out.flatten(1).to(mixed.dtype)

    def gate_norm(
        self,
        x: Tensor,
        gates: Tensor,
        weight: Tensor | None,
        eps: float,
        group_size: int,
        gates_first: bool,
        activation: Literal["silu", "sigmoid"] = "silu",
    ) -> Tensor:
        gates, wide = gates.float(), x.float()
        if weight is None:
            return self.gate(gates, wide, activation).to(x.dtype)
        if gates_first:
            wide = self.gate(gates, wide, activation)
        groups = self.rms_norm(wide.view(len(x), -1, group_size), None, eps)
        wide = (groups * weight.float().view(-1, group_size)).view_as(wide)
        return (wide if gates_first else self.gate(gates, wide, activation)).to(x.dtype)

    def commit_trail(
        self,
        trail: Trail,
        slots: Tensor,
        length: Tensor,
        num_confirmed: Tensor,
        states: States,
        shape: Scan,
    ) -> None:
        row = torch.arange(len(slots), device=slots.device)
        is_confirmed = (slots > 0) & (num_confirmed > 0)
        last = (num_confirmed - 1).clamp_min(0)
        for table, left in ((states.conv, trail.conv), (states.scan, trail.scan)):
            if table is not None and left is not None:
                put(table.transpose(0, 1), (slots * is_confirmed,), left[row, last], is_confirmed)
        if states.rows is None:
            return
        start, width = length[slots] - num_confirmed, trail.conv.shape[1]
        for i in range(width):
            target = snapshot_row(
                states.rows, slots, start + i, shape, is_confirmed & (i < num_confirmed)
            )
            for kept, left in ((states.conv_kept, trail.conv), (states.scan_kept, trail.scan)):
                if kept is not None and left is not None:
                    put(kept.transpose(0, 1), (target,), left[:, i], target > 0)


class _Tables(NamedTuple):
    """The convolution's or the scan's part of States and Trail."""

    states: Tensor  # [slots + 1, ...]
    kept: Tensor | None  # [snapshots + 1, ...]
    kept_rows: Tensor | None
    trail: Tensor | None  # [R, W, ...]


def begin(tables: _Tables, slots: Tensor, starts: Tensor, shape: Scan) -> Tensor:
    """Return the states that rows begin with, [R, ...] in float32.

    A text begins with zeros, a row that starts at a snapshot with the snapshot, and any other row
    with the state of its slot.
    """
    table, kept, kept_rows, _ = tables
    first = table[slots].float()
    if kept is not None and kept_rows is not None:
        found = snapshot_row(kept_rows, slots, starts - 1, shape, starts > 0)
        first = torch.where(_wide(found > 0, first), kept[found].float(), first)
    return torch.where(_wide((starts > 0) & (slots > 0), first), first, 0.0)


def snapshot_row(
    rows: Tensor, slots: Tensor, positions: Tensor, shape: Scan, wanted: Tensor
) -> Tensor:
    """Return the snapshot row of the state after these positions; 0: none, or not wanted."""
    after = positions + 1
    is_there = wanted & (slots > 0) & (after % shape.interval == 0)
    column = (after // shape.interval - 1) * is_there
    return rows[slots * is_there, column.clamp(0, rows.shape[1] - 1)] * is_there


def _scan_tokens(advance: Advance, step: RecurrentStep, tables: _Tables, shape: Scan) -> Tensor:
    """Advance the states token by token and return their outputs, [T, ...]; zeros for slot 0."""
    (slots, positions), rows, trail = step.tokens, step.rows, tables.trail
    if rows is None:
        state = begin(tables, slots, positions, shape)
        state, out = advance(state, torch.arange(len(slots), device=slots.device))
        _keep(tables, slots, positions, state, shape)
        put(tables.states, (slots,), state, slots > 0)
        return torch.where(_wide(slots > 0, out), out, 0.0)
    state = begin(tables, rows.slots, rows.starts, shape)
    place = up_to(len(slots), slots)
    owner = torch.searchsorted(rows.ends, place, right=True).clamp_max(len(rows.ends) - 1)
    outs = []
    for t in range(len(slots)):
        at, row, slot = place[t : t + 1], owner[t : t + 1], slots[t : t + 1]
        new, out = advance(state[row], at)
        put(state, (row,), new, slot > 0)
        outs.append(torch.where(_wide(slot > 0, out), out, 0.0))
        if trail is None:
            _keep(tables, slot, positions[t : t + 1], new, shape)
        else:
            offset = at - (rows.ends - rows.counts)[row]
            trail[row, offset] = torch.where(_wide(slot > 0, new), new, 0.0).to(trail.dtype)
    if trail is None:
        put(tables.states, (rows.slots,), state, (rows.slots > 0) & (rows.counts > 0))
    return torch.cat(outs)


def _keep(tables: _Tables, slots: Tensor, positions: Tensor, state: Tensor, shape: Scan) -> None:
    if tables.kept is not None and tables.kept_rows is not None:
        target = snapshot_row(tables.kept_rows, slots, positions, shape, slots > 0)
        put(tables.kept, (target,), state, target > 0)


def _wide(mask: Tensor, like: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (like.dim() - 1))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)
