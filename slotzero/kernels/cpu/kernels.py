"""The CPU kernel set: the C++ library behind the contract, in float32.

Every kernel computes each row by itself and in one order, so a row's result is bitwise identical in
every batch. The operations left to torch (copies, sums and products of two values) round the same
everywhere.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from slotzero.kernels.attention_plans import TorchPlan
from slotzero.kernels.cpu import build
from slotzero.kernels.quantized import QuantizedRows, dequantise, scales_of
from slotzero.kernels.torch_ops import TorchKernels
from slotzero.kernels.types import (
    NO_BRANCHES,
    Activation,
    Angles,
    Heads,
    Normed,
    PagedKv,
    ResidualNorms,
    Tokens,
)
from slotzero.kernels.types_recurrent import RecurrentStep, Scan, ScanWeights
from slotzero.kernels.weights import (
    DenseWeight,
    JoinedWeight,
    LinearWeight,
    QuantizedWeight,
    WeightFormat,
)
from slotzero.sampling.tables import Sampled, SamplingTables

ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "clamped_silu", "sigmoid", "relu")
"""Activations by number, in the same order as in rowwise.cpp."""
NO_ROWS = (None, None, None, None)
CODES = "uint4", "uint8", "float8", "mxfp4"  # numbered as in linear_quantized.cpp
FEATURES = 16  # output features side by side in a packed weight; the same as in linear.cpp


QUAD_BYTES = 4 * FEATURES  # four codes of each feature of a block; as in linear_integer.cpp
GROUPED = "scales", "offsets"  # fields with a value for each output feature and group


class CpuKernels(TorchKernels):
    name = "cpu"
    is_batch_invariant = True

    def __init__(self) -> None:
        build.load()

    def packed_shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        return (-(-out_features // FEATURES), in_features, FEATURES)

    def pack(self, weight: Tensor) -> Tensor:
        *lead, out_features, in_features = weight.shape
        blocks = -(-out_features // FEATURES)
        padded = F.pad(weight, (0, 0, 0, blocks * FEATURES - out_features))
        return padded.view(*lead, blocks, FEATURES, in_features).transpose(-1, -2).contiguous()

    def quantized_shapes(
        self, out_features: int, in_features: int, format: WeightFormat
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Sixteen output features side by side, as in a dense weight."""
        blocks, groups = -(-out_features // FEATURES), format.num_groups(in_features)
        bytes_of_codes = FEATURES * format.bits // 8
        codes, kinds = (blocks, in_features, bytes_of_codes), dict.fromkeys(GROUPED, torch.float32)
        if is_integer(format):
            quads = -(-in_features // chunk_of(format)) * chunk_of(format) // 4
            codes, kinds = (blocks, quads * format.bits // 8, QUAD_BYTES), _kinds_of(format)
        ours = {field: ((blocks, groups, FEATURES), kind) for field, kind in kinds.items()}
        ours["codes"] = codes, torch.uint8
        plain = format.shapes(out_features, in_features)
        return {field: ours.get(field, shape) for field, shape in plain.items()}

    def pack_quantized(self, rows: QuantizedRows, format: WeightFormat) -> dict[str, Tensor]:
        if is_integer(format):
            codes, kinds = _pack_quads(rows.codes, format), _kinds_of(format)
        else:
            codes, kinds = self.pack(rows.codes), dict.fromkeys(GROUPED, torch.float32)
            if format.bits == 4:
                codes = codes[..., : FEATURES // 2] | codes[..., FEATURES // 2 :] << 4
        scales = scales_of(rows.scales).to(kinds["scales"])
        made = {"codes": codes, "scales": self.pack(scales)}
        if rows.offsets is not None:
            made["offsets"] = self.pack(rows.offsets.to(kinds["offsets"]))
        for field in ("group_of", "input_scale"):
            if (tensor := getattr(rows, field)) is not None:
                made[field] = tensor
        return made

    def dense_product(self, x: Tensor, weight: DenseWeight) -> Tensor:
        out = x.new_empty(x.shape[0], weight.out_features)
        self.product_into(x, weight, out)
        return out

    def quantized_product(self, x: Tensor, weight: QuantizedWeight) -> Tensor:
        out = x.new_empty(x.shape[0], weight.out_features)
        _quantized_into(x, weight, out)
        return out

    def product_into(self, x: Tensor, weight: LinearWeight, out: Tensor) -> None:
        match weight:
            case DenseWeight():
                build.other_operators().linear.default(x, weight.data, weight.bias, out)
            case QuantizedWeight():
                _quantized_into(self.round_input(x, weight), weight, out)
            case JoinedWeight():
                super().product_into(x, weight, out)

    def round_input(self, x: Tensor, weight: QuantizedWeight) -> Tensor:
        format = weight.format
        if format.activations == "plain":
            return x
        out = x.new_empty(x.shape)
        group = format.group if format.activations == "float8_group" else None
        build.other_operators().round_float8.default(
            x, weight.input_scale, group or x.shape[-1], out
        )
        return out

    def grouped_product(self, x: Tensor, weights: LinearWeight, starts: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], weights.out_features)
        match weights:
            case DenseWeight(data, bias):
                build.other_operators().grouped.default(x, data, bias, starts, out)
            case QuantizedWeight():
                format = weights.format
                if is_integer(format):
                    torch.ops.slotzero.integer_grouped.default(
                        x, weights.codes, weights.scales, weights.offsets, weights.bias, starts,
                        format.bits, format.zero, format.group or weights.in_features, out,
                    )  # fmt: skip
                    return out
                build.other_operators().quantized_grouped.default(
                    self.round_input(x, weights), *_quantized(weights), weights.bias, starts,
                    CODES.index(format.codes), format.zero, format.group or weights.in_features,
                    out,
                )  # fmt: skip
            case JoinedWeight(parts):
                return torch.cat([self.grouped_product(x, part, starts) for part in parts], dim=-1)
        return out

    def per_head_product(self, x: Tensor, weights: Tensor, transposed: bool) -> Tensor:
        out = x.new_empty(*x.shape[:2], weights.shape[1 if transposed else 2])
        build.other_operators().per_head.default(x, weights, transposed, out)
        return out

    def rms_norm(
        self, x: Tensor, weight: Tensor | None, eps: float, is_centred: bool = False
    ) -> Tensor:
        out = x.new_empty(x.shape)
        torch.ops.slotzero.rms_norm.default(x, weight, eps, is_centred, out)
        return out

    def add_norm(self, x: Tensor, residual: Tensor, norms: ResidualNorms) -> tuple[Tensor, Normed]:
        total, normed = torch.empty_like(residual), torch.empty_like(residual)
        torch.ops.slotzero.add_norm.default(x, residual, *norms, total, normed)
        return total, Normed(total if norms.next is None else normed)

    def gate(self, gates: Tensor, values: Tensor, activation: Activation) -> Tensor:
        out = values.new_empty(values.shape)
        number = ACTIVATIONS.index(activation)
        torch.ops.slotzero.gate.default(gates, values, number, out)
        return out

    def rotate(self, x: Tensor, angles: Angles) -> Tensor:
        out = x.new_empty(x.shape)
        torch.ops.slotzero.rotate.default(x, *angles, out)
        return out

    def softmax(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape)
        torch.ops.slotzero.softmax.default(x, out)
        return out

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        out = x.new_empty(x.shape)
        torch.ops.slotzero.softcap.default(x, cap, out)
        return out

    def rope_angles(self, tokens: Tokens, frequency: Tensor, factor: float) -> Angles:
        size = len(tokens.positions), 1, frequency.shape[-1]
        angles = Angles(frequency.new_empty(size), frequency.new_empty(size))
        torch.ops.slotzero.rope_angles.default(tokens.positions, frequency, factor, *angles)
        return angles

    def embed_ids(self, ids: Tensor, weight: LinearWeight) -> Tensor:
        block, feature = ids // FEATURES, ids % FEATURES
        if isinstance(weight, DenseWeight):
            return weight.data[block, :, feature]
        assert isinstance(weight, QuantizedWeight)
        format = weight.format
        if is_integer(format):
            out = weight.scales.new_empty(len(ids), weight.in_features, dtype=weight.dtype)
            torch.ops.slotzero.integer_rows.default(
                ids, weight.codes, weight.scales, weight.offsets, format.bits, format.zero,
                format.group or weight.in_features, weight.out_features, out,
            )  # fmt: skip
            return out
        if format.bits == 4:
            half = FEATURES // 2
            codes = weight.codes[block, :, feature % half] >> (feature // half * 4)[:, None] & 15
        else:
            codes = weight.codes[block, :, feature]
        scales, offsets = weight.scales[block, :, feature], weight.offsets
        rows = QuantizedRows(
            codes, scales, None if offsets is None else offsets[block, :, feature], weight.group_of
        )
        return dequantise(rows, format)

    def store_kv(
        self,
        k: Tensor,
        v: Tensor,
        kv: PagedKv,
        tokens: Tokens,
    ) -> None:
        torch.ops.slotzero.store_kv.default(k, v, *kv, *tokens)

    def attend(
        self,
        q: Tensor,
        sinks: Tensor | None,
        kv: PagedKv,
        plan: TorchPlan,
        heads: Heads,
    ) -> Tensor:
        out = q.new_empty(q.shape[0], heads.num_heads, heads.value_dim)
        torch.ops.slotzero.attend.default(
            q, sinks, *kv, *plan.tokens,
            *(plan.branches or NO_BRANCHES), plan.taken,
            heads.scale, heads.window, heads.is_chunked, heads.softcap, out,
        )  # fmt: skip
        return out

    def select_keys(
        self, q: Tensor, weights: Tensor, kv: PagedKv, plan: TorchPlan, top_k: int
    ) -> Tensor:
        num_positions = kv.page_table.shape[1] * kv.pages.shape[1]
        taken = q.new_empty(len(q), num_positions, dtype=torch.uint8)
        build.other_operators().select_keys.default(
            q, weights, kv.pages, kv.page_table, *plan.tokens,
            *(plan.branches or NO_BRANCHES)[:2], top_k, taken,
        )  # fmt: skip
        return taken

    def convolve(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        step: RecurrentStep,
        shape: Scan,
    ) -> Tensor:
        out, states, trail = x.new_empty(len(x), shape.channels), step.states, step.trail
        build.other_operators().convolve.default(
            x, weight, bias, *step.tokens, *(step.rows[:4] if step.rows else NO_ROWS),
            states.conv, states.conv_kept, states.rows, None if trail is None else trail.conv,
            shape.interval, shape.kind == "conv", out,
        )  # fmt: skip
        return out

    def scan(
        self,
        mixed: Tensor,
        gates: Tensor,
        beta: Tensor | None,
        weights: ScanWeights,
        step: RecurrentStep,
        shape: Scan,
    ) -> Tensor:
        out, states, trail = mixed.new_empty(len(mixed), shape.inner_size), step.states, step.trail
        assert states.scan is not None
        build.other_operators().scan.default(
            mixed, gates, beta, *weights, *step.tokens,
            *(step.rows[:4] if step.rows else NO_ROWS),
            states.scan, states.scan_kept, states.rows, None if trail is None else trail.scan,
            shape.num_groups, *shape.dt_limit, shape.interval, shape.kind == "kda", out,
        )  # fmt: skip
        return out

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        tables: SamplingTables,
        out: Sampled,
    ) -> None:
        torch.ops.slotzero.sample.default(logits, slots, positions, *tables, *out)


def _quantized_into(x: Tensor, weight: QuantizedWeight, out: Tensor) -> None:
    """Write the product of x, already rounded, to `out`."""
    format = weight.format
    group = format.group or weight.in_features
    if is_integer(format):
        torch.ops.slotzero.integer.default(
            x, weight.codes, weight.scales, weight.offsets, weight.bias, format.bits, format.zero,
            group, out,
        )  # fmt: skip
        return
    build.other_operators().quantized.default(
        x, *_quantized(weight), weight.bias, CODES.index(format.codes), format.zero, group, out
    )


def _quantized(
    weight: QuantizedWeight,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    return weight.codes, weight.scales, weight.offsets, weight.group_of


def is_integer(format: WeightFormat) -> bool:
    """Return whether products are computed in integers: with activations in 8 bits."""
    if format.codes not in ("uint4", "uint8") or format.activations != "plain":
        return False
    return not format.is_scattered and (format.group is None or format.group % 16 == 0)


def chunk_of(format: WeightFormat) -> int:
    """Return the number of activations that share a scale."""
    return 16 if format.group is not None and format.group % 32 else 32


def _kinds_of(format: WeightFormat) -> dict[str, torch.dtype]:
    """Return the dtypes of scales and offsets in an integer product, which hold them exactly."""
    is_half = format.scale_dtype is torch.float16
    kinds = is_half, is_half and format.has_half_offsets
    return {
        field: torch.float16 if half else torch.float32
        for field, half in zip(GROUPED, kinds, strict=True)
    }


def _pack_quads(codes: Tensor, format: WeightFormat) -> Tensor:
    """Pack codes [..., out_features, in_features] as linear_integer.cpp reads them."""
    *lead, rows, columns = codes.shape
    quads = -(-columns // chunk_of(format)) * chunk_of(format) // 4
    shape = (*lead, -(-rows // FEATURES), quads * format.bits // 8, QUAD_BYTES)
    packed = codes.new_empty(shape)
    torch.ops.slotzero.pack_integer.default(codes.contiguous(), format.bits, packed)
    return packed
