"""The models behind the members: every request within its rate and the run's budget, repeated when it fails, and on record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from afm.distill.event_log import ESTIMATED, TOKENS, Recorder
from afm.distill.model_team.members import Prompt, ReplyT, read_reply_as
from afm.distill.model_team.settings import MemberSettings, TeacherEndpoint, TeamModel
from afm.endpoints.budget import Budget, BudgetSettings
from afm.endpoints.chat import CallReport, ChatEndpoint
from afm.errors import BudgetSpentError, ConfigError, EngineError
from afm.settings import load_settings

_ADVICE = "raise `budget` in the team's file and run the same command again"
_AGAIN = "\n\nYour last reply could not be used: {problem}. Reply again, with one JSON object of the form asked for and nothing else."

Problem = Callable[[ReplyT], str]
"""What is wrong with a reply that is well formed; empty when nothing is."""


class NoUsableReplyError(EngineError):
    """A member's model said nothing that can be used, however often it was asked."""


class Speaking(Protocol):
    """The settings of anybody who asks models: a team's file, an expansion's."""

    @property
    def endpoints(self) -> Mapping[str, TeacherEndpoint]:
        """Servers by name."""
        ...

    @property
    def models(self) -> Mapping[str, TeamModel]:
        """Models by name."""
        ...

    @property
    def budget(self) -> BudgetSettings:
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


class Voices:
    """Asks the model of any member of a team.

    Raises:
        ConfigError: An endpoint has no address, or a model no name, in the file and in the environment.
    """

    def __init__(self, team: Speaking, prompts: Mapping[str, Prompt]) -> None:
        self._team = team
        self._prompts = prompts
        environment = load_settings()
        self._default_name = environment.teacher_model_name
        budget = Budget(team.budget, _ADVICE)
        self._servers = {
            name: _server(name, endpoint, environment.teacher_base_url, budget)
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
            text = await self._reply(recorder, member, system, message)
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
            await server.close()

    async def _reply(self, recorder: Recorder, member: str, system: str, user: str) -> str:
        key = self._team.all_members[member].model
        model = self._team.models[key]
        body = _request(self.names[key], model, system, user)
        try:
            return await self._servers[model.endpoint].ask(
                body,
                lambda reply: reply.text,
                price=model.price,
                log=recorder.spent,
                on_call=lambda report: _record(recorder, member, body["model"], report),
            )
        except BudgetSpentError:
            raise
        except EngineError as error:
            raise type(error)(f"{member}: {error}") from error

    def _name_of(self, key: str, model: TeamModel) -> str:
        name = model.name or self._default_name
        if name is None:
            raise ConfigError(f"models.{key}.name: missing; set it, or the variable TEACHER_MODEL_NAME")
        return name


def _server(name: str, endpoint: TeacherEndpoint, default_url: str | None, budget: Budget) -> ChatEndpoint:
    url = endpoint.url or default_url
    if url is None:
        raise ConfigError(f"endpoints.{name}.url: missing; set it, or the variable TEACHER_BASE_URL")
    return ChatEndpoint(endpoint, url, budget)


def _record(recorder: Recorder, member: str, model: str, report: CallReport) -> None:
    """The event of one request, whatever came of it."""
    estimated = report.reply is not None and not report.reply.metered
    recorder.call(
        member,
        ok=not report.fault,
        content=report.fault,
        prompt_tokens=report.prompt_tokens,
        completion_tokens=report.completion_tokens,
        cost_usd=report.usd,
        seconds=report.seconds,
        meta={"model": model} | ({TOKENS: ESTIMATED} if estimated else {}),
    )


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
