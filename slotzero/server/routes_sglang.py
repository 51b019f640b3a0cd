"""SGLang's native routes: /generate, and those with which trainers pause, update and continue.

All but /generate exist only with --enable-admin. They are adapters over generation requests and
`Admin`. The rule: tensors that are sent with flush_cache=false wait, and replace weights together:
with the next ones that are sent without it, at /flush_cache, or at /continue_generation.
"""

import asyncio
import base64
import binascii
from typing import Annotated, Literal, Self

from fastapi import APIRouter, Request, Response
from pydantic import Field, model_validator
from starlette.responses import PlainTextResponse

from slotzero.errors import RequestError
from slotzero.server.admin import TAGS
from slotzero.server.app_state import AppState
from slotzero.server.chat_messages import RequestModel
from slotzero.server.generation_requests import about
from slotzero.server.messages import StageBroadcast, StagePickled
from slotzero.server.replies import ReplyModel
from slotzero.server.routes_admin import Version, WeightInfo
from slotzero.server.routes_openai import encoded
from slotzero.server.routes_vllm import Names, announced
from slotzero.server.sglang_request import RequestId, SglangRequest, sglang_requests
from slotzero.server.sglang_running import RunningRequests
from slotzero.server.sglang_writer import SglangReply, SglangWriter
from slotzero.server.stream_format import OPENAI
from slotzero.server.streaming import reply, responses, told

GROUP = "weight_update_group"
GroupName = Annotated[str, Field(pattern=r"^[ -~]{1,128}$")]


class Success(ReplyModel):
    success: bool
    message: str


class UpdateFields(RequestModel):
    """What all updates have in common."""

    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: Version | None = None
    # no effect: the cache is always dropped with the weights, and nothing is recorded again
    torch_empty_cache: bool | None = None
    recapture_cuda_graph: bool | None = None
    token_step: int | None = None


class ContinueGeneration(RequestModel):
    """Nothing."""


class FromDisk(UpdateFields):
    model_path: Annotated[str, Field(min_length=1)]
    load_format: Literal["auto", "safetensors"] | None = None
    is_async: Literal[False] = False
    keep_pause: bool | None = None
    manifest: None = None


class FromTensor(UpdateFields):
    serialized_named_tensors: Annotated[list[str], Field(min_length=1)]
    load_format: str | None = None
    disable_draft_model: bool | None = None

    @model_validator(mode="after")
    def _refuse(self) -> Self:
        refuse_load_format(self.load_format)
        return self


class FromDistributed(UpdateFields):
    names: Names
    dtypes: Names
    shapes: Annotated[list[list[int]], Field(min_length=1)]
    group_name: GroupName = GROUP
    load_format: str | None = None

    @model_validator(mode="after")
    def _refuse(self) -> Self:
        refuse_load_format(self.load_format)
        return self


class InitGroup(RequestModel):
    master_address: Annotated[str, Field(min_length=1)]
    master_port: Annotated[int, Field(ge=1, lt=1 << 16)]
    rank_offset: int
    world_size: int
    group_name: GroupName = GROUP
    backend: Literal["nccl", "gloo"] | None = None
    """Ignored: it is nccl on GPUs and gloo on a CPU."""


class DestroyGroup(RequestModel):
    group_name: GroupName = GROUP


class Memory(RequestModel):
    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = None


class AbortRequest(RequestModel):
    rid: RequestId | None = None
    abort_all: bool = False


class PauseGeneration(RequestModel):
    mode: Literal["abort", "retract", "in_place"] = "abort"


def refuse_load_format(name: str | None) -> None:
    if name is not None:
        raise RequestError(
            f"load_format: {name[:40]!r} is not supported; send tensors one by one, without it",
            "load_format",
        )


def sglang_routes(state: AppState, running: RunningRequests) -> APIRouter:
    router = APIRouter()
    shapes = responses(SglangReply, OPENAI)
    shapes[200] |= {"model": SglangReply | list[SglangReply]}

    @router.post("/generate", responses=shapes, response_model=None)
    async def generate(body: SglangRequest, request: Request) -> Response:
        for prompt in body.prompts:
            if isinstance(prompt, str):
                state.check_text(prompt, "text")

        def encode() -> list[list[int]]:
            return [encoded(state, prompt) for prompt in body.prompts]

        field = "text" if body.input_ids is None else "input_ids"
        with about(field):
            prompts = await asyncio.to_thread(encode)
        for tokens in prompts:
            state.check_tokens(tokens, field)
        state.log_prompt(request.state.request_id, body.prompts)
        requests = sglang_requests(body, prompts)
        writer = SglangWriter(body, len(requests), state.tokenizer)
        watcher = running.watcher(body.rids, body.n)
        return await reply(state, request, requests, writer, body.stream, watcher)

    return router


def sglang_admin_routes(state: AppState, running: RunningRequests) -> APIRouter:
    router, admin = APIRouter(), state.admin
    shapes = responses(Success)

    @router.get("/get_weight_version", responses=responses(WeightInfo), response_model=None)
    async def get_weight_version() -> Response:
        return told(WeightInfo(weight_version=admin.weight_version))

    @router.post("/pause_generation", responses=shapes, response_model=None)
    async def pause_generation(body: PauseGeneration | None = None) -> Response:
        """End all requests (abort), or let them go on later (retract, in_place); new ones wait."""
        mode = "abort" if body is None else body.mode
        await admin.pause("abort" if mode == "abort" else "hold")
        return told(Success(success=True, message="generation is paused"))

    @router.post("/continue_generation", responses=shapes, response_model=None)
    async def continue_generation(body: ContinueGeneration | None = None) -> Response:
        await admin.update_staged()
        await admin.resume()
        return told(Success(success=True, message="generation goes on"))

    @router.post("/abort_request", responses=shapes, response_model=None)
    async def abort_request(body: AbortRequest) -> Response:
        """End one request of /generate, or all; what they have is answered."""
        if body.abort_all:
            await admin.abort()
        elif body.rid is None:
            raise RequestError("rid: send it, or abort_all", "rid")
        else:
            running.abort(body.rid)
        return told(Success(success=True, message=""))

    @router.get("/flush_cache", response_class=PlainTextResponse, include_in_schema=False)
    @router.post("/flush_cache", response_class=PlainTextResponse)
    async def flush_cache() -> Response:
        """Forget all cached prefixes, also while requests run."""
        await admin.update_staged()
        await admin.reset_prefix_cache()
        return PlainTextResponse("Cache flushed.\n")

    @router.post("/release_memory_occupation", responses=shapes, response_model=None)
    async def release_memory_occupation(body: Memory | None = None) -> Response:
        """Give back the memory of the KV cache and, unless `tags` leaves them out, of the weights.
        Requests that have begun go on later."""
        tags = None if body is None else body.tags
        await admin.sleep(2 if tags is None or "weights" in tags else 1, "hold")
        return told(Success(success=True, message="memory was given back"))

    @router.post("/resume_memory_occupation", responses=shapes, response_model=None)
    async def resume_memory_occupation(body: Memory | None = None) -> Response:
        tags = TAGS if body is None or body.tags is None else body.tags
        await admin.wake_up([tag for tag in TAGS if tag in tags])
        return told(Success(success=True, message="memory is taken again"))

    @router.post("/update_weights_from_disk", responses=shapes, response_model=None)
    async def update_weights_from_disk(body: FromDisk) -> Response:
        if body.abort_all_requests:
            await admin.abort()
        version = await admin.update(body.model_path, version=body.weight_version)
        return told(Success(success=True, message=f"the weights have version {version}"))

    @router.post("/update_weights_from_tensor", responses=shapes, response_model=None)
    async def update_weights_from_tensor(body: FromTensor) -> Response:
        """Take tensors as pickles in base64. Only the first is read: the others are for ranks."""
        (data, *_) = body.serialized_named_tensors
        await admin.stage(StagePickled(_decoded(data)), body.weight_version)
        return told(await staged(body))

    @router.post("/init_weights_update_group", responses=shapes, response_model=None)
    async def init_weights_update_group(body: InitGroup) -> Response:
        """Join a group of torch.distributed, which the trainer enters meanwhile as rank 0."""
        address = body.master_address, body.master_port
        await admin.join_group(body.group_name, address, body.rank_offset, body.world_size)
        return told(Success(success=True, message="the engines have joined the group"))

    @router.post("/destroy_weights_update_group", responses=shapes, response_model=None)
    async def destroy_weights_update_group(body: DestroyGroup) -> Response:
        await admin.leave_group(body.group_name)
        return told(Success(success=True, message="the engines have left the group"))

    @router.post("/update_weights_from_distributed", responses=shapes, response_model=None)
    async def update_weights_from_distributed(body: FromDistributed) -> Response:
        """Receive tensors that the trainer broadcasts meanwhile, in this order."""
        tensors = announced(body.names, body.dtypes, body.shapes, "names")
        await admin.stage(StageBroadcast(body.group_name, tensors, None), body.weight_version)
        return told(await staged(body))

    async def staged(body: UpdateFields) -> Success:
        if not body.flush_cache:
            return Success(success=True, message="the tensors wait for the others")
        if body.abort_all_requests:
            await admin.abort()
        version = await admin.update_staged()
        return Success(success=True, message=f"the weights have version {version}")

    return router


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        name = "serialized_named_tensors"
        raise RequestError(f"{name}: the first one is not base64", name) from None
