"""Routes for trainers, under the names that vLLM gives them: pauses, and weights from files.

They exist only with --enable-admin, and need --admin-api-key, if there is one. They are adapters
over `Admin`.
"""

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response
from pydantic import Field

from slotzero.server.admin import TAGS, Tag
from slotzero.server.app_state import AppState
from slotzero.server.chat_messages import RequestModel
from slotzero.server.messages import RunningAction
from slotzero.server.replies import Empty, ReplyModel
from slotzero.server.streaming import responses, told

PauseMode = Literal["abort", "wait", "keep"]
_RUNNING: dict[PauseMode, RunningAction] = {"abort": "abort", "wait": "finish", "keep": "hold"}

Version = Annotated[str, Field(pattern=r"^[ -~]{1,128}$")]
"""A version is sent in a header."""


class LoadWeightsRequest(RequestModel):
    path: Annotated[str, Field(min_length=1)]
    """A folder with a checkpoint, or a .safetensors file, on the server's machine."""
    partial: bool | None = None
    """Keep the weights that are not in it; a .safetensors file is always partial."""
    running: RunningAction = "hold"
    """What becomes of requests that have begun."""
    weight_version: Version | None = None


class WeightInfo(ReplyModel):
    weight_version: str


class Paused(ReplyModel):
    is_paused: bool


class Sleeping(ReplyModel):
    is_sleeping: bool


class Status(ReplyModel):
    status: str


def admin_routes(state: AppState) -> APIRouter:
    router, admin = APIRouter(), state.admin

    @router.post("/pause", responses=responses(Status), response_model=None)
    async def pause(mode: Annotated[PauseMode, Query()] = "abort") -> Response:
        """Run no steps until /resume; new requests wait. Requests that have begun end first (wait),
        go on later (keep), or, like those that wait, end now with the reason abort (abort)."""
        await admin.pause(_RUNNING[mode])
        return told(Status(status="paused"))

    @router.post("/resume", responses=responses(Status), response_model=None)
    async def resume() -> Response:
        await admin.resume()
        return told(Status(status="resumed"))

    @router.get("/is_paused", responses=responses(Paused), response_model=None)
    async def is_paused() -> Response:
        return told(Paused(is_paused=admin.is_paused))

    @router.post("/sleep", responses=responses(Status), response_model=None)
    async def sleep(
        level: Annotated[int, Query(ge=1, le=2)] = 1,
        mode: Annotated[PauseMode, Query()] = "abort",
    ) -> Response:
        """Give back the memory of the KV cache, and at level 2 also that of the weights, which must
        then be replaced as a whole. New requests wait until everything is awake."""
        await admin.sleep(2 if level == 2 else 1, _RUNNING[mode])
        return told(Status(status="sleeping"))

    @router.post("/wake_up", responses=responses(Status), response_model=None)
    async def wake_up(tags: Annotated[list[Tag], Query()] = list(TAGS)) -> Response:  # noqa: B006
        await admin.wake_up(tags)
        return told(Status(status="sleeping" if admin.asleep else "awake"))

    @router.get("/is_sleeping", responses=responses(Sleeping), response_model=None)
    async def is_sleeping() -> Response:
        return told(Sleeping(is_sleeping=bool(admin.asleep)))

    @router.post("/reset_prefix_cache", responses=responses(Empty), response_model=None)
    async def reset_prefix_cache() -> Response:
        """Forget all cached prefixes; running requests keep their pages."""
        await admin.reset_prefix_cache()
        return told(Empty())

    @router.post("/load_weights", responses=responses(WeightInfo), response_model=None)
    async def load_weights(body: LoadWeightsRequest) -> Response:
        """Replace the weights by those of a checkpoint of the same model."""
        partial = body.path.endswith(".safetensors") if body.partial is None else body.partial
        version = await admin.update(
            body.path, partial=partial, running=body.running, version=body.weight_version
        )
        return told(WeightInfo(weight_version=version))

    @router.get("/weight_info", responses=responses(WeightInfo), response_model=None)
    async def weight_info() -> Response:
        return told(WeightInfo(weight_version=admin.weight_version))

    return router
