"""What the code tool and a code server say to each other: one JSON object each way."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from afm.sandbox import RunResult, SandboxLimits

RUN_PATH = "/run"
_RESULT = TypeAdapter(RunResult)


class RunRequest(BaseModel):
    """The body of ``POST /run``.

    Attributes:
        limits: Some or all of :class:`SandboxLimits`; the rest are its defaults, or the server's most where that is less.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    code: str
    stdin: str = ""
    limits: dict[str, float | int] = Field(default_factory=dict)


def request_for(code: str, stdin: str, limits: SandboxLimits) -> RunRequest:
    """A request; half characters, which JSON cannot carry, become question marks as in a local sandbox."""
    whole = [text.encode("utf-8", "replace").decode() for text in (code, stdin)]
    return RunRequest(code=whole[0], stdin=whole[1], limits=asdict(limits))


def result_body(result: RunResult) -> bytes:
    """The JSON of a result."""
    return _RESULT.dump_json(result)


def result_from(body: bytes) -> RunResult:
    """The result in an answer.

    Raises:
        ValueError: It is none.
    """
    try:
        return _RESULT.validate_json(body)
    except ValidationError as error:
        raise ValueError(f"not a result of a run: {_first(error)}") from None


def _first(error: ValidationError) -> str:
    details: Any = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, details['loc'])) or 'body'}: {details['msg']}"
