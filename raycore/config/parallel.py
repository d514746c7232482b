"""The options of ranks, workers and stages, and of where they are placed."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from raycore.checkpoint.stages import Stage, split_layers
from raycore.class_paths import as_class_path
from raycore.config.given_places import bundle_indices, bundles_as_text, devices_as_text
from raycore.errors import InvalidConfig
from raycore.models.spec import ModelSpec
from raycore.options.declared import json_object, option
from raycore.options.numbers import Seconds

PlacementStrategy = Literal["strict", "fill", "span"]
MAX_RANKS = 1 << 16
"""More than any cluster has room for. A list of the ranks still takes little memory."""
MAX_STAGES = 64
"""Limited by the board of an engine (see `raycore.rpc.doorbell`)."""


def _worker_path(worker_cls: str | type[Any] | None) -> str | None:
    return as_class_path("worker_cls", worker_cls)


def _extension_path(worker_extension_cls: str | type[Any] | None) -> str | None:
    return as_class_path("worker_extension_cls", worker_extension_cls) or None


def _layer_counts(pipeline_layers: str | list[int]) -> str:
    """Convert a list of numbers to the form that the option has on the command line."""
    return ",".join(map(str, pipeline_layers)) if isinstance(pipeline_layers, list) else pipeline_layers


def _parse_resources(value: str | dict[str, Any] | None) -> dict[str, float] | None:
    if value is None:
        return None
    amounts = json_object("resources_per_worker", value)
    for name, amount in amounts.items():
        if not name or isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 < amount < math.inf:
            raise InvalidConfig(f"resources_per_worker has {amount!r} of {name!r}: an amount is a positive number")
    return {name: float(amount) for name, amount in amounts.items()}


class ParallelConfig(msgspec.Struct, frozen=True):
    """`data_parallel_size` ranks, each with `tensor_parallel_size` workers in each of `pipeline_parallel_size` stages,
    and where they are placed."""

    tensor_parallel_size: Annotated[
        int,
        Meta(ge=1),
        option(
            "Number of workers that each layer is split over.", flags=("-tp", "--tensor-parallel-size"), is_common=True
        ),
    ] = 1
    data_parallel_size: Annotated[
        int,
        Meta(ge=1, le=MAX_RANKS),
        option(
            "Number of ranks. Each has its own copy of the model.",
            flags=("-dp", "--data-parallel-size"),
            is_common=True,
        ),
    ] = 1
    data_parallel_size_local: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        option(
            "Number of ranks on this program's node. With data_parallel_hybrid_lb or data_parallel_start_rank, this "
            "server has no others. Without, the others are on other nodes. With placement_strategy=span, ranks are on "
            "any nodes.",
            flags=("-dpl", "--data-parallel-size-local"),
            default="any number",
        ),
    ] = None
    data_parallel_start_rank: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        option(
            "The number of this server's first rank, among the data_parallel_size ranks of all servers. "
            "Metrics have it.",
            flags=("-dpr", "--data-parallel-start-rank"),
            default="0",
        ),
    ] = None
    data_parallel_rpc_port: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        option(
            "With several servers that share experts: a number by which they find each other. Servers of two "
            "deployments in one Ray cluster need two numbers. No port is opened.",
            flags=("-dpp", "--data-parallel-rpc-port"),
            metavar="N",
        ),
    ] = None
    data_parallel_rank: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        option(
            "The number of this server's only rank, which is on its node, among the data_parallel_size ranks of all "
            "servers.",
            flags=("-dpn", "--data-parallel-rank"),
            default="all ranks",
        ),
    ] = None
    data_parallel_hybrid_lb: Annotated[
        bool,
        option(
            "One of several servers, each with the data_parallel_size_local ranks of its node, behind a load balancer. "
            "Each server balances the load of its own ranks.",
            flags=("--data-parallel-hybrid-lb", "-dph"),
        ),
    ] = False
    data_parallel_external_lb: Annotated[
        bool,
        option(
            "One of several servers with one rank each, data_parallel_rank, behind a load balancer.",
            flags=("--data-parallel-external-lb", "-dpe"),
        ),
    ] = False
    placement_strategy: Annotated[
        PlacementStrategy,
        option(
            "How ranks are placed on nodes. strict: no rank spans nodes, and each node in use gets the same number of "
            "ranks. fill: no rank spans nodes, and nodes are filled one after the other. span: like fill, but a rank "
            "that no single node can hold is spread over several nodes."
        ),
    ] = "fill"
    wait_for_nodes_s: Annotated[
        Seconds,
        option(
            "Seconds to wait for resources, for which an autoscaler may add nodes. Replaces the 10 seconds of scale() "
            "and, when an engine starts, placement_timeout_s. A rank that has lost its node waits for the longer of "
            "the two. 0: fail at once if the ranks would not fit on the present nodes even if these were idle.",
            flags=("--wait-for-nodes", "--wait-for-nodes-s"),
            is_common=True,
        ),
    ] = 0.0
    gpus_per_worker: Annotated[
        float,
        Meta(gt=0.0, le=1.0),
        option(
            "With device=cuda: the fraction of a GPU that a worker reserves. With less than 1, several workers, or a "
            "worker and a trainer, share a GPU: set gpu_memory_utilization to a worker's fraction of its whole memory.",
            metavar="FRACTION",
        ),
    ] = 1.0
    resources_per_worker: Annotated[
        dict[str, float] | None,
        option(
            "Amounts of Ray's resources that a worker reserves, by name, instead of its CPU, or beside it: "
            '{"CPU": 0.5}, or {"accelerator_type:H100": 0.001}. The engine of a rank that has several workers reserves '
            "as much of a CPU, at most 1.",
            metavar="JSON",
            default="1 CPU, and with device=cuda gpus_per_worker",
            expected="a JSON object of resources' names and positive amounts",
            convert=_parse_resources,
        ),
    ] = None
    placement_bundle_indices: Annotated[
        Annotated[str, Meta(pattern=r"\A[0-9]{1,6}([,;][0-9]{1,6})*\Z")] | None,
        option(
            "The bundles of the caller's placement groups that workers use: one for each worker of each rank, such as "
            "[[0, 1], [2, 3]], or 0,1;2,3 on the command line. They are bundles of placement_groups or, without these, "
            "of the placement group in which the program that starts the engine runs itself. A worker reserves only "
            "its fraction of a GPU or, on CPUs, one CPU.",
            metavar="N,N;N,N",
            default="all bundles of placement_groups, one after the other",
            expected="lists of numbers of bundles, one list for each rank",
            convert=bundles_as_text,
        ),
    ] = None
    device_ids: Annotated[
        Annotated[str, Meta(pattern=r"\A[^,\s]+(,[^,\s]+)*\Z")] | None,
        option(
            "With device=cuda: the GPUs, on the node of the program that starts the engine, that workers use without "
            "reserving them from Ray: one for each worker. A number is a place in CUDA_VISIBLE_DEVICES, if that is "
            "set; other names are used as they are.",
            metavar="N,N",
            default="those of the program's actor, if it has enough; otherwise Ray chooses",
            expected="GPUs, separated by commas",
            convert=devices_as_text,
        ),
    ] = None
    worker_cls: Annotated[
        str | None,
        option(
            "A subclass of raycore's Worker to use instead, as package.module.Class, or the name of a plugin. All "
            "nodes must be able to import it. Its steps are execute_model(plan), and sample_tokens(grammar) if it "
            "samples in a call of its own: see WorkerProtocol.",
            metavar="CLASS",
            default="raycore's Worker",
            expected="a class, or its package.module.Class",
            convert=_worker_path,
        ),
    ] = None
    worker_extension_cls: Annotated[
        str | None,
        option(
            "A class whose methods workers get besides their own, for collective_rpc, as package.module.Class, or the "
            "name of a plugin. All nodes must be able to import it.",
            metavar="CLASS",
            expected="a class, or its package.module.Class",
            convert=_extension_path,
        ),
    ] = None
    enable_expert_parallel: Annotated[
        bool,
        option(
            "For mixture-of-experts models. All ranks share one set of experts, of which each worker holds some whole "
            "ones. Otherwise each rank has all experts, and splits each of them over its workers.",
            flags=("--enable-expert-parallel", "-ep"),
        ),
    ] = False
    dp_sync_interval: Annotated[
        int,
        Meta(ge=1),
        option("With expert parallelism: number of steps between two checks whether all ranks are idle."),
    ] = 1

    pipeline_parallel_size: Annotated[
        int,
        Meta(ge=1, le=MAX_STAGES),
        option(
            "Number of stages that the model's layers are divided over. Each stage has tensor_parallel_size workers. "
            "They compute at the same time, each another step, so a single request is no faster with stages.",
            flags=("-pp", "--pipeline-parallel-size"),
        ),
    ] = 1
    pipeline_layers: Annotated[
        Annotated[str, Meta(pattern=r"\A[0-9]{1,4}(,[0-9]{1,4})*\Z")] | None,
        option(
            "Number of layers of each stage, such as 15,17.",
            metavar="N,N",
            default="divided so that the largest stage has as few multiplications as possible",
            expected="numbers of layers, separated by commas",
            convert=_layer_counts,
        ),
    ] = None

    decode_context_parallel_size: Annotated[
        int,
        Meta(ge=1),
        option(
            "Of tensor-parallel workers that would hold the same keys and values, so many hold different tokens' "
            "instead. The KV cache then has room for so many times as many tokens. It divides the number of workers "
            "for each key-value head: tensor_parallel_size / num_key_value_heads. With latent attention, it divides "
            "tensor_parallel_size.",
            flags=("-dcp", "--decode-context-parallel-size"),
        ),
    ] = 1
    prefill_context_parallel_size: Annotated[
        int,
        Meta(ge=1),
        option(
            "Each worker becomes so many, with the same weights, which divide the tokens of long prompts, and hold "
            "different tokens' keys and values.",
            flags=("-pcp", "--prefill-context-parallel-size"),
        ),
    ] = 1

    first_rank: int = 0
    """The number of the engine's first rank, among those of all servers of a deployment."""
    num_ranks_of_servers: int = 0
    """How many ranks of several servers share experts. 0: those of this engine share them with no others."""
    num_ranks_before: int = 0
    """How many of these ranks belong to servers before this one."""
    num_on_own_node: int | None = None
    """Ranks with lower numbers have to be on the node of the program that starts the engine, and all others on other
    nodes. None: all may be on any nodes."""

    @property
    def stage_size(self) -> int:
        """Number of workers of one stage."""
        return self.tensor_parallel_size * self.prefill_context_parallel_size

    @property
    def world_size(self) -> int:
        """Number of workers of one data-parallel rank. They are numbered stage by stage, in each stage by the rank of
        `prefill_context_parallel_size`, and then by tensor-parallel rank."""
        return self.stage_size * self.pipeline_parallel_size

    @property
    def context_parallel_size(self) -> int:
        """Number of workers that hold different tokens' keys and values of the same heads."""
        return self.decode_context_parallel_size * self.prefill_context_parallel_size

    def place(self, worker: int) -> tuple[int, int, int]:
        """Return the stage of a worker, its rank of `prefill_context_parallel_size`, and its tensor-parallel rank."""
        stage, rest = divmod(worker, self.stage_size)
        return stage, *divmod(rest, self.tensor_parallel_size)

    def stages(self, spec: ModelSpec) -> list[Stage]:
        """Return each stage's part of a model.

        Raises:
            InvalidConfig: there are more stages than layers, or `pipeline_layers` doesn't fit.
        """
        counts = None if self.pipeline_layers is None else [int(count) for count in self.pipeline_layers.split(",")]
        return split_layers(spec, self.pipeline_parallel_size, counts)

    @property
    def bundle_indices(self) -> list[list[int]] | None:
        """The bundles of each rank's workers, of placement groups of the caller's. None: they aren't given."""
        return bundle_indices(self)

    @property
    def num_sharing(self) -> int:
        """Number of ranks that share the experts of the model with each other. 1 without expert parallelism."""
        return (self.num_ranks_of_servers or self.data_parallel_size) if self.enable_expert_parallel else 1

    @property
    def is_lockstep(self) -> bool:
        """Whether all data-parallel ranks run every step together, because they share the experts of the model."""
        return self.num_sharing > 1
