"""What of this machine an engine gets where several serve side by side.

It knows an engine's number and how many there are, and nothing else of the others. `taken` runs in
the engine's process, before anything touches a device: only there is torch at hand to count them.

    GPUs       engine i gets tensor_parallel_size of those that are visible, from i times as many on
    threads    of a CPU: an equal part, unless OMP_NUM_THREADS says how many
    memory     for KV, on a CPU: an equal part, unless kv_cache_memory says how much

The rule: too few GPUs are refused by every engine, rather than left to some that find none and take
the CPU instead.
"""

import os
from dataclasses import dataclass, replace

from slotzero.config import EngineConfig
from slotzero.errors import ConfigError

GPUS, THREADS = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Share:
    index: int = 0
    size: int = 1

    @classmethod
    def read(cls, text: str) -> "Share":
        index, size = text.split("/")
        return cls(int(index), int(size))

    def __str__(self) -> str:
        return f"{self.index}/{self.size}"

    def taken(self, config: EngineConfig) -> EngineConfig:
        """-> config, of an engine that has this much"""
        if self.size == 1:
            return config
        import torch

        self._take_threads()
        # asked of the driver's library: CUDA itself would read the environment now, and never again
        num_gpus = 0 if config.backend == "cpu" else torch.cuda.device_count()
        if num_gpus:
            self._take_gpus(config.tensor_parallel_size, num_gpus)
            return config
        return self._with_memory(config)

    def _take_threads(self) -> None:
        import torch

        if THREADS not in os.environ:
            num = max(1, torch.get_num_threads() // self.size)
            os.environ[THREADS] = str(num)  # for processes that are started from here
            torch.set_num_threads(num)

    def _take_gpus(self, num: int, num_gpus: int) -> None:
        import torch

        if num * self.size > num_gpus:
            raise ConfigError(
                f"data_parallel_size={self.size} with tensor_parallel_size={num} needs "
                f"{num * self.size} GPUs: this machine has {num_gpus}"
            )
        visible = os.environ.get(GPUS, "").split(",") if GPUS in os.environ else range(num_gpus)
        ours = visible[self.index * num : (self.index + 1) * num]
        os.environ[GPUS] = ",".join(map(str, ours))
        if torch.cuda.device_count() != num:
            raise ConfigError(
                f"data_parallel_size={self.size}: GPUs cannot be shared out here; start a server "
                f"for each of them, with its {GPUS}"
            )

    def _with_memory(self, config: EngineConfig) -> EngineConfig:
        if config.kv_cache_memory is not None:
            return config
        import torch

        from slotzero.pools.budget import free_bytes

        free = free_bytes(torch.device("cpu"), config.gpu_memory_utilization)
        return replace(config, kv_cache_memory=free // self.size // config.tensor_parallel_size)


WHOLE = Share()
