"""The share of this machine that an engine gets if several serve in parallel.

This module knows an engine's index and the number of engines. `taken` runs in the engine's process
before anything touches a device, since only there torch can count GPUs.

    GPUs       engine i gets tensor_parallel_size visible GPUs, from i * tensor_parallel_size on
    threads    on a CPU: an equal part, unless OMP_NUM_THREADS is set
    memory     for the KV cache on a CPU: an equal part, unless kv_cache_memory is set

The rule: if there are too few GPUs every engine refuses to start, so that none silently uses the
CPU instead.
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
        """Take this share, and return the config of an engine that has it."""
        if self.size == 1:
            return config
        import torch

        self._take_threads()
        # counts with the driver's library: CUDA itself would read the environment only now
        num_gpus = 0 if config.backend == "cpu" else torch.cuda.device_count()
        if num_gpus:
            self._take_gpus(config.tensor_parallel_size, num_gpus)
            return config
        return self._with_memory(config)

    def _take_threads(self) -> None:
        import torch

        from slotzero.system.processors import num_processors

        if THREADS not in os.environ:
            num = max(1, num_processors() // self.size)
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
        own = visible[self.index * num : (self.index + 1) * num]
        os.environ[GPUS] = ",".join(map(str, own))
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
