"""vLLM's routes for weight transfer, which TRL's trainers call.

They exist only with --enable-admin, and are adapters over `Admin`. The rule: tensors that are sent
between /start_weight_update and /finish_weight_update replace weights together, at the end.

The trainer's group is one of torch.distributed, as for SGLang's routes, with the name GROUP. vLLM's
own communicator, which calls NCCL beside torch, is not spoken here.
"""

from typing import Annotated, Self

from fastapi import APIRouter, Response
from pydantic import Field, model_validator

from slotzero.errors import RequestError
from slotzero.server.app_state import AppState
from slotzero.server.chat_messages import RequestModel
from slotzero.server.messages import StageBroadcast
from slotzero.server.replies import ReplyModel
from slotzero.server.routes_admin import Version
from slotzero.server.streaming import responses, told

GROUP = "weight_transfer"
CHUNK_BYTES = 1 << 30  # vLLM's default
Names = Annotated[list[str], Field(min_length=1, fail_fast=True)]


class InitInfo(RequestModel):
    master_address: Annotated[str, Field(min_length=1)]
    master_port: Annotated[int, Field(ge=1, lt=1 << 16)]
    rank_offset: int
    world_size: int
    packed: bool = False
    packed_buffer_size_bytes: Annotated[int, Field(ge=1)] = CHUNK_BYTES
    packed_num_buffers: int | None = None  # no effect on what is sent


class InitTransfer(RequestModel):
    init_info: InitInfo


class UpdateInfo(RequestModel):
    names: Names
    dtype_names: Names
    shapes: Annotated[list[list[int]], Field(min_length=1)]
    packed: bool | None = None
    """Where older trainers say whether tensors are packed."""


class UpdateTransfer(RequestModel):
    update_info: UpdateInfo


class StartUpdate(RequestModel):
    is_checkpoint_format: bool = True

    @model_validator(mode="after")
    def _refuse(self) -> Self:
        if not self.is_checkpoint_format:
            name = "is_checkpoint_format"
            raise RequestError(f"{name}: tensors need their names in the checkpoint", name)
        return self


class FinishUpdate(RequestModel):
    weight_version: Version | None = None


class Confirmation(ReplyModel):
    message: str


class WorldSize(ReplyModel):
    world_size: int


def announced(
    names: list[str], dtypes: list[str], shapes: list[list[int]], field: str
) -> list[tuple[str, str, list[int]]]:
    if not len(names) == len(dtypes) == len(shapes):
        raise RequestError(
            f"{field}: {len(names)} names, {len(dtypes)} types and {len(shapes)} shapes", field
        )
    return list(zip(names, dtypes, shapes, strict=True))


def vllm_routes(state: AppState) -> APIRouter:
    router, admin = APIRouter(), state.admin
    shapes = responses(Confirmation)
    chunk_bytes: int | None = None
    default_bytes = CHUNK_BYTES

    @router.get("/get_world_size", responses=responses(WorldSize), response_model=None)
    async def get_world_size() -> Response:
        """The number of ranks that this server has in a trainer's group: one for each engine."""
        return told(WorldSize(world_size=len(state.client.replicas)))

    @router.post("/init_weight_transfer_engine", responses=shapes, response_model=None)
    async def init_weight_transfer_engine(body: InitTransfer) -> Response:
        """Join a group of torch.distributed, which the trainer enters meanwhile as rank 0."""
        nonlocal chunk_bytes, default_bytes
        info = body.init_info
        await admin.join_group(
            GROUP, (info.master_address, info.master_port), info.rank_offset, info.world_size
        )
        default_bytes = info.packed_buffer_size_bytes
        chunk_bytes = default_bytes if info.packed else None
        return told(Confirmation(message="the engines have joined the group"))

    @router.post("/shutdown_weight_transfer_engine", responses=shapes, response_model=None)
    async def shutdown_weight_transfer_engine() -> Response:
        await admin.leave_group(GROUP)
        return told(Confirmation(message="the engines have left the group"))

    @router.post("/start_weight_update", responses=shapes, response_model=None)
    async def start_weight_update(body: StartUpdate | None = None) -> Response:
        """Begin an update; what was sent before and not applied is dropped."""
        await admin.drop_staged()
        return told(Confirmation(message="the update has begun"))

    @router.post("/update_weights", responses=shapes, response_model=None)
    async def update_weights(body: UpdateTransfer) -> Response:
        """Receive tensors that the trainer broadcasts meanwhile, in this order."""
        info = body.update_info
        field = "update_info.names"
        tensors = announced(info.names, info.dtype_names, info.shapes, field)
        size = chunk_bytes
        if info.packed is not None:
            size = default_bytes if info.packed else None
        await admin.stage(StageBroadcast(GROUP, tensors, size))
        return told(Confirmation(message="the tensors wait for the end of the update"))

    @router.post("/finish_weight_update", responses=shapes, response_model=None)
    async def finish_weight_update(body: FinishUpdate | None = None) -> Response:
        version = await admin.update_staged(version=None if body is None else body.weight_version)
        return told(Confirmation(message=f"the weights have version {version}"))

    return router
