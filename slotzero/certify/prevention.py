"""What prevents the bugs of other engines here: by fault, and for bugs that have no fault."""

from collections.abc import Mapping
from dataclasses import dataclass

PREVENTION: Mapping[str, str] = {
    "aliased into the pool": (
        "all that a graph sees is allocated once, in the registry or a pool; intermediates lie "
        "in memory of the backend"
    ),
    "another group's location": (
        "each group of layers has a page table and pages of its own, and a layer is given only "
        "those of its group"
    ),
    "baked host value": (
        "a step function gets from the host what is published and nothing else; positions and "
        "lengths are derived in the graph"
    ),
    "buffer replaced": (
        "the registry is frozen before the first capture, and each replay compares address, "
        "shape, stride and dtype of every tensor"
    ),
    "capture of another size writes": (
        "a size is captured over an empty step, whose rows all belong to slot 0 and write nothing"
    ),
    "captured before the warm-up has ended": (
        "the backend waits for its stream between the warm-up and the capture"
    ),
    "content lost in a reload": (
        "new weights are checked as a whole, then copied to where the old ones are"
    ),
    "contents of graph memory needed": (
        "what must last from step to step is in registered tensors; an intermediate is written "
        "before it is read"
    ),
    "copy not awaited": "a host buffer is used again, and a result read, after its copy's event",
    "counted in rows instead of tokens": (
        "a tensor declares whether it has an entry per row or per token"
    ),
    "draft that writes KV": (
        "a drafter has pages of its own, or is given those of the target to read"
    ),
    "expert routing that counts padded rows": "experts leave out rows of slot 0",
    "global count of real tokens instead of the rank's": (
        "a rank counts the real rows of its share on the device"
    ),
    "global instead of local count": "counts are published by row, and no sum of them is",
    "grammar masks laid out by rows": (
        "a mask is in the row of its request's slot, and is read there"
    ),
    "graph memory no longer held": (
        "the backend never frees or moves what a recording uses; on CUDA one graph that is "
        "never dropped holds the pool"
    ),
    "host predicate evaluated at capture": (
        "a step function knows its size and no values; reading one from the device is refused "
        "at capture"
    ),
    "inputs copied out of order": "inputs are copied on the stream of the steps",
    "kernel reads another slot": "kernels find rows and pages by the published slots",
    "kernel reads past its length": "kernels read up to the length in the slot's row",
    "kernel writes another slot": "kernels find rows and pages by the published slots",
    "kernel writes slot 0": "slot 0 holds no page, and kernels write nothing for it",
    "kernel writes what it only reads": "places to write are those from the slot's length on",
    "late host copy": (
        "a ring of host buffers, each with an event; staged writes are applied in the order of "
        "the stream"
    ),
    "not reset between replays": (
        "outputs are written as a whole by every replay, and counters are cleared in the graph"
    ),
    "off by one": "positions are derived from the length in the slot's row, by one kernel",
    "packed instead of uniform stride": (
        "the capture, the replay and the eager step run the same function, so they have one layout"
    ),
    "one event for all steps": "each buffer of a ring has an event of its own",
    "pad off by one": "publishing writes the pad value to the end of the buffer",
    "pad to bucket only": "publishing writes the pad value to the end of the buffer",
    "padded row below zero": "a padded row has the length of slot 0, which is 0, and adds 0 to it",
    "padded tokens join the last row": "a token past the last count belongs to slot 0",
    "padding enters a reduction": "no kernel reduces over rows; activations are rounded by row",
    "prompt row in the decode graph": (
        "the step says whether all rows decode; the worker compares the counts once more"
    ),
    "ranks that replay different sizes": (
        "rank 0 sends the sizes with every step, and a rank that would pick another one stops"
    ),
    "recording for fewer rows": (
        "the key holds tokens and rows, and is picked once for planning and running"
    ),
    "ring of one buffer": "a ring has four buffers, and refuses results that are older",
    "rows of two requests exchanged": "a request keeps its slot, and rows are never moved",
    "rows one column too narrow": (
        "tables are as wide as the longest context, and are captured with their strides"
    ),
    "sampling state of a neighbour": (
        "sampling parameters are read from the row of the slot; noise depends on seed and position"
    ),
    "skip the pad": "publishing writes the pad value to the end of the buffer",
    "skip the publish": (
        "every published tensor carries the number of the step, and a replay compares it"
    ),
    "skip the write": (
        "the proof at start-up: derived tensors must be rewritten over the whole size"
    ),
    "stale row": (
        "a slot's row is written as a whole when a request gets it, and derived tensors in "
        "every replay"
    ),
    "stale snapshot mask": "whether a snapshot is due is derived from the position in the graph",
    "state not zeroed for a new request": (
        "a row that starts at position 0 does not read the state of its slot"
    ),
    "stride of the largest size": (
        "kernels are given tensors of the size that runs, with their strides"
    ),
    "to another buffer": (
        "a graph sees registered tensors only, and the host publishes by name to the same"
    ),
    "wrong axis": "padding is zeroed by row, by slot",
    "wrong dtype": "a tensor has one dtype, from the registry, and replays compare it",
    "wrong width": "the width is a part of the runner's name, and so of the key",
}
"""What keeps each fault from happening, for the faults that were real bugs."""


@dataclass(frozen=True)
class Prevented:
    """A real bug for which there is no mutant, because it has no place here."""

    number: str
    what: str
    why: str


PREVENTED = (
    Prevented("SGLang 35848", "a planner refused padded rows without tokens",
        "a row of zero tokens is what padding is: the proof at start-up replays only such rows"),
    Prevented("SGLang 30834", "the output of the first capture served all, and was too small",
        "outputs are allocated once, for the largest size, before anything is captured"),
    Prevented("SGLang 24243", "slot 0, to which padding points, was given to a request",
        "`SlotPool` starts at 1, and `Staging.stage` refuses writes to slot 0"),
    Prevented("SGLang 28337", "a buffer was on the CPU, and the graph read it there",
        "`Registry` refuses a tensor of another device by name"),
    Prevented("vLLM 50874", "a buffer of routed experts was too small with padding",
        "`Registry.publish` and `Staging.stage` refuse what does not fit, by name"),
    Prevented("SGLang 38992", "a variant was missing in the key, and always ran eagerly",
        "a step picks its key by the ladders from which sizes are captured, and a test compares "
        "the two; eager steps are counted with their reason"),
    Prevented("vLLM 47460", "a drafter's runner had no keys, and always ran eagerly",
        "all runners are one class, and every eager step is counted with its reason"),
    Prevented("vLLM 53407", "half of the batch sizes with drafts had no graph of their own",
        "runners with drafts have the sizes of decode, in rows"),
    Prevented("SGLang 34561", "a recurrent layer ran eagerly between two graphs",
        "a step is one graph"),
    Prevented("vLLM 52632", "an empty list stood for None on the way to the graph",
        "what a graph needs from the host is published, with a pad value for what is missing"),
    Prevented("vLLM 47029", "the -1 of a missing draft reached the embedding",
        "a missing draft is a count, and tables hold token ids only"),
    Prevented("TRT-LLM 8231", "no slot was left for padding",
        "slot 0 belongs to padding alone"),
    Prevented("TRT-LLM 16157", "requests made up for padding held pages that moved",
        "padding is slot 0 and holds no page"),
)  # fmt: skip
