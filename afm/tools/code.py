"""The tool that runs the agent's Python in the sandbox. :mod:`afm.trajectory.programs` reads its argument."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from pydantic import Field, model_validator

from afm.configuration import Settings, validated
from afm.errors import BadArgumentError, ConfigError, DataError, SandboxError, SandboxUnavailableError
from afm.sandbox import ExitReason, RunResult, Sandbox, SandboxLimits, SandboxSettings, open_sandbox
from afm.sandbox.interpreter import installation_hint
from afm.terminal import plain
from afm.tools.base import ToolContext, ToolResult, ToolSchema
from afm.tools.remote import RemoteSandbox, remote_sandbox
from afm.trajectory.programs import CODE_TOOL, FencedProgram, parse_program

_ADDRESS = re.compile(r"(?<= at )0x[0-9a-fA-F]{6,16}(?=[>,])")
_THREAD = re.compile(r"(?<=started )\d{9,}(?=\)>)|(?<=started daemon )\d{9,}(?=\)>)")
_AFM_NAMES = {
    "memory_limit": "write limits: {memory_bytes: 5242880000} (its sandbox has 5,000 MiB)",
    "timeout": "write limits: {cpu_s: 5, wall_s: 7.0} (its sandbox's)",
    "max_obs_length": "write max_observation_chars: 1536 (it shows three characters for each unit)",
    "num_workers": "write sandbox: {max_parallel: N}",
    "retrieval_service_url": "leave it out; programs on other machines: urls: [http://HOST:9002]",
}
NOTHING_PRINTED = "(The program printed nothing; use print() to see a value.)"


class CodeSettings(Settings):
    """Settings of :class:`CodeTool` in a tools file."""

    sandbox: SandboxSettings | None = None
    """The sandbox of this machine that runs the programs."""
    urls: tuple[str, ...] = ()
    """Code servers that run the programs instead (``python -m tool_servers code``)."""
    limits: SandboxLimits = SandboxLimits()
    """Limits of one run, with the fields of :class:`SandboxLimits`."""
    max_observation_chars: int = Field(default=1536, ge=200)
    """Longest observation, in characters. Longer ones lose their middle."""
    nsjail_path: str | None = None
    """The key in AFM's files. Short for ``sandbox: {backend: nsjail, nsjail_path: PATH}``."""

    @model_validator(mode="before")
    @classmethod
    def _written_for_afm(cls, data: Any) -> Any:
        for name, ours in _AFM_NAMES.items():
            if name in data:
                raise ValueError(f"{name}: a setting of AFM's code tool; {ours}")
        if (path := data.get("nsjail_path")) and not (data.get("urls") or data.get("sandbox")):
            return {**data, "sandbox": {"backend": "nsjail", "nsjail_path": path}}
        return data

    @model_validator(mode="after")
    def _check_place(self) -> CodeSettings:
        if self.urls and self.sandbox is not None:
            raise ValueError("either `urls` of code servers or a local `sandbox`, not both")
        if self.nsjail_path and (self.sandbox is None or self.sandbox.nsjail_path != self.nsjail_path):
            raise ValueError(
                "nsjail_path cannot be combined with `sandbox` or `urls`; write sandbox.nsjail_path"
            )
        return self


class CodeTool:
    """Runs one program per call, each in a fresh sandbox.

    Args:
        sandbox: Runs the programs. It is closed together with the tool.
        limits: Limits of one run, by default those of :class:`SandboxLimits`.
        max_observation_chars: Longest observation, in characters. Longer ones lose their middle.
        schema: The declaration of the tool for models that take tool declarations.
    """

    usual_name: ClassVar[str] = CODE_TOOL

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        name: str = CODE_TOOL,
        limits: SandboxLimits | None = None,
        max_observation_chars: int = 1536,
        schema: ToolSchema | None = None,
    ) -> None:
        self.name = name
        self.schema = schema
        self._sandbox = sandbox
        self._limits = limits or SandboxLimits()
        self._max_chars = max_observation_chars

    @classmethod
    def from_config(cls, config: Mapping[str, Any], context: ToolContext) -> CodeTool:
        """Return a tool with the settings of a tools file. See :class:`CodeSettings`."""
        settings = validated(CodeSettings, config, context.label, context.at)
        try:
            sandbox = _sandbox(settings, context)
        except ConfigError as error:
            raise ConfigError(f"{context.label}: {context.at}: {error}") from None
        return cls(
            sandbox,
            name=context.schema.function.name,
            limits=settings.limits,
            max_observation_chars=settings.max_observation_chars,
            schema=context.schema,
        )

    @classmethod
    def read(cls, argument: str) -> FencedProgram:
        """See :class:`afm.tools.base.ReadingTool`."""
        return parse_program(argument)

    @property
    def servers(self) -> tuple[str, ...]:
        """Addresses of the code servers, empty if programs run on this machine."""
        return self._sandbox.servers if isinstance(self._sandbox, RemoteSandbox) else ()

    async def call(self, argument: str) -> ToolResult:
        """Run the program in ``argument`` and return its output as the text of the result."""
        try:
            program = self.read(argument)
            result = await self._sandbox.run(program.code, program.stdin, self._limits)
        except BadArgumentError as error:
            return ToolResult(error.message, meta={"reason": "bad_argument"})
        except DataError as error:
            return ToolResult(f"Nothing was run: {error.message}.", meta={"reason": "bad_argument"})
        except SandboxUnavailableError:
            raise  # no call can succeed here, so the run must end with the advice on what to install
        except SandboxError as error:
            text = f"The {self.name} tool failed, the program did not run: {error}"
            return ToolResult(text, ok=False, meta={"reason": "sandbox", "error": str(error)})
        meta = {
            "reason": result.reason.value,
            "exit_status": result.exit_status,
            "wall_s": result.wall_s,
            "cpu_s": result.cpu_s,
            "peak_memory_bytes": result.peak_memory_bytes,
        }
        return ToolResult(observation(result, self._limits, self._max_chars), meta=meta)

    async def close(self) -> None:
        """Close the sandbox."""
        await self._sandbox.close()


def _sandbox(settings: CodeSettings, context: ToolContext) -> Sandbox:
    if settings.urls:
        return context.sandbox({"urls": settings.urls}, lambda: remote_sandbox(settings.urls))
    local = settings.sandbox or SandboxSettings()
    return context.sandbox(local.options(), lambda: open_sandbox(**local.options()))


def observation(result: RunResult, limits: SandboxLimits, max_chars: int) -> str:
    """Return the observation of a run: its output, the errors of the program, and why it was stopped.

    It has at most ``max_chars`` characters. Longer ones lose their middle, and the cut is marked. The same program gives
    the same text, without host paths, addresses and timings. The text has no control characters for a terminal.
    """
    output = _repeatable(plain(result.stdout)).rstrip()
    errors = _repeatable(shortened(plain(result.stderr))).rstrip()
    text = "\n".join(part for part in (output, errors) if part)
    note = _note(result, limits)
    if not text and not note:
        return NOTHING_PRINTED
    room = max_chars - len(note) - 1 if note else max_chars
    return "\n".join(part for part in (cut_middle(text, room), note) if part)


def _repeatable(text: str) -> str:
    """Return ``text`` without what differs between runs: addresses of objects and numbers of threads."""
    return _THREAD.sub("...", _ADDRESS.sub("0x...", text))


def cut_middle(text: str, max_chars: int) -> str:
    """Return ``text`` shortened to ``max_chars`` characters: head and tail stay, and the cut is marked."""
    if len(text) <= max_chars:
        return text
    longest = f"\n[... {len(text)} characters cut ...]\n"
    keep = max_chars - len(longest)
    head = keep - keep // 2
    mark = f"\n[... {len(text) - keep} characters cut ...]\n"
    return text[:head] + mark + text[len(text) - keep // 2 :]


def _note(result: RunResult, limits: SandboxLimits) -> str:
    match result.reason:
        case ExitReason.TIMEOUT:
            return f"(The program was stopped: it ran longer than {limits.wall_s:g} seconds.)"
        case ExitReason.CPU:
            return f"(The program was stopped: it computed longer than {limits.cpu_s} seconds.)"
        case ExitReason.MEMORY:
            return f"(The program needed more than {limits.memory_bytes >> 20} MiB of memory.)"
        case ExitReason.OUTPUT:
            return f"(The program was stopped: it printed more than {limits.output_bytes} bytes.)"
        case ExitReason.KILLED:
            return "(The program was killed.)"
        case ExitReason.ERROR if result.exit_status is not None and result.exit_status < 0:
            return f"(The program crashed: {_signal_name(-result.exit_status)}.)"
        case ExitReason.ERROR if hint := installation_hint(result.stderr):
            return f"({hint}.)"
        case ExitReason.ERROR if not result.stderr.strip():
            return f"(The program ended with exit status {result.exit_status}.)"
        case _:
            return ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_HEADERS = ("Traceback (most recent call last):", "Exception Group Traceback (most recent call last):")
_MARGIN = re.compile(r" *[|+] ")  # in front of each line that belongs to an exception group
_FRAME = re.compile(r'  File "([^"]*)", line \d+')
_FIRST, _LAST = 4, 8


def shortened(stderr: str) -> str:
    """Return ``stderr`` without library frames in its tracebacks and without the middle of deep recursions.

    Library files have an absolute path or are frozen into the interpreter. The program's own file has only a name.
    Everything outside of tracebacks stays unchanged.
    """
    kept: list[str] = []
    frames: list[list[str]] | None = None
    dropping = False
    for line in stderr.split("\n"):
        content = _MARGIN.sub("", line, count=1) if _MARGIN.match(line) else line
        if content in _HEADERS:
            kept += [*_outer_and_inner(frames or ()), line]
            frames, dropping = [], False
        elif frames is None:
            kept.append(line)
        elif frame := _FRAME.match(content):
            dropping = frame[1].startswith(("/", "<frozen "))
            if not dropping:
                frames.append([line])
        elif content.startswith(("    ", "  [Previous line repeated")):
            if not dropping:
                (frames[-1] if frames else kept).append(line)
        else:
            kept += [*_outer_and_inner(frames), line]
            frames = None
    return "\n".join([*kept, *_outer_and_inner(frames or ())])


def _outer_and_inner(frames: Iterable[list[str]]) -> list[str]:
    """Return the lines of the outermost and the innermost frames, with a count in place of the others."""
    frames = list(frames)
    missing = len(frames) - _FIRST - _LAST
    if missing > 0:
        frames[_FIRST:-_LAST] = [[f"  [... {missing} frames cut ...]"]]
    return [line for frame in frames for line in frame]
