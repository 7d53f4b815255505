"""On a rank: what people combine with the section, beside DDP or the same without ranks."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import parity
import torch
from torch import nn

OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
BOTH = OFFLOAD | {"offload_param": {"device": "cpu"}}


def cases() -> dict[str, parity.Case]:
    """What `parity` can compare with DDP."""

    def case(stage: int, accumulation: int = 2, model: str = "llama", **other: Any) -> parity.Case:
        return parity.Case(model, "bfloat16", stage, accumulation, True, **other)

    return {
        "offloaded optimizer, ZeRO 2": case(2, zero=OFFLOAD),
        "offloaded optimizer and parameters, ZeRO 3": case(3, zero=BOTH),
        "hpZ": case(3, zero={"zero_hpz_partition_size": 2}),
        "no sync, ZeRO 0": case(0, plan="no sync"),
        "no sync, ZeRO 1": case(1, plan="no sync"),
        "uneven last batch, ZeRO 1": case(1, 3, plan="uneven"),
        "uneven last batch, ZeRO 2": case(2, 3, plan="uneven"),
        "uneven last batch, ZeRO 3": case(3, 3, plan="uneven"),
        "built again, ZeRO 2": parity.Case(
            "llama", "bfloat16", 2, 1, False, plan="built again", reduce="fp32"
        ),
        "built again, ZeRO 3": case(3, 1, plan="built again", persistent=5_000),
        "edited under GatheredParameters": case(3, plan="edited", persistent=5_000),
        "adapters on a low base, ZeRO 0": case(0, 1, weights="lora"),
        "adapters on a low base, ZeRO 2": case(2, weights="lora", checkpointing=True),
        "adapters on a low base, ZeRO 3": case(3, 1, weights="lora", partitioned=True),
        "adapters on a low base, GPT-2": case(3, 1, "gpt2", weights="lora", partitioned=True),
        "adapters on a low base, Mixtral": case(3, 1, "mixtral eager", weights="lora"),
        "low weights, ZeRO 0": case(0, weights="low"),
        "low weights, ZeRO 1": case(1, weights="low"),
        "low weights, ZeRO 3": case(3, weights="low", partitioned=True),
    }


def initialize(**arguments: Any) -> Any:
    import safe_rope

    return safe_rope.initialize(**arguments)[0]


def config(stage: int = 1, **changes: Any) -> dict[str, Any]:
    return parity.Case("llama", "bfloat16", stage, 1, False).config(**changes)


def largest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of two sets of tensors."""
    return max(float((one[name] - other[name]).norm() / other[name].norm()) for name in one)


def blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()) for _ in range(4)]


def batches(rank: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5 + rank)
    return [
        (torch.randn(4, 8, 16, generator=generator), torch.randn(4, 8, 16, generator=generator))
        for _ in range(6)
    ]


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def alone(layers: list[nn.Module], micro_batches: int) -> list[float]:
    """The losses of three steps of the whole model in one process, over the batches of both ranks or one."""
    whole = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    data, losses = iter(batches()), []
    for _ in range(3):
        total = 0.0
        for x, y in itertools.islice(data, micro_batches):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = squares(whole(x), y) / micro_batches
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def pipeline() -> Any:
    """Two stages, two micro-batches a step where DeepSpeed can, beside the whole model."""
    from deepspeed.pipe import PipelineModule

    model = PipelineModule(blocks(), num_stages=2, loss_fn=squares)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    count = parity.accumulation(1)
    engine = initialize(model=model, optimizer=optimizer, config=config(gradient_accumulation_steps=count))
    data = iter(batches())
    return [[float(engine.train_batch(data)) for _ in range(3)], alone(blocks(), count)]


class Halves(nn.Module):
    """A block that sees the sequence in halves: each rank has one, attention is over the whole."""

    def __init__(self, group: Any) -> None:
        from deepspeed.sequence.layer import DistributedAttention

        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.attend = DistributedAttention(attention, group) if group is not None else attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)) for part in self.qkv(x).chunk(3, -1))
        return self.out(self.attend(q, k, v, 0).flatten(-2))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
    heads = (part.transpose(1, 2) for part in (q, k, v))
    return nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).contiguous()


def ulysses() -> Any:
    """Sequence parallelism beside the same without the section; what is reduced in which dtype."""
    import deepspeed
    from deepspeed.utils import groups

    from safe_rope.autocast import traffic

    rank = torch.distributed.get_rank()
    asked = config(2, sequence_parallel_size=2, data_parallel_size=1)
    found = []
    reduced: list[str] = []
    for ours in (True, False):
        model = Halves(torch.distributed.new_group([0, 1]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if ours:
            engine = initialize(model=model, optimizer=optimizer, config=asked)
        else:
            asked = {key: value for key, value in asked.items() if key != "torch_autocast"}
            engine = deepspeed.initialize(model=model, optimizer=optimizer, config=asked)[0]
        losses = []
        with traffic() as seen:
            for batch in batches()[:3]:
                x, y = (part.chunk(2, 1)[rank] for part in batch)
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not ours):
                    loss = squares(engine(x), y)
                engine.backward(loss)
                engine.step()
                losses.append(parity._mean(float(loss.detach())))
        reduced += [row.dtype for row in seen.rows if "reduce" in row.op]
        assert groups._get_sequence_parallel_world_size() == 2
        engine.destroy()
        groups.mesh_device = None  # else every later engine is of these two ranks
        found.append(losses)
    return [*found, reduced]


def merged() -> Any:
    """LoRA at ZeRO 3: the merged weights, and what peft saves, from the FP32 masters."""
    import deepspeed
    import peft
    from deepspeed.utils import safe_get_full_fp32_param

    case = parity.Case("llama", "bfloat16", 3, 1, False, weights="lora", partitioned=True, persistent=5_000)
    engine = parity.new_engine(case)
    for step in range(2):
        parity.train_step(engine, case, step)
        engine.step()
    model = engine.module
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masters = {name: safe_get_full_fp32_param(p).clone() for name, p in trained.items()}
    from safe_rope.autocast import full_precision

    full_precision(engine)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        saved = peft.get_peft_model_state_dict(model)
        layer = model.base_model.model.model.layers[0].self_attn.q_proj
        base = layer.base_layer.weight.detach().clone()
        low = [
            masters[f"base_model.model.model.layers.0.self_attn.q_proj.lora_{x}.default.weight"] for x in "AB"
        ]
        whole = model.merge_and_unload()
        weight = whole.model.layers[0].self_attn.q_proj.weight.detach()
    truth = base.float() + low[1] @ low[0] * layer.scaling["default"]
    names = {name.replace(".default", "").replace("modules_to_save.", ""): t for name, t in masters.items()}
    return {
        "saved": all(torch.equal(saved[name], names[name]) for name in saved),
        "dtypes": sorted({str(t.dtype) for t in saved.values()}),
        "merged": float((weight.float() - truth).abs().max() / truth.abs().max()),
        "moved": float((truth - base.float()).abs().max()) > 0,
    }


def masters(engine: Any) -> dict[str, torch.Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    names = engine.module.named_parameters()
    full = {name: safe_get_full_fp32_param(p) for name, p in names} if engine.zero_optimization() else {}
    return {n: p.detach().clone() for n, p in (full or dict(engine.module.named_parameters())).items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name].flatten(), other[name].flatten()) for name in other)


def checkpoints(folder: Path, stages: list[int]) -> Any:
    """To and from engines by deepspeed.initialize, in the middle of training; zero_to_fp32; universal."""
    import deepspeed
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as to_fp32

    from safe_rope.autocast import _deepspeed

    def stock(case: parity.Case) -> Any:
        module = case.build()
        with _deepspeed.own_globals():
            return deepspeed.initialize(
                model=module, optimizer=parity.new_optimizer(module), config=case.config()
            )[0]

    seen: dict[str, Any] = {}
    for stage in stages:
        case = parity.Case("llama", "bfloat16", stage, parity.accumulation(stage), True)
        ours = parity.new_engine(case)
        for step in range(2):
            parity.train_step(ours, case, step)
            ours.step()
        ours.save_checkpoint(str(folder), tag=f"ours{stage}")
        truth = masters(ours)
        one: dict[str, Any] = {}
        if stage:
            one["zero_to_fp32"] = equal(to_fp32(str(folder), tag=f"ours{stage}"), truth)
        theirs = stock(case)
        theirs.load_checkpoint(str(folder), tag=f"ours{stage}")
        one["theirs from ours"] = equal(masters(theirs), truth)
        theirs.save_checkpoint(str(folder), tag=f"theirs{stage}")
        theirs.destroy()
        again = parity.new_engine(case)
        again.load_checkpoint(str(folder), tag=f"theirs{stage}")
        one["ours from theirs"] = equal(masters(again), truth)
        losses = [[], []]
        for engine, own in ((ours, losses[0]), (again, losses[1])):
            for step in (2, 3):
                own.append(parity.train_step(engine, case, step))
                engine.step()
            engine.destroy()
        one["goes on alike"] = losses[0] == losses[1]
        seen[str(stage)] = one
        gc.collect()
    return seen


def universal(folder: Path) -> Any:
    case = parity.Case("llama", "bfloat16", 2, 1, False)

    def new_engine(**changes: Any) -> Any:
        model = case.build()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)  # the format knows no other
        return initialize(model=model, optimizer=optimizer, config=case.config(**changes))

    engine = new_engine()
    parity.train_step(engine, case, 0)
    engine.step()
    engine.save_checkpoint(str(folder), tag="adam")
    torch.distributed.barrier()
    truth = masters(engine)
    name = "universal"
    if torch.distributed.get_rank() == 0:
        workers = ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
        ends = ["--input_folder", str(folder / "adam"), "--output_folder", str(folder / name)]
        program = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
        subprocess.run([*program, *ends, *workers], check=True, capture_output=True)
    torch.distributed.barrier()
    again = new_engine(checkpoint={"load_universal": True})
    again.load_checkpoint(str(folder), tag=name)
    return equal(masters(again), truth)


def experts() -> Any:
    """Expert parallelism of deepspeed.moe beside the same engine in FP32 communication: losses and norms."""
    import deepspeed
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Linear(16, 16)
            torch.manual_seed(torch.distributed.get_rank() + 1)
            self.moe = MoE(
                16, nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), 2, 2, use_rts=False
            )

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            hidden = x + self.moe(self.first(x))[0]
            return squares(hidden, y)

    found = []
    for ours in (True, False):
        torch.manual_seed(0)
        model = Model()
        groups = split({"params": list(model.parameters()), "name": "all"})
        optimizer = torch.optim.SGD(groups, lr=0.1)
        asked = config(2)
        if ours:
            engine = initialize(model=model, optimizer=optimizer, config=asked)
        else:
            del asked["torch_autocast"]
            engine = deepspeed.initialize(model=model, optimizer=optimizer, config=asked)[0]
        run = []
        for x, y in batches(torch.distributed.get_rank())[:3]:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not ours):
                loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            run.append(float(loss.detach()))
            run.append(float(engine.get_global_grad_norm()))
        engine.destroy()
        found.append(run)
    return found


def tensor_parallel() -> Any:
    """AutoTP beside the same without the section; which biases of its layers, added in FP32, are safe."""
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    llama = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, mlp_bias=True)
    asked = config(2, tensor_parallel={"autotp_size": 2})
    found: list[Any] = []
    for ours in (True, False):
        torch.manual_seed(0)
        model = LlamaForCausalLM(llama)
        biases = {name: p for name, p in model.named_parameters() if name.endswith("bias")}
        for parameter in biases.values():
            nn.init.normal_(parameter, std=0.3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if ours:
            engine = initialize(model=model, optimizer=optimizer, config=asked)
            layers = {name: engine.module.get_submodule(name.rpartition(".")[0]) for name in biases}
            replaced = {name for name, layer in layers.items() if type(layer) is not nn.Linear}
            found.append(sorted(replaced & engine.safety_report.safe))  # 0.18.3 replaces none
        else:
            asked = {key: value for key, value in asked.items() if key != "torch_autocast"}
            engine = deepspeed.initialize(model=model, optimizer=optimizer, config=asked)[0]
        losses = []
        for step in range(3):
            ids = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(step))
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not ours):
                loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        engine.destroy()
        found.append(losses)
    return found


def all_replaced() -> Any:
    """AutoTP of a model all of whose parameters were safe, beside the same without the section."""
    import deepspeed
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig

    from safe_rope.autocast import _deepspeed

    if "partition_config" not in TPTrainingConfig.model_fields:
        return [[], [], []]  # 0.18.3 takes no plan
    newest = 3 if _deepspeed.gathers_several_dtypes() else 2  # AutoTP is not for ZeRO 3 before 0.19
    specs = [
        {"patterns": [rf"{place}\.weight$"], "partition_type": kind}
        for place, kind in ((0, "column"), (2, "row"))
    ]
    plan = {"partition_config": {"use_default_specs": False, "layer_specs": specs}}
    found: list[Any] = []
    for stage, ours in ((2, True), (newest, True), (2, False)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 16, bias=False))
        asked = config(stage, tensor_parallel={"autotp_size": 2, **plan})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if ours:
            inputs = torch.ones(4, 16)
            engine = initialize(model=model, optimizer=optimizer, config=asked, example_inputs=inputs)
        else:
            asked = {key: value for key, value in asked.items() if key != "torch_autocast"}
            engine = deepspeed.initialize(model=model, optimizer=optimizer, config=asked)[0]
        assert all(type(layer) is not nn.Linear for layer in engine.module)
        losses = []
        for x, y in batches()[:3]:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not ours):
                loss = squares(engine(x), y)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        engine.destroy()
        found.append(losses)
    return found


PARTS = (merged, checkpoints, universal, experts, ulysses, pipeline, tensor_parallel, all_replaced)


def run(
    folder: str, parts: list[str], names: list[str] | None = None, stages: list[int] | None = None
) -> dict[str, Any]:
    """Run these parts, and the cases of these names; all names and all stages where None."""
    warnings.simplefilter("ignore")
    before, parity.STEPS = parity.STEPS, 3
    chosen = cases() if names is None else {name: cases()[name] for name in names}
    seen: dict[str, Any] = {"cases": {name: parity.judge(case) for name, case in chosen.items()}}
    parity.STEPS = before
    for part in (part for part in PARTS if part.__name__ in parts):
        more = {checkpoints: (Path(folder), stages or [0, 1, 2, 3]), universal: (Path(folder),)}
        seen[part.__name__] = part(*more.get(part, ()))
        gc.collect()
    return seen
