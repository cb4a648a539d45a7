"""DDP, FSDP, tensor parallel layers and policies over gloo: the numbers of one process with the whole batch."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import dsq
from tests.dsq.gradients import all_gradients, error
from tests.dsq.stash.every_policy import small

TOKENS, WIDTH, UPDATES = 128, 64, 4  # tokens a rank, features a rank: multiples of 16 up to 4 ranks
CONFIG = dsq.DSQConfig(levels="[4,4,4,16] [16,4,4,16]", patience=1, stash="linears")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def tokens(update, rank, ranks):
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(update))
    return x.chunk(ranks)[rank]


def validation_loss(update, rank):
    return 10.0 + 2 * update if rank else 10.0 - update  # rank 0 alone would never rise


def train(model, dynamic, share, losses):
    """The whole weights, and the level after each update."""
    optimizer, levels = torch.optim.SGD(model.parameters(), lr=0.05), []
    for update in range(UPDATES):
        optimizer.zero_grad()
        x = tokens(update, *share)
        (model(x) - x).square().mean().backward()
        optimizer.step()
        dynamic.record()
        dynamic.step(losses[update])
        levels.append(dynamic.scheduler.level)
    parameters = [p.detach() for p in dynamic.model.parameters()]
    return torch.cat([(p.full_tensor() if isinstance(p, DTensor) else p).flatten() for p in parameters]), levels


def shard(model):
    for module in (model[0], model[2], model):
        fully_shard(module)
    return model


def engine(name):
    model = net()
    if name == "fsdp2, then convert":
        shard(model)
    elif name == "ddp, then convert":
        model = nn.parallel.DistributedDataParallel(model)
    dynamic = dsq.DynamicPrecision(model, CONFIG)
    if name == "ddp":
        return nn.parallel.DistributedDataParallel(model), dynamic
    return (shard(model) if name == "convert, then fsdp2" else model), dynamic


ENGINES = ("ddp", "ddp, then convert", "convert, then fsdp2", "fsdp2, then convert")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)  # a bias would have no gradient

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 16)).transpose(0, 1) for layer in (self.q, self.k, self.v))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1))


def by_plan(plan):
    return lambda model, mesh: parallelize_module(model, mesh, {name: style() for name, style in plan.items()})


def gpt2_mlp():
    """GPT-2's linear layers, whose weights are (in, out)."""
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(0)
    return nn.Sequential(conv1d(2 * WIDTH, WIDTH), nn.GELU(), conv1d(WIDTH, 2 * WIDTH))


def by_hand(model, mesh):
    for layer, weight, bias in ((model[0], Shard(1), Shard(0)), (model[2], Shard(0), Replicate())):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [weight]))
        layer.bias = nn.Parameter(distribute_tensor(layer.bias.detach(), mesh, [bias]))


def over_two_axes(model, mesh):
    mesh = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("data", "tensor"))
    MLP_PLAN(model, mesh["tensor"])
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh["data"])


COLUMNS, ROWS = ColwiseParallel, RowwiseParallel
MLP_PLAN = by_plan({"0": COLUMNS, "2": ROWS})
PLANS = {
    "linear": (net, MLP_PLAN),
    "linear, fsdp2 too": (net, over_two_axes),
    "attention": (Attention, by_plan({"q": COLUMNS, "k": COLUMNS, "v": COLUMNS, "out": ROWS})),
    "conv1d": (gpt2_mlp, by_hand),
}


def tensor_parallel(ranks, kind, level, stash="linears"):
    make, shard_layers = PLANS[kind]
    model = dsq.convert(make(), dsq.DSQConfig(level, attention=True, stash=stash))
    if ranks > 1:
        shard_layers(model, init_device_mesh("cpu", (ranks,)))
    x = tokens(0, 0, 1).requires_grad_()
    y = model(x)
    y.pow(3).mean().backward()
    results = [y.detach(), x.grad, *(p.grad for p in model.parameters())]
    return [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in results]


def stash_mib(shard_layers, x):
    model = net()
    dynamic = dsq.DynamicPrecision(model, dsq.DSQConfig("[4,4,4,16]", stash="all"))
    shard_layers(model)
    model(x).sum().backward()
    return dynamic.metrics()["dsq/stash_mib"]


def sequence_parallel(mesh):
    """The gradient of a model whose first layer computes on DTensors, under stash="all"."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    dsq.convert(model, dsq.DSQConfig("[4,4,4,16]", stash="all"))
    if mesh is not None:
        plan = {"0": SequenceParallel(sequence_dim=0), "1": ColwiseParallel(input_layouts=Shard(0))}
        parallelize_module(model, mesh, plan)
    x = tokens(0, 0, 1)
    y = model(x if mesh is None else distribute_tensor(x, mesh, [Shard(0)]))
    y.sum().backward()
    return model[1].weight.grad if mesh is None else model[1].weight.grad.full_tensor()


def by_fsdp2(model):
    for module in (*model, model):
        fully_shard(module)
    return model


def by_fsdp1(model):  # which frees the weights of a block while the next one's backward runs
    blocks = ModuleWrapPolicy({type(model[0])})
    options = {"auto_wrap_policy": blocks, "backward_prefetch": None, "use_orig_params": True}
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def of_blocks(shard):
    """The gradients of blocks that end in a norm, whose result is made again in the next one's backward."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(2)))
    dsq.stash.apply(model, "bfp")
    model = shard(model)
    model(tokens(0, 0, 1)).pow(3).mean().backward()
    gathered = (
        FullyShardedDataParallel.summon_full_params(model, with_grads=True) if shard is by_fsdp1 else nullcontext()
    )
    with gathered:
        gradients = [p.grad for p in model.parameters()]
        return torch.cat([(g.full_tensor() if isinstance(g, DTensor) else g).flatten() for g in gradients])


def policy_gradients(model, called, batch, steps):
    """The gradients of some updates of a model, which may be called through a wrapper."""
    results = []
    for _ in range(steps):
        model.zero_grad()
        called(batch).pow(3).mean().backward()
        results.append(all_gradients(model))
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.05 * p.grad
    return torch.stack(results)


def under_policy(name, rank, ranks):
    model = small()
    dsq.stash.apply(model, name)
    parallel = nn.parallel.DistributedDataParallel(model)
    return policy_gradients(model, parallel, sequences(ranks)[rank], 3)  # gact adapts before the second update


def sequences(ranks):
    return torch.randn(ranks, 4, 8, 32, generator=torch.Generator().manual_seed(0))


OF_LINEARS = ("linear", "linear, fsdp2 too")
LEVELS = ("[4,4,4,16]", "[16,4,4,4]", "[32,32,32,32]")


def work(rank, folder, ranks):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    losses = [validation_loss(update, rank) for update in range(UPDATES)]
    results = {name: train(*engine(name), (rank, ranks), losses) for name in ENGINES}
    results |= {(kind, level): tensor_parallel(ranks, kind, level) for kind in PLANS for level in LEVELS}
    results |= {(kind, "stash all"): tensor_parallel(ranks, kind, "[4,4,4,16]", stash="all") for kind in OF_LINEARS}
    results |= {name: under_policy(name, rank, ranks) for name in dsq.stash.policies()}
    mesh, share, whole = init_device_mesh("cpu", (ranks,)), tokens(0, rank, ranks), tokens(0, 0, 1)
    results["stash, MiB"] = [
        stash_mib(*of) for of in ((str, share), (shard, share), (str, whole), (partial(MLP_PLAN, mesh=mesh), whole))
    ]
    results["sequence"] = sequence_parallel(mesh)
    results |= {shard.__name__: of_blocks(shard) for shard in (by_fsdp1, by_fsdp2)}
    torch.save(results, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def results(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(partial(work, ranks=request.param), (str(folder),), request.param)
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


@pytest.mark.parametrize("name", ENGINES)
def test_ranks_train_as_one_process_with_the_whole_batch(results, name):
    model, ranks = net(), range(len(results))
    means = [sum(validation_loss(update, rank) for rank in ranks) / len(results) for update in range(UPDATES)]
    weights, levels = train(model, dsq.DynamicPrecision(model, CONFIG), (0, 1), means)
    assert levels == [0, 1, 1, 1]
    for rank_weights, rank_levels in (of_rank[name] for of_rank in results):
        assert torch.equal(rank_weights, results[0][name][0])
        assert rank_levels == levels
        assert error(rank_weights, weights) < 1e-6


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", PLANS)
def test_tensor_parallel_layers_are_those_of_one_process(results, kind, level):
    exact = tensor_parallel(1, kind, level)
    for of_rank in results:
        assert max(map(error, of_rank[kind, level], exact)) < 1e-6


@pytest.mark.parametrize("kind", OF_LINEARS)
def test_weights_of_tensor_parallel_layers_are_no_activations_to_pack(results, kind):
    exact = tensor_parallel(1, kind, "[4,4,4,16]", stash="all")
    for of_rank in results:  # of one process the norm and the layer share a code
        assert max(map(error, of_rank[kind, "stash all"], exact)) < 0.1


def test_dtensors_are_stashed_as_they_are_and_a_sharded_norm_whose_weight_is_gone_is_made_again(results):
    # of plain tensors the layer's input is made again from the norm's code, of DTensors it is packed by itself
    assert all(error(of_rank["sequence"], sequence_parallel(None)) < 0.2 for of_rank in results)
    exact = of_blocks(lambda model: model)
    assert all(error(of_rank[shard], exact) < 1e-6 for of_rank in results for shard in ("by_fsdp1", "by_fsdp2"))


def test_gathered_and_sharded_weights_are_not_counted_as_stash(results):
    for of_share, of_fsdp, of_whole, of_shards in (of_rank["stash, MiB"] for of_rank in results):
        assert of_fsdp == of_share
        assert 0 < of_shards < of_whole


#: |g - g0| / |g0| of a step at the defaults: exact, 8 bits, 4 bits; sampled rows
NEAR = {"checkpoint": 1e-5, "selective": 1e-5, "mesa": 0.05, "bfp": 0.3, "gact": 0.3, "wtacrs": 2.0}


@pytest.mark.parametrize("name", NEAR)
def test_ranks_agree_on_the_mean_gradient_under_a_policy(name, results):
    gradients = [of_rank[name] for of_rank in results]
    assert all(torch.equal(of_rank, gradients[0]) for of_rank in gradients)
    exact = torch.stack([policy_gradients(model := small(), model, x, 1)[0] for x in sequences(len(results))]).mean(0)
    assert error(gradients[0][0], exact) < NEAR[name]


def test_other_shardings_are_refused(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        layer = dsq.Linear(32, 32)
        whole = distribute_tensor(layer.weight.detach(), init_device_mesh("cpu", (1,)), [Replicate()])
        layer.weight = nn.Parameter(whole)
        with pytest.raises(ValueError, match=r"weight must be sharded as Shard\(0\) or Shard\(1\)"):
            layer(torch.randn(16, 32))
        layer.weight = nn.Parameter(whole.redistribute(placements=[Shard(0)]))
        with pytest.raises(ValueError, match="bias must be a DTensor where weight is one"):
            layer(torch.randn(16, 32))
    finally:
        distributed.destroy_process_group()
