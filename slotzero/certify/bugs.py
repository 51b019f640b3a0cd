"""Real bugs of other engines, each as the same fault in the corresponding tensor of this engine.

Numbers are issues or pull requests. A bug of one runner is injected into that runner; a bug that
runners share, or whose runner does not exist here, into all.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from slotzero.graph import TensorKind
from slotzero.speculative.passes import DRAFT, EXTEND, VERIFY


@dataclass(frozen=True)
class Bug:
    number: str
    fault: str
    where: tuple[str, ...]
    """Names or kinds of tensors."""
    why: str
    runner: str = ""
    """Name of the runner without its width; empty for any."""


BUGS = (
    # The four of the seed documents.
    Bug("SGLang 26292", "skip the pad", ("slots",),
        "padded rows kept an old req_pool_indices and read a live request's pages: in draft-extend "
        "and three more runners, after it was mended in another"),
    Bug("SGLang 24743", "skip the pad", ("token_slots", "positions"),
        "the tail of out_cache_loc_swa was not zeroed: padded tokens wrote into live KV"),
    Bug("SGLang 24743", "wrong dtype", ("token_slots", "positions"),
        "out_cache_loc_swa was int64 where its kernels expected int32"),
    Bug("SGLang 24743", "stale row", ("page_table_sliding", "kv_sliding"),
        "its stale tail wrote where a live request's window was"),
    Bug("SGLang 24743", "wrong dtype", ("page_table_sliding", "kv_sliding"),
        "the same type, in the group that it was for"),
    Bug("SGLang 24743", "another group's location", ("kv_sliding",),
        "sliding layers stored where full layers do"),
    Bug("SGLang 22404", "global instead of local count", ("counts", "new_length"),
        "num_token_non_padded was global at capture and local at replay"),
    Bug("SGLang 21987", "packed instead of uniform stride", ("verify_slots", "verify_positions"),
        "cu_seqlens_q was packed at replay and uniform at capture", runner=EXTEND),
    # Padding and stale rows.
    Bug("SGLang 23037", "skip the pad", ("slots",),
        "stale req_pool_indices, and what hangs on them, in padded rows", runner=DRAFT),
    Bug("SGLang 23037", "stale row", ("draft_hidden",),
        "hidden states of the step before were drafted from", runner=EXTEND),
    Bug("TRT-LLM 13278", "skip the pad", ("slots",), "the tail of state_indices named live slots"),
    Bug("vLLM 47066", "pad off by one", ("slots",),
        "a padded row's idx_mapping named another request, whose draft logits it overwrote",
        runner=DRAFT),
    Bug("SGLang 32555", "pad to bucket only", ("slots",),
        "the full buffer was handed out, and its end never refreshed"),
    Bug("vLLM 23175", "pad to bucket only", ("counts",), "only seq_lens[:num_reqs] was copied"),
    Bug("SGLang 1094", "skip the pad", ("counts",), "seq_lens of padded rows were not set"),
    Bug("xLLM 1939", "skip the pad", ("counts",),
        "metadata was made for 100 real rows of a graph of 112"),
    Bug("SGLang 10892", "skip the pad", ("verify_positions",), "the tail of positions was stale",
        runner=EXTEND),
    Bug("SGLang 24401", "skip the pad", ("verify_positions",), "the same in the target's runner",
        runner=VERIFY),
    Bug("vLLM 37873", "skip the pad", ("positions",),
        "positions of padding were advanced in place and never refreshed"),
    Bug("vLLM 41873", "skip the pad", ("new_length",),
        "is_prefilling of padded rows was stale: padding was taken for prefill"),
    Bug("SGLang 19902", "skip the pad", ("logits",), "padded rows of the output were unwritten"),
    Bug("TRT-LLM 5058", "skip the pad", ("sampled",), "what was sampled for padding was used"),
    Bug("vLLM 37442", "pad off by one", ("logits",), "undefined output of padding became NaN"),
    Bug("SGLang 26313", "skip the publish", ("slots",),
        "an idle batch ran over the metadata of the step before"),
    Bug("vLLM 39833", "stale row", ("tokens", "drafted_at"),
        "a reused row kept its last owner's tokens and drafts"),
    Bug("vLLM 37728", "stale row", ("page_table",), "a finished request's block row was kept"),
    Bug("LMDeploy 4569", "late host copy", ("page_table",),
        "block_offsets were the previous step's: padding wrote into live blocks"),
    Bug("PyTorch 74419", "stale row", ("derived", "output"),
        "a copy inside a graph missed the last elements"),
    Bug("SGLang 34184", "skip the pad", ("slots",),
        "mamba_track_indices of padded requests named rows of live ones"),
    Bug("SGLang 34184", "kernel writes slot 0", ("conv_snapshots", "scan_snapshots"),
        "the same, in what they were written to"),
    Bug("SGLang 34184", "stale snapshot mask", ("conv_snapshots", "scan_snapshots"),
        "mamba_track_mask was the step's before"),
    Bug("SGLang 32555", "stale row", ("snapshot_rows", "conv_state", "scan_state"),
        "the end of a larger batch's track rows was read"),
    # Layouts and values of recording and replay.
    Bug("SGLang 19807", "packed instead of uniform stride", ("verify_slots",),
        "qo_indptr was packed at replay and uniform at capture", runner=EXTEND),
    Bug("SGLang 27545", "packed instead of uniform stride", ("verify_positions",),
        "two strides of one draft layout", runner=EXTEND),
    Bug("SGLang 16974", "global instead of local count", ("counts",),
        "the count of rows stood for that of tokens"),
    Bug("SGLang 22229", "wrong axis", ("logits",), "[:, a:b] was zeroed instead of [a:b]"),
    Bug("SGLang 25015", "off by one", ("verify_positions",),
        "a drafter's positions advanced in place at capture", runner=EXTEND),
    Bug("vLLM 32312", "skip the write", ("length",),
        "max_seq_len was not advanced from one step of a drafter to the next", runner=VERIFY),
    Bug("TRT-LLM 7373", "off by one", ("new_length",), "warm-ups had moved kv_len in place"),
    Bug("TRT-LLM 17110", "baked host value", ("positions",), "a host loop's positions were frozen"),
    Bug("vLLM 33360", "baked host value", ("new_length",), "max_seqlen_k was baked as 0"),
    Bug("SGLang 26521", "skip the write", ("new_length",), "cache_seqlens was not written"),
    Bug("SGLang 6162", "skip the write", ("token_slots", "positions"),
        "attention metadata was not rewritten under the graph"),
    Bug("SGLang 27840", "wrong dtype", ("length", "new_length"), "seq_lens were int32 and int64"),
    Bug("SGLang 12687", "wrong dtype", ("counts",), "int64 seq_lens went to an int32 kernel"),
    # Addresses and memory.
    Bug("SGLang 12060", "buffer replaced", ("constant",), "new weights had new addresses"),
    Bug("SGLang 4855", "buffer replaced", ("page_table",), "page_table was assigned, not copied"),
    Bug("SGLang 26134", "buffer replaced", ("derived",), "replay made metadata tensors anew"),
    Bug("vLLM 35175", "to another buffer", ("slots", "counts"),
        "metadata was no longer copied to the buffers that the graph reads"),
    Bug("vLLM 37639", "buffer replaced", ("logits",),
        "draft logits were written to a tensor that was not there at capture"),
    Bug("vLLM 53488", "aliased into the pool", ("output",),
        "a graph overwrote another's output, in the pool that they share"),
    Bug("TRT-LLM 10393", "aliased into the pool", ("derived",), "graphs reused metadata buffers"),
    # Kernels.
    Bug("SGLang 32477", "kernel writes slot 0", ("kv_full", "kv_sliding"),
        "padding wrote NaN into slot 0"),
    Bug("vLLM 43810", "kernel writes another slot", ("kv_full", "kv_sliding"),
        "slot -1 was the last one: padding overwrote a live request's KV"),
    Bug("vLLM 35969", "kernel reads another slot", ("page_table",), "block_table[-1] was read"),
    Bug("LMDeploy 4613", "kernel reads past its length", ("kv_full", "kv_sliding"),
        "the tail of flattened KV was not initialised"),
    Bug("SGLang 1779", "kernel reads past its length", ("page_table",),
        "req_to_token was torch.empty, and read where nothing was written"),
    # Copies that are not awaited.
    Bug("vLLM 25279", "late host copy", ("slots", "counts"),
        "the host wrote to a pinned buffer whose copy was still running"),
    Bug("vLLM 36013", "late host copy", ("sampled",), "results were read before they had arrived"),
    Bug("vLLM 39115", "late host copy", ("logprobs", "top_ids", "top_logprobs"),
        "one copy event served several steps"),
)  # fmt: skip


def numbers_of(runner: str, culprit: str, kind: TensorKind | None, fault: str) -> tuple[str, ...]:
    """Return the bugs that were this fault. `kind`: of the tensor; None for a fault of the
    engine."""
    names = {culprit, "" if kind is None else kind.value}
    return tuple(
        bug.number
        for bug in BUGS
        if bug.fault == fault and not names.isdisjoint(bug.where) and bug.runner in ("", runner)
    )


def all_numbers(runners: Iterable[str]) -> set[str]:
    """Return the numbers of all bugs that these runners (names without width) can have."""
    return {bug.number for bug in BUGS if bug.runner in ("", *runners)}
