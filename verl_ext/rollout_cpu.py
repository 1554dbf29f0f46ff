"""A rollout engine for verl without an accelerator: our continuous-batching engine in a Ray actor.

It takes token ids and returns token ids with log-probabilities. ``actor_rollout_ref.rollout.name=afm_cpu`` selects it.
Options (:class:`CpuOptions`) need a plus, as in ``+actor_rollout_ref.rollout.engine_kwargs.afm_cpu.processes: 2``,
because verl declares the keys of its own engines only.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer
from verl.workers.rollout.utils import ensure_async_iterator

from afm.errors import EngineError
from afm.models.base import FinishReason, SamplingParams
from afm.models.tokenizer import ChatTokenizer, generation_end_ids
from verl_ext.algorithms import CPU_ENGINE
from verl_ext.engines import CpuOptions
from verl_ext.lora import SCALE_KEYS, MergedAdapter
from verl_ext.ray_watch import report_if_it_fails
from verl_ext.weight_proof import fingerprint


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor as a NumPy array of bytes. Ray copies such an array once, into shared memory, but pickles tensors."""

    data: np.ndarray[Any, np.dtype[np.uint8]]
    dtype: torch.dtype
    shape: torch.Size

    @classmethod
    def of(cls, tensor: torch.Tensor, dtype: torch.dtype | None) -> Packed:
        """Pack a tensor, after a conversion to ``dtype`` if it is given."""
        own = tensor.detach().to("cpu", dtype or tensor.dtype).contiguous()
        return cls(own.view(-1).view(torch.uint8).numpy(), own.dtype, own.shape)

    def tensor(self) -> torch.Tensor:
        """Return the tensor. It shares the array's memory."""
        return torch.from_numpy(self.data).view(self.dtype).view(self.shape)


class CpuServer:
    """The Ray actor that holds the model and generates.

    Args:
        config: verl's rollout section.
        model_config: verl's model section.
        number: Index of this server in the run. It makes servers draw different samples.
    """

    def __init__(self, config: Any, model_config: Any, number: int = 0) -> None:
        from transformers import AutoModelForCausalLM

        from afm.models.engine import BatchEngine

        options = CpuOptions.of(config)
        path = model_config.local_path or model_config.path
        tokenizer = ChatTokenizer(model_config.tokenizer, generation_end_ids(path))
        self._response_tokens = config.response_length
        self._total_tokens = config.prompt_length + config.response_length
        self._step: int | None = None
        self._received: dict[str, torch.Tensor] = {}
        self._adapter: MergedAdapter | None = None
        self._dtype = PrecisionType.to_dtype(options.dtype)
        # Ray shares the memory of arrays, which are then read-only. The weights are copied from there.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=self._dtype, attn_implementation="sdpa")
        self._engine = BatchEngine(
            model,
            eos_ids=() if config.ignore_eos else tokenizer.end_ids,
            pad_id=tokenizer.pad_id,
            decode=tokenizer.decode,
            vocabulary_size=tokenizer.size,
            max_batch=options.max_batch or config.max_num_seqs,
            threads=options.threads_each,
            seed=None if config.seed is None else config.seed + number,
        )

    async def ready(self) -> bool:
        """Return true once the model is loaded."""
        return True

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: Mapping[str, Any], **unused: Any
    ) -> TokenOutput:
        """Continue ``prompt_ids``. Parameters have vLLM's names."""
        result = await self._engine.generate(prompt_ids, self._params(sampling_params, len(prompt_ids)))
        aborted = result.finish is FinishReason.ABORTED
        return TokenOutput(
            token_ids=list(result.token_ids),
            log_probs=list(result.logprobs),
            stop_reason="aborted" if aborted else "completed",
            extra_fields={"global_steps": self._step},
        )

    def _params(self, params: Mapping[str, Any], prompt_tokens: int) -> SamplingParams:
        penalty = params.get("repetition_penalty", 1.0)
        if penalty != 1.0:
            raise EngineError(
                f"repetition_penalty is {penalty}; {CPU_ENGINE} does not support it, set it to 1.0"
            )
        room = min(self._response_tokens, self._total_tokens - prompt_tokens)
        asked = params.get("max_tokens", params.get("max_new_tokens"))
        return SamplingParams(
            max_new_tokens=max(1, room if asked is None else asked),
            temperature=float(params.get("temperature", 1.0)),
            top_p=float(params.get("top_p", 1.0)),
            top_k=max(0, int(params.get("top_k", 0))),
            stop=tuple(params.get("stop") or ()),
            seed=params.get("seed"),
        )

    async def update_weights(
        self,
        bucket: dict[str, Packed],
        last: bool,
        global_steps: int | None,
        adapter: Mapping[str, Any] | None = None,
    ) -> None:
        """Load a bucket of weights or of an adapter. ``global_steps`` takes effect with the last bucket.

        Args:
            adapter: peft's configuration of the adapter to which the tensors belong.
        """
        named_tensors = {name: packed.tensor() for name, packed in bucket.items()}
        if adapter is None:
            await self._engine.update_weights(named_tensors)
        else:
            self._received |= named_tensors
            if last:
                await self._load_adapter(adapter)
        if last:
            self._step = global_steps

    async def _load_adapter(self, config: Mapping[str, Any]) -> None:
        tensors, self._received = self._received, {}
        if self._adapter is None:
            self._adapter = await self._engine.read_weights(lambda weights: MergedAdapter(weights, tensors))
        merged = self._adapter.replace(tensors, config)
        await self._engine.update_weights(merged)

    async def fingerprints(self, names: list[str]) -> dict[str, int]:
        """Return fingerprints of the weights and of the merged adapter (:mod:`verl_ext.weight_proof`), without unknown names."""

        def read(weights: Mapping[str, torch.Tensor]) -> dict[str, int]:
            parts = self._adapter.parts_of(weights) if self._adapter else {}
            tensors = {name: parts.get(name, weights.get(name)) for name in names}
            return {
                name: fingerprint(value, self._dtype) for name, value in tensors.items() if value is not None
            }

        return await self._engine.read_weights(read)

    async def set_global_steps(self, global_steps: int) -> None:
        """Set the version of the weights, which each generation reports."""
        self._step = global_steps

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """End every generation with its tokens so far. New requests wait for :meth:`resume_generation`."""
        self._engine.pause()
        await self._engine.abort_all()

    async def resume_generation(self) -> None:
        """Admit waiting requests again."""
        self._engine.resume()

    async def sleep(self, *args: Any, **options: Any) -> None:
        """Do nothing: the trainer does not use this memory, no prefix outlives a generation, and there is no profiler."""

    wake_up = clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = sleep


class CpuReplica(RolloutReplica):
    """The servers of one training worker, on its node."""

    def rollout_worker_use_gpu(self) -> bool:
        """Return false: a server takes no GPU slot."""
        return False

    async def launch_servers(self) -> None:
        """Start the servers and wait for their models."""
        node = await self.workers[0].__ray_call__.remote(_node_of)
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        options = CpuOptions.of(self.config)
        names = _server_names(self.replica_rank, options.processes)
        self.servers = [
            ray.remote(CpuServer)
            .options(
                name=f"{name}{self.name_suffix}",
                num_cpus=0,
                max_concurrency=self.max_concurrency,
                scheduling_strategy=affinity,
            )
            .remote(
                self.config,
                omega_conf_to_dataclass(self.model_config),
                self.replica_rank * options.processes + index,
            )
            for index, name in enumerate(names)
        ]
        await asyncio.gather(*(server.ready.remote() for server in self.servers))
        self._server_handle = self.servers[0]
        self._server_address = ",".join(f"{name}{self.name_suffix}" for name in names)


class CpuRouter(GlobalRequestLoadBalancer):
    """verl's balancer, which keeps an episode on one server, for addresses that name several servers."""

    def __init__(self, servers: dict[str, Any], config: Mapping[str, Any]) -> None:
        names = [name for address in servers for name in address.split(",")]
        super().__init__({name: ray.get_actor(name) for name in names})


class CpuRolloutAdapter(BaseRollout):
    """The training worker's side: sends the actor's weights to the servers."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        rank = int(os.environ["RANK"])
        group = self.config.tensor_model_parallel_size
        self._leads = rank % group == 0
        replica = rank // group if replica_rank == -1 else replica_rank
        options = CpuOptions.of(self.config)
        self._names = _server_names(replica, options.processes)
        self._dtype = PrecisionType.to_dtype(options.dtype)
        self._servers: list[Any] = []

    async def resume(self, tags: list[str] | None = None) -> None:
        """Do nothing: the server keeps its memory."""

    release = resume

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Any,
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: Mapping[str, Any] | None = None,
        base_sync_done: bool = False,
        **unused: Any,
    ) -> None:
        """Send ``weights`` or an adapter in buckets. Every rank iterates, because gathering a shard is a collective call."""
        if wire_format != "named_tensors":
            raise EngineError(f"{CPU_ENGINE} accepts only full weights, got wire_format={wire_format!r}")
        adapter = None
        if peft_config and base_sync_done:
            adapter = {key: peft_config.get(key) for key in SCALE_KEYS}
        limit = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        # An adapter is merged in the trainer's precision.
        dtype = self._dtype if adapter is None else None
        bucket: dict[str, Packed] = {}
        size = 0
        async for name, tensor in ensure_async_iterator(weights):
            if not self._leads:
                continue
            packed = Packed.of(tensor, dtype)
            if bucket and size + packed.data.nbytes > limit:
                await self._send(bucket, False, global_steps, adapter)
                bucket, size = {}, 0
            # verl names the matrices of an adapter as vLLM does.
            bucket[name.replace(".base_layer", "")] = packed
            size += packed.data.nbytes
        if self._leads:
            await self._send(bucket, True, global_steps, adapter)

    async def _send(
        self,
        bucket: dict[str, Packed],
        last: bool,
        global_steps: int | None,
        adapter: Mapping[str, Any] | None,
    ) -> None:
        stored = ray.put(bucket)
        replies = [
            server.update_weights.remote(stored, last, global_steps, adapter)
            for server in self._find_servers()
        ]
        for reply in replies:
            report_if_it_fails(reply, "in update_weights")
        await asyncio.gather(*replies)

    async def served_fingerprints(self, names: list[str]) -> list[dict[str, int]] | None:
        """Return the fingerprints of each server's weights, ``None`` on a rank without a server."""
        if not self._leads:
            return None
        return list(
            await asyncio.gather(*(server.fingerprints.remote(names) for server in self._find_servers()))
        )

    def _find_servers(self) -> list[Any]:
        if not self._servers:
            self._servers = [ray.get_actor(name) for name in self._names]
        return self._servers


def _server_names(replica_rank: int, processes: int) -> list[str]:
    return [f"{CPU_ENGINE}_server_{replica_rank}_{index}" for index in range(processes)]


def _node_of(worker: object) -> str:
    node: str = ray.get_runtime_context().get_node_id()
    return node
