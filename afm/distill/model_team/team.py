"""The loop of a team with models: plan, sub-tasks with tools, reflection, suggested answer, double check, repeat.

One poor grade of a reflection makes the team plan again. A suggested answer is given if the verifier's score is at
least ``accept_score``. The order of parts and both rules are AFM's (arXiv 2508.13167, section 3). The loop contains no
tags. The role map of the team's file defines the role of each member's messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from afm.agents import AgentSpec, load_agent
from afm.distill.event_log import ACCEPTED, CHECKED, INTENT, PART, THOUGHT, Recorder
from afm.distill.merge import RoleMap
from afm.distill.model_team.members import (
    Check,
    MemberModels,
    MemberVoices,
    PlanReply,
    Prompt,
    Reflection,
    ReplyT,
    SubTask,
    Suggestion,
    ToolAgentReply,
    digest_of,
    filled,
    read_prompt,
)
from afm.distill.model_team.settings import Members, Reflect, Replan, TeamSettings, read_team
from afm.errors import ConfigError, suggestion
from afm.trajectory import neutralise
from afm.trajectory.programs import call_form

PLANNER, REFLECTOR, VERIFIER, WRITER = Members.model_fields
_TOOL_AGENT_PROMPT = "tool_agent"
_NO_ADVICE = "The last steps brought nothing of use."
_LONGEST_REASON = 400


_CUT = "\n[... {count} characters left out ...]\n"


class SubTaskFinding(NamedTuple):
    """The outcome of a sub-task, as the members see it."""

    goal: str
    text: str


class Result(NamedTuple):
    """The result of a tool call, as the members see it."""

    tool: str
    argument: str
    text: str


@dataclass(slots=True)
class Memory:
    """The team's state on one task.

    Every request is built from it (:meth:`view`): one line for each finished sub-task, and the last results in full.
    Earlier results appear as findings, and earlier calls by their arguments, so that no text is in a request twice.

    Attributes:
        shown_results: Number of the last results that are shown in full.
        plan: Sub-tasks of the current plan.
        done: Number of finished sub-tasks.
        criticism: Faults since the last plan.
        refused: Suggested answers that the verifier rejected.
    """

    question: str
    shown_results: int
    plan: tuple[SubTask, ...] = ()
    done: int = 0
    findings: list[SubTaskFinding] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    criticism: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def start(self, plan: tuple[SubTask, ...]) -> None:
        """Begin a new plan and clear the criticism of the last one."""
        self.plan, self.done = plan, 0
        self.criticism.clear()

    def called(self, tool: str, argument: str) -> bool:
        """Return whether this call was made before. Whitespace and case are ignored, except in programs."""
        wanted = (tool, call_form(tool, argument))
        return any((result.tool, call_form(tool, result.argument)) == wanted for result in self.results)

    def note(self, goal: str, text: str) -> None:
        """Record the outcome of a sub-task. The last outcome replaces an earlier one of the same sub-task."""
        self.findings = [finding for finding in self.findings if finding.goal != goal]
        self.findings.append(SubTaskFinding(goal, text))

    def view(self) -> dict[str, Any]:
        """Return the names for the templates."""
        recent = self.results[-self.shown_results :]
        return {
            "question": self.question,
            "plan": self.plan,
            "done": self.done,
            "findings": tuple(self.findings),
            "results": tuple(recent),
            "calls": tuple(self.results[: len(self.results) - len(recent)]),
            "criticism": tuple(dict.fromkeys(self.criticism)),
            "refused": tuple(dict.fromkeys(self.refused)),
        }


def shortened(text: str, most: int) -> str:
    """Return ``text`` without its middle if it has more than ``most`` characters."""
    if len(text) <= most:
        return text
    half = (most - len(_CUT)) // 2
    return f"{text[:half]}{_CUT.format(count=len(text) - 2 * half)}{text[-half:]}"


class ModelTeam:
    """A team that solves tasks with models, many tasks at once.

    Args:
        label: The team's file, for errors.
        served: ``False`` for a team in which one model answers every member. Its servers are not used.

    Raises:
        ConfigError: A prompt cannot be read, a tool agent has a tool that the agent lacks, or an address is missing.
    """

    def __init__(self, settings: TeamSettings, spec: AgentSpec, label: str = "team", served: bool = True):
        self.settings = settings
        self.spec = spec
        self.roles: RoleMap = settings.roles.checked(spec)
        self._label = label
        self._check_tools()
        self.prompts = {
            name: read_prompt(
                name if name in Members.model_fields else _TOOL_AGENT_PROMPT, member.prompt, member.says
            )
            for name, member in settings.all_members.items()
        }
        self._digest = _digest(settings, self.prompts)
        self._models = MemberModels(settings, self.prompts, settings.limits.asks) if served else None
        self.agents = [
            {"name": name, "purpose": agent.purpose or ", ".join(agent.tools)}
            for name, agent in settings.tool_agents.items()
        ]
        """Descriptions of the tool agents for the planner."""

    @property
    def name(self) -> str:
        """Name and settings digest of the team, for logs and manifests."""
        return f"{self.settings.name}@{self._digest}"

    @property
    def priced(self) -> bool:
        """Whether every member's model has a price, so that cost can be counted."""
        members = self.settings.all_members.values()
        return all(self.settings.models[member.model].price is not None for member in members)

    def model_of(self, member: str) -> str:
        """Return the name of a member's model at its server. Empty for a team that is not served."""
        return self._models.names[self.settings.all_members[member].model] if self._models else ""

    async def solve(self, recorder: Recorder, voices: MemberVoices | None = None) -> None:
        """Plan, work, suggest and check until an answer is accepted or a limit is reached. ``voices`` replace servers.

        Raises:
            EngineError: A model failed permanently.
            BudgetSpentError: The budget of the run is spent.
        """
        await _Attempt(self, recorder, voices or cast("MemberModels", self._models)).run()

    async def close(self) -> None:
        """Close the connections to the models."""
        if self._models is not None:
            await self._models.close()

    def tool_agent(self, named: str) -> str:
        """Return the tool agent of that name, or else the first one."""
        return named if named in self.settings.tool_agents else next(iter(self.settings.tool_agents))

    def tools_of(self, agent: str) -> list[dict[str, str]]:
        """Return the descriptions of a tool agent's tools, taken from the agent's declaration."""
        roles = {tool: self.spec.roles[tag] for tag, tool in self.spec.tool_roles.items()}
        return [
            {"name": tool, "purpose": roles[tool].purpose, "format": roles[tool].format}
            for tool in self.settings.tool_agents[agent].tools
        ]

    def argument(self, agent: str, action: ToolAgentReply) -> str:
        """Return the text to call the tool with."""
        template = self.settings.tool_agents[agent].argument
        return filled(template, {"argument": action.argument}, f"{self._label}: tool_agents.{agent}.argument")

    def message(self, member: str, view: Mapping[str, Any]) -> str:
        """Return the part of a reply that goes into the trajectory."""
        return self.prompts[member].fill("says", view)

    def _check_tools(self) -> None:
        known = set(self.spec.tool_roles.values())
        for name, agent in self.settings.tool_agents.items():
            for tool in agent.tools:
                if tool not in known:
                    raise ConfigError(
                        f"{self._label}: tool_agents.{name}.tools: {tool!r} is not a tool of agent {self.spec.name!r}; "
                        f"{suggestion(tool, known)}"
                    )


class _NoAnswerError(Exception):
    """The team gives up, with the reason."""


class _Attempt:
    """One pass of a task through the loop."""

    def __init__(self, team: ModelTeam, recorder: Recorder, models: MemberVoices) -> None:
        self._team, self._models = team, models
        self._pen = recorder
        self._limits = team.settings.limits
        self._memory = Memory(recorder.task.question, self._limits.shown_results)
        self._plans = 0
        self._calls = 0
        self._unseen = 0
        """Number of tool calls since the last plan or reflection."""

    async def run(self) -> None:
        try:
            await self._solve()
        except _NoAnswerError as error:
            self._pen.fail(str(error)[:_LONGEST_REASON])

    async def _solve(self) -> None:
        last = ""
        for _ in range(self._limits.rounds):
            await self._plan()
            await self._work()
            suggestion = await self._ask(WRITER, Suggestion, {})
            check = await self._check(suggestion)
            if check.score >= self._team.settings.accept_score:
                self._think(VERIFIER, check.conclusion)
                self._pen.finish(WRITER, self._plain(suggestion.answer))
                return
            last = f"{suggestion.answer!r} scored {check.score}: {check.conclusion or check.findings}"
            self._memory.refused.append(suggestion.answer)
            self._memory.criticism.append(check.conclusion or check.findings)
            self._need_calls()
        raise _NoAnswerError(f"no answer was accepted in {self._limits.rounds} rounds, the last one: {last}")

    async def _plan(self) -> None:
        """Make a plan. For an agent that plans once, the criticism becomes the only sub-task."""
        if self._plans and self._team.settings.replan is Replan.CONTINUE:
            self._memory.start((SubTask(goal=self._memory.criticism[-1]),))
            return
        if self._plans == self._limits.plans:
            raise _NoAnswerError(f"{self._plans} plans led to no answer: {self._memory.criticism[-1]}")
        self._plans += 1
        plan = await self._ask(PLANNER, PlanReply, {})
        self._memory.start(tuple(plan.steps[: self._limits.steps]))
        self._unseen = 0

    async def _work(self) -> None:
        """Work on sub-tasks, with new plans if needed, until a plan is finished or no call is left."""
        while await self._worked_into_trouble():
            await self._plan()

    async def _worked_into_trouble(self) -> bool:
        """Follow the plan. Returns whether a reflection asks for a new one."""
        for number, step in enumerate(self._memory.plan, 1):
            reflection = await self._step(step)
            self._memory.done = number
            more = number < len(self._memory.plan)
            if reflection is None and more and self._team.settings.reflect is Reflect.STEP:
                reflection = await self._reflect()
            if reflection is not None and reflection.poor:
                self._memory.criticism.append(reflection.advice or _NO_ADVICE)
                if self._team.settings.replan is Replan.PLAN:
                    self._need_calls()
                    return True
            if self._calls >= self._limits.tool_calls or (reflection is not None and reflection.ready):
                break
        return False

    def _need_calls(self) -> None:
        """Give up if no tool call is left, because a new plan would need one."""
        if self._calls >= self._limits.tool_calls:
            raise _NoAnswerError(f"{self._calls} tool calls were not enough: {self._memory.criticism[-1]}")

    async def _step(self, step: SubTask) -> Reflection | None:
        """Work on one sub-task. Returns the reflection that ended it, if any."""
        agent, results_before = self._team.tool_agent(step.agent), len(self._memory.results)
        left = min(self._limits.calls_per_step, self._limits.tool_calls - self._calls)
        reflection: Reflection | None = None
        while left:
            action = await self._act(agent, step, left)
            if not action.calls:
                self._found(agent, step, action)
                return reflection
            await self._call(agent, step, action)
            left -= 1
            if self._team.settings.reflect is Reflect.CALL:
                reflection = await self._reflect()
                if reflection is not None and (reflection.poor or reflection.ready):
                    break
        if len(self._memory.results) > results_before:
            self._found(agent, step, await self._act(agent, step, 0))
        return reflection

    def _found(self, agent: str, step: SubTask, action: ToolAgentReply) -> None:
        self._memory.note(step.goal, self._plain(action.finding))
        self._think(agent, f"{action.thought.strip()} {action.finding.strip()}")

    async def _act(self, agent: str, step: SubTask, left: int) -> ToolAgentReply:
        own = self._team.settings.tool_agents[agent]

        def problem(action: ToolAgentReply) -> str:
            if not action.calls:
                return ""
            if not left:
                return "no tool call is left; expected `finding` without `argument`"
            if action.tool not in own.tools:
                return f"tool: got {action.tool!r}, expected one of {', '.join(own.tools)}"
            if self._memory.called(action.tool, self._team.argument(agent, action)):
                return "this tool call was made already; word it differently, or reply with `finding` instead"
            return ""

        view = {"goal": step.goal, "tools": self._team.tools_of(agent), "calls_left": left}
        return await self._models.ask(self._pen, agent, ToolAgentReply, self._view(view), problem)

    async def _call(self, agent: str, step: SubTask, action: ToolAgentReply) -> None:
        """Call a tool, and store the part of its result that the members see."""
        self._think(agent, action.thought)
        argument = self._team.argument(agent, action)
        result = await self._pen.use(agent, action.tool, argument, meta={INTENT: step.goal})
        shown = shortened(neutralise(result.text, self._team.spec), self._limits.shown_chars)
        self._memory.results.append(Result(action.tool, argument, shown))
        self._calls += 1
        self._unseen += 1

    async def _reflect(self) -> Reflection | None:
        """Return a reflection, or ``None`` if there is no new tool call."""
        if not self._unseen:
            return None
        self._unseen = 0
        return await self._ask(REFLECTOR, Reflection, {})

    async def _check(self, suggestion: Suggestion) -> Check:
        return await self._ask(VERIFIER, Check, {"answer": suggestion.answer, "facts": suggestion.facts})

    async def _ask(self, member: str, kind: type[ReplyT], view: Mapping[str, Any]) -> ReplyT:
        """Ask a member. Logs its thought and its message."""
        whole = self._view(view)
        reply = await self._models.ask(self._pen, member, kind, whole)
        self._think(member, reply.thought)
        accepted = isinstance(reply, Check) and reply.score >= self._team.settings.accept_score
        checked = {CHECKED: view["answer"], ACCEPTED: accepted} if isinstance(reply, Check) else {}
        said = self._team.message(member, {**whole, "reply": reply, "accepted": accepted})
        self._pen.say(member, self._plain(said), meta={INTENT: self._memory.question, **checked})
        return reply

    def _think(self, member: str, thought: str) -> None:
        if thought.strip():
            self._pen.say(member, self._plain(thought), meta={PART: THOUGHT})

    def _plain(self, text: str) -> str:
        """Return the text without anything that could open or close a role."""
        return neutralise(text.strip(), self._team.spec)

    def _view(self, more: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._memory.view(), "agents": self._team.agents, "limits": self._limits, **more}


def _digest(settings: TeamSettings, prompts: Mapping[str, Prompt]) -> str:
    """Return a digest of everything that the team's work depends on. Addresses, rates and budget are not included."""
    content = settings.model_dump(mode="json", exclude={"endpoints", "budget", "tools"})
    for member in (*content["members"].values(), *content["tool_agents"].values()):
        del member["prompt"]
    return digest_of(content, prompts)


def load_team(path: str | Path, spec: AgentSpec | None = None, overrides: Sequence[str] = ()) -> ModelTeam:
    """Load the team of a YAML.

    Args:
        spec: The agent whose trajectories the team's work becomes. The default is the file's ``agent``.

    Raises:
        ConfigError: Names file, key path, value and what was expected.
        UsageError: An override is wrong.
    """
    settings = read_team(Path(path), overrides)
    return ModelTeam(settings, spec or load_agent(settings.agent), str(path))
