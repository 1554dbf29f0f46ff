"""The models behind the members: every request within its rate and :class:`Budget`, repeated when it fails, and on record."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from afm.distill.model_team.prompts import Prompt
from afm.distill.model_team.replies import ReplyT, read_reply_as
from afm.distill.model_team.settings import EndpointSettings, MemberSettings, TeamBudget, TeamModel
from afm.distill.record import ESTIMATED, TOKENS, Recorder, Spent
from afm.endpoints.chat import ChatEndpoint, ChatReply, UnusableReplyError, expected_tokens
from afm.endpoints.connections import base_url
from afm.endpoints.pace import Pace
from afm.endpoints.retry import TryAgainError, persistently
from afm.errors import BudgetSpentError, ConfigError, EngineError
from afm.settings import load_settings

_ROUNDING = 1 + 1e-9
"""Sums of prices that are as much as the limit may come out a little above it."""


@dataclass(slots=True)
class Budget:
    """Lets a call go only when it cannot break the limits, whatever else is in flight.

    Calls in flight are counted with what they may cost at most; a call that does not fit waits for them to
    cost less.
    """

    limits: TeamBudget
    _usd: float = 0.0
    _tokens: int = 0
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @asynccontextmanager
    async def reserved(self, spent: Spent, usd: float, tokens: int) -> AsyncIterator[None]:
        """Hold so much while a call runs; what it really cost must be in ``spent`` when the block ends.

        Args:
            spent: Of the run, up to date at all times.

        Raises:
            BudgetSpentError: It does not fit into what is left.
        """
        async with self._changed:
            while not self._fits(spent, self._usd + usd, self._tokens + tokens):
                if not self._fits(spent, usd, tokens):
                    raise BudgetSpentError(self._told(spent))
                await self._changed.wait()
            self._usd += usd
            self._tokens += tokens
        try:
            yield
        finally:
            self._usd -= usd
            self._tokens -= tokens
            async with self._changed:
                self._changed.notify_all()

    def _fits(self, spent: Spent, usd: float, tokens: int) -> bool:
        most = self.limits
        return (most.usd is None or spent.usd + usd <= most.usd * _ROUNDING) and (
            most.tokens is None or spent.tokens + tokens <= most.tokens
        )

    def _told(self, spent: Spent) -> str:
        parts = []
        if self.limits.usd is not None:
            parts.append(f"{spent.usd:.4f} of {self.limits.usd:g} USD")
        if self.limits.tokens is not None:
            parts.append(f"{spent.tokens} of {self.limits.tokens} tokens")
        return (
            f"the budget is spent: {', '.join(parts)}, and the next call might exceed it; "
            "raise `budget` in the team's file and run the same command again"
        )


_CHARS_PER_TOKEN = 3
_AGAIN = "\n\nYour last reply could not be used: {problem}. Reply again, with one JSON object of the form asked for and nothing else."

Problem = Callable[[ReplyT], str]
"""What is wrong with a reply that is well formed; empty when nothing is."""


class NoUsableReplyError(EngineError):
    """A member's model said nothing that can be used, however often it was asked."""


class Speaking(Protocol):
    """The settings of anybody who asks models: a team's file, an expansion's."""

    @property
    def endpoints(self) -> Mapping[str, EndpointSettings]:
        """Servers by name."""
        ...

    @property
    def models(self) -> Mapping[str, TeamModel]:
        """Models by name."""
        ...

    @property
    def budget(self) -> TeamBudget:
        """Of the whole run."""
        ...

    @property
    def asks(self) -> int:
        """How often a member is asked when its replies cannot be used."""
        ...

    @property
    def all_members(self) -> Mapping[str, MemberSettings]:
        """Everybody by name."""
        ...


@dataclass(frozen=True, slots=True)
class _ModelServer:
    settings: EndpointSettings
    chat: ChatEndpoint
    pace: Pace


class Voices:
    """Asks the model of any member of a team.

    Raises:
        ConfigError: An endpoint has no address, or a model no name, in the file and in the environment.
    """

    def __init__(self, team: Speaking, prompts: Mapping[str, Prompt]) -> None:
        self._team = team
        self._prompts = prompts
        self._budget = Budget(team.budget)
        environment = load_settings()
        self._default_name = environment.teacher_model_name
        self._servers = {
            name: _server(name, endpoint, environment.teacher_base_url)
            for name, endpoint in team.endpoints.items()
        }
        self.names = {key: self._name_of(key, model) for key, model in team.models.items()}

    async def ask(
        self,
        recorder: Recorder,
        member: str,
        kind: type[ReplyT],
        view: Mapping[str, Any],
        problem: Problem[ReplyT] | None = None,
    ) -> ReplyT:
        """A member's reply of the right kind; it is asked again when it says something else.

        Args:
            view: Names for the member's templates.
            problem: What makes a well-formed reply useless; the member is told.

        Raises:
            NoUsableReplyError: None came.
            EngineError: The server failed for good.
            BudgetSpentError: The run has nothing left.
        """
        prompt, complaint = self._prompts[member], ""
        system, user = prompt.system(view), prompt.user(view)
        for _ in range(self._team.asks):
            message = user + (_AGAIN.format(problem=complaint) if complaint else "")
            text = await self._said(recorder, member, system, message)
            try:
                reply = read_reply_as(kind, text)
            except ValueError as error:
                complaint = str(error)
                continue
            complaint = problem(reply) if problem is not None else ""
            if not complaint:
                return reply
        raise NoUsableReplyError(
            f"{member}: no usable reply in {self._team.asks} attempts, the last one: {complaint}"
        )

    async def close(self) -> None:
        """Close the connections."""
        for server in self._servers.values():
            await server.chat.close()

    async def _said(self, recorder: Recorder, member: str, system: str, user: str) -> str:
        key = self._team.all_members[member].model
        model = self._team.models[key]
        server = self._servers[model.endpoint]
        body = _request(self.names[key], model, system, user)
        try:
            reply = await persistently(
                server.settings.attempts, lambda: self._once(recorder, member, model, server, body)
            )
        except TryAgainError as error:
            raise EngineError(
                f"{member}: {server.chat.where}: {error} (after {server.settings.attempts} attempts)"
            ) from None
        return reply.text

    async def _once(
        self,
        recorder: Recorder,
        member: str,
        model: TeamModel,
        server: _ModelServer,
        body: Mapping[str, Any],
    ) -> ChatReply:
        prompt, completion = expected_tokens(body)
        usd = model.price.usd(prompt, completion) if model.price else 0.0
        async with server.chat.place() as client:
            departure = await server.pace.departure(prompt + completion)
            async with self._budget.reserved(recorder.spent, usd, prompt + completion):
                reply = await self._recorded(recorder, member, model, server, client, body)
            server.pace.settle(departure, sum(_usage(reply, body)))
            return reply

    async def _recorded(
        self,
        recorder: Recorder,
        member: str,
        model: TeamModel,
        server: _ModelServer,
        client: httpx.AsyncClient,
        body: Mapping[str, Any],
    ) -> ChatReply:
        """One request and its event, whatever comes of it."""
        started = time.perf_counter()
        try:
            reply, fault = await server.chat.ask(client, body), ""
        except UnusableReplyError as error:
            reply, fault = error.reply, str(error)
        except (TryAgainError, EngineError) as error:
            if isinstance(error, TryAgainError):
                server.pace.close_for(error.wait_s)
            meta = {"model": str(body["model"])}
            recorder.call(member, ok=False, content=str(error), seconds=_since(started), meta=meta)
            raise
        prompt, completion = _usage(reply, body)
        metered = None not in (reply.prompt_tokens, reply.completion_tokens)
        recorder.call(
            member,
            ok=not fault,
            content=fault,
            prompt_tokens=prompt,
            completion_tokens=completion,
            cost_usd=model.price.usd(prompt, completion) if model.price else 0.0,
            seconds=_since(started),
            meta={"model": str(body["model"])} | ({} if metered else {TOKENS: ESTIMATED}),
        )
        if fault:
            raise TryAgainError(fault)
        return reply

    def _name_of(self, key: str, model: TeamModel) -> str:
        name = model.name or self._default_name
        if name is None:
            raise ConfigError(f"models.{key}.name: missing; set it, or the variable TEACHER_MODEL_NAME")
        return name


def _server(name: str, endpoint: EndpointSettings, default_url: str | None) -> _ModelServer:
    url = endpoint.url or default_url
    if url is None:
        raise ConfigError(f"endpoints.{name}.url: missing; set it, or the variable TEACHER_BASE_URL")
    chat = ChatEndpoint(
        base_url(url),
        api_key=os.environ.get(endpoint.key_variable) or None,
        key_name=endpoint.key_variable,
        max_parallel=endpoint.max_parallel,
        timeout_s=endpoint.timeout_s,
    )
    return _ModelServer(endpoint, chat, Pace(endpoint.requests_per_minute, endpoint.tokens_per_minute))


def _request(name: str, model: TeamModel, system: str, user: str) -> dict[str, Any]:
    """System and user alone, in this order: servers whose chat template insists on turns accept it."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    if not model.system_role:
        messages = [{"role": "user", "content": f"{system}\n\n{user}"}]
    body = {
        "model": name,
        "temperature": model.temperature,
        "max_tokens": model.max_tokens,
        **model.request,
        "messages": messages,
    }
    return {key: value for key, value in body.items() if value is not None}


def _usage(reply: ChatReply, body: Mapping[str, Any]) -> tuple[int, int]:
    """Tokens of prompt and reply; estimated from their length when the server does not tell."""
    prompt, completion = reply.prompt_tokens, reply.completion_tokens
    if prompt is None:
        prompt = expected_tokens(body)[0]
    return prompt, len(reply.text) // _CHARS_PER_TOKEN + 1 if completion is None else completion


def _since(started: float) -> float:
    return round(time.perf_counter() - started, 6)
