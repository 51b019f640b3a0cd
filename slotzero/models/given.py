"""What a layer is given of a step, as one flat row of tensors: what is compiled takes no other.

Its own weights and the plan of attention follow it. What a kind of layer does not need is None, for
good: a compiled layer has no place for it.
"""

from typing import NamedTuple

from torch import Tensor

from slotzero.kernels.types import Rows, Tokens
from slotzero.kernels.types_recurrent import States, Trail


class Given(NamedTuple):
    residual: Tensor  # [T, hidden]
    x: Tensor  # the same under the layer's norm, see Normed
    squares: Tensor | None
    slots: Tensor  # [T]
    layer_input: Tensor | None = None  # [T, input_size]
    expert_starts: Tensor | None = None
    # of layers that attend
    cos: Tensor | None = None
    sin: Tensor | None = None
    kv_pages: Tensor | None = None
    page_table: Tensor | None = None
    # of recurrent ones
    positions: Tensor | None = None
    row_slots: Tensor | None = None  # as in Rows, like the next three
    row_starts: Tensor | None = None
    row_counts: Tensor | None = None
    row_ends: Tensor | None = None
    conv: Tensor | None = None  # as in States, like the next four
    scan: Tensor | None = None
    conv_kept: Tensor | None = None
    scan_kept: Tensor | None = None
    kept_rows: Tensor | None = None
    conv_trail: Tensor | None = None
    scan_trail: Tensor | None = None

    def attending(self, cos: Tensor, sin: Tensor, kv_pages: Tensor, page_table: Tensor) -> "Given":
        return self._replace(cos=cos, sin=sin, kv_pages=kv_pages, page_table=page_table)

    def recurring(
        self, tokens: Tokens, rows: Rows | None, states: States, trail: Trail | None
    ) -> "Given":
        conv_trail, scan_trail = (None, None) if trail is None else trail
        given = self._replace(
            positions=tokens.positions,
            conv=states.conv,
            scan=states.scan,
            conv_kept=states.conv_kept,
            scan_kept=states.scan_kept,
            kept_rows=states.rows,
            conv_trail=conv_trail,
            scan_trail=scan_trail,
        )
        if rows is None:
            return given
        slots, starts, counts, ends, _ = rows
        return given._replace(row_slots=slots, row_starts=starts, row_counts=counts, row_ends=ends)

    @property
    def tokens(self) -> Tokens:
        assert self.positions is not None
        return Tokens(self.slots, self.positions)

    @property
    def trail(self) -> Trail | None:
        if self.conv_trail is None or self.scan_trail is None:
            return None
        return Trail(self.conv_trail, self.scan_trail)

    @property
    def rows(self) -> Rows | None:
        """Rows that leave a trail have as many tokens each."""
        slots, starts, counts, ends = (
            self.row_slots, self.row_starts, self.row_counts, self.row_ends,
        )  # fmt: skip
        if slots is None or starts is None or counts is None or ends is None:
            return None
        span = 0 if self.conv_trail is None else len(self.slots) // len(slots)
        return Rows(slots, starts, counts, ends, span)

    @property
    def states(self) -> States:
        assert self.conv is not None and self.scan is not None
        return States(self.conv, self.scan, self.conv_kept, self.scan_kept, self.kept_rows)
