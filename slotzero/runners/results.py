"""The outputs of a step that are copied to the host; the last ones are those of sampling.

The rule: an output has one entry per row or one per token, as registered, and only the entries of
real rows are copied.
"""

from collections.abc import Sequence

from slotzero.graph import Registry
from slotzero.graph.transfer import Download, DownloadRing
from slotzero.sampling.tables import Sampled

NUM_MORE = len(Sampled._fields) - 1  # outputs that are copied only with log probabilities


class ResultRing:
    def __init__(
        self, registry: Registry, names: Sequence[str], deadline: float | None = None
    ) -> None:
        self.names = tuple(names)
        self.ring = DownloadRing([registry[name] for name in names], deadline)
        self._per = [registry.entry(name).per for name in names]

    def download(self, num_rows: int, num_tokens: int, *, with_logprobs: bool) -> Download:
        """Download all outputs, or without log probabilities only the first ones."""
        lengths = {"row": num_rows, "token": num_tokens}
        num = len(self.names) - (0 if with_logprobs else NUM_MORE)
        return self.ring.download([lengths[per] for per in self._per[:num]])
