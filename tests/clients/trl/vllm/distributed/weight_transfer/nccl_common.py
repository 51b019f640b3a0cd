"""The trainer's end of a weight transfer: rank 0 of a gloo group of torch.distributed."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from torch import Tensor, distributed
from torch.distributed import distributed_c10d as c10d

TIMEOUT = timedelta(seconds=120)
GROUP = "weight_transfer"


class Endpoint:
    """What TRL keeps, and clears when it closes."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.group = SimpleNamespace(store=None, socket=None)

    def broadcast(self, tensor: Tensor) -> None:
        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._backend.broadcast([tensor], options).wait()


def trainer_init(init_info: dict[str, Any]) -> Endpoint:
    address, size = (init_info["master_address"], init_info["master_port"]), init_info["world_size"]
    store: Any = distributed.TCPStore(*address, size, is_master=True, timeout=TIMEOUT)
    for prefix in (GROUP, f"{GROUP}/", "cpu/"):
        store = c10d.PrefixStore(prefix, store)
    return Endpoint(distributed.ProcessGroupGloo(store, 0, size, TIMEOUT))
