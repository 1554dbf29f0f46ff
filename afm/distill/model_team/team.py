"""The loop of a team with models: plan, sub-tasks with tools, reflection, suggested answer, double check, again.

One poor grade of a reflection makes the team plan again. A suggested answer is given when the verifier scores it at
least ``accept_score``. The order of parts and both rules are AFM's (arXiv 2508.13167, section 3). The loop knows no
tag: the role map of the team's file says what each member's messages become.
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
    """What came of a sub-task, as the members see it."""

    goal: str
    text: str


class Result(NamedTuple):
    """What a tool returned, as the members see it."""

    tool: str
    argument: str
    text: str


@dataclass(slots=True)
class Memory:
    """One task's.

    What every member sees is made from this each time (:meth:`view`): the finished sub-tasks in a line each and the
    last results whole. Earlier results are there as what was found in them, earlier calls by their arguments, so that
    no text appears in a request twice.

    Attributes:
        shown_results: How many of the last results are shown whole.
        plan: Sub-tasks of the current plan.
        done: How many of them are finished.
        criticism: What was wrong since the last plan.
        refused: Suggested answers that the verifier refused.
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
        """Work by a new plan; what was wrong before is dealt with."""
        self.plan, self.done = plan, 0
        self.criticism.clear()

    def called(self, tool: str, argument: str) -> bool:
        """Whether this call was made already: blanks and case ignored, except in programs."""
        wanted = (tool, call_form(tool, argument))
        return any((result.tool, call_form(tool, result.argument)) == wanted for result in self.results)

    def note(self, goal: str, text: str) -> None:
        """Note what came of a sub-task; the same one twice counts once, with its last result."""
        self.findings = [finding for finding in self.findings if finding.goal != goal]
        self.findings.append(SubTaskFinding(goal, text))

    def view(self) -> dict[str, Any]:
        """Names for the templates."""
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
    """``text`` without its middle when it is longer than ``most`` characters."""
    if len(text) <= most:
        return text
    half = (most - len(_CUT)) // 2
    return f"{text[:half]}{_CUT.format(count=len(text) - 2 * half)}{text[-half:]}"


class ModelTeam:
    """Solves tasks with models; for many tasks at once.

    Args:
        label: The team's file, for errors.
        served: ``False`` for a team whose members are all answered by one model: its servers are not asked.

    Raises:
        ConfigError: A prompt cannot be read, a tool agent has a tool that the agent lacks, an address is missing.
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
        """What the planner reads about the tool agents."""

    @property
    def name(self) -> str:
        """Identifies the team and its settings in logs and manifests."""
        return f"{self.settings.name}@{self._digest}"

    @property
    def priced(self) -> bool:
        """Whether every member's model has a price, so that money can be counted."""
        members = self.settings.all_members.values()
        return all(self.settings.models[member.model].price is not None for member in members)

    def model_of(self, member: str) -> str:
        """What its server calls a member's model; empty for a team that is not served."""
        return self._models.names[self.settings.all_members[member].model] if self._models else ""

    async def solve(self, recorder: Recorder, voices: MemberVoices | None = None) -> None:
        """Plan, work, suggest and check until an answer is accepted or the limits are reached; ``voices`` replace servers.

        Raises:
            EngineError: A model failed for good.
            BudgetSpentError: The run has nothing left.
        """
        await _Attempt(self, recorder, voices or cast("MemberModels", self._models)).run()

    async def close(self) -> None:
        """Close the connections to the models."""
        if self._models is not None:
            await self._models.close()

    def tool_agent(self, named: str) -> str:
        """The tool agent of that name, else the first one."""
        return named if named in self.settings.tool_agents else next(iter(self.settings.tool_agents))

    def tools_of(self, agent: str) -> list[dict[str, str]]:
        """What a tool agent reads about its tools: the agent's own declaration of them."""
        roles = {tool: self.spec.roles[tag] for tag, tool in self.spec.tool_roles.items()}
        return [
            {"name": tool, "purpose": roles[tool].purpose, "format": roles[tool].format}
            for tool in self.settings.tool_agents[agent].tools
        ]

    def argument(self, agent: str, action: ToolAgentReply) -> str:
        """The text that the tool is called with."""
        template = self.settings.tool_agents[agent].argument
        return filled(template, {"argument": action.argument}, f"{self._label}: tool_agents.{agent}.argument")

    def message(self, member: str, view: Mapping[str, Any]) -> str:
        """What of a reply goes into the trajectory."""
        return self.prompts[member].fill("says", view)

    def _check_tools(self) -> None:
        known = set(self.spec.tool_roles.values())
        for name, agent in self.settings.tool_agents.items():
            for tool in agent.tools:
                if tool not in known:
                    raise ConfigError(
                        f"{self._label}: tool_agents.{name}.tools: {tool!r} is no tool of agent {self.spec.name!r}; "
                        f"{suggestion(tool, known)}"
                    )


class _NoAnswerError(Exception):
    """The team gives up; why."""


class _Attempt:
    """One task's way through the loop."""

    def __init__(self, team: ModelTeam, recorder: Recorder, models: MemberVoices) -> None:
        self._team, self._models = team, models
        self._pen = recorder
        self._limits = team.settings.limits
        self._memory = Memory(recorder.task.question, self._limits.shown_results)
        self._plans = 0
        self._calls = 0
        self._unseen = 0
        """Tool calls since the last plan or reflection."""

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
        """A plan, or the criticism as the only sub-task where the agent plans once."""
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
        """Sub-task after sub-task, with new plans in between, until one is done or no call is left."""
        while await self._worked_into_trouble():
            await self._plan()

    async def _worked_into_trouble(self) -> bool:
        """Work by the plan; whether a reflection asks for a new one."""
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
        """A new plan is of no use without tool calls."""
        if self._calls >= self._limits.tool_calls:
            raise _NoAnswerError(f"{self._calls} tool calls were not enough: {self._memory.criticism[-1]}")

    async def _step(self, step: SubTask) -> Reflection | None:
        """One sub-task; returns the reflection that ended it, if one did."""
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
        """A tool call, with what the members will see of its result."""
        self._think(agent, action.thought)
        argument = self._team.argument(agent, action)
        result = await self._pen.use(agent, action.tool, argument, meta={INTENT: step.goal})
        shown = shortened(neutralise(result.text, self._team.spec), self._limits.shown_chars)
        self._memory.results.append(Result(action.tool, argument, shown))
        self._calls += 1
        self._unseen += 1

    async def _reflect(self) -> Reflection | None:
        """A reflection, if there is a tool call to reflect on."""
        if not self._unseen:
            return None
        self._unseen = 0
        return await self._ask(REFLECTOR, Reflection, {})

    async def _check(self, suggestion: Suggestion) -> Check:
        return await self._ask(VERIFIER, Check, {"answer": suggestion.answer, "facts": suggestion.facts})

    async def _ask(self, member: str, kind: type[ReplyT], view: Mapping[str, Any]) -> ReplyT:
        """Ask a member, and log what it thought and said."""
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
        """Without anything that could open or close a role."""
        return neutralise(text.strip(), self._team.spec)

    def _view(self, more: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._memory.view(), "agents": self._team.agents, "limits": self._limits, **more}


def _digest(settings: TeamSettings, prompts: Mapping[str, Prompt]) -> str:
    """Of what the team's work depends on; addresses, rates and budget may change on the way."""
    content = settings.model_dump(mode="json", exclude={"endpoints", "budget", "tools"})
    for member in (*content["members"].values(), *content["tool_agents"].values()):
        del member["prompt"]
    return digest_of(content, prompts)


def load_team(path: str | Path, spec: AgentSpec | None = None, overrides: Sequence[str] = ()) -> ModelTeam:
    """The team of a YAML.

    Args:
        spec: Whose trajectories its work becomes; by default the file's ``agent``.

    Raises:
        ConfigError: Names file, key path, value and what was expected.
        UsageError: An override is wrong.
    """
    settings = read_team(Path(path), overrides)
    return ModelTeam(settings, spec or load_agent(settings.agent), str(path))
