"""What the host is sent of a step: outputs by name, of which the last are what was sampled.

It does not know who reads them. The rule: an output has one entry a row or one a token, as it is
registered, and so many are sent.
"""

from collections.abc import Sequence

from slotzero.graph import Registry
from slotzero.graph.transfer import Download, DownloadRing
from slotzero.sampling.tables import Sampled

NUM_MORE = len(Sampled._fields) - 1  # outputs that are sent only where log probabilities are wanted


class ResultRing:
    def __init__(
        self, registry: Registry, names: Sequence[str], deadline: float | None = None
    ) -> None:
        self.names = tuple(names)
        self.ring = DownloadRing([registry[name] for name in names], deadline)
        self._per = [registry.entry(name).per for name in names]

    def download(self, num_rows: int, width: int, *, with_logprobs: bool) -> Download:
        """The first outputs by name, or all of them."""
        lengths = {"row": num_rows, "token": num_rows * width}
        num = len(self.names) - (0 if with_logprobs else NUM_MORE)
        return self.ring.download([lengths[per] for per in self._per[:num]])
