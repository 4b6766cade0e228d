"""The fast CPU lookup computes what FBGEMM computes, over FBGEMM's own storage."""

import copy

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from embark.errors import DataError
from embark.trainers.torch.cpu_lookup import RowRounding, round_stochastically, use_fast_cpu_lookup

BATCH_SIZE = 32
OPTIMIZERS = [EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD]
# Odd row counts put later tables at offsets that are no multiple of their width.
MIXED_TABLES = [(37, 16), (11, 8), (50, 16), (23, 32), (7, 8)]
# The third table serves two features.
MIXED_FEATURES = [0, 1, 2, 2, 3, 4]
SAME_WIDTH_TABLES = [(40, 16), (13, 16), (60, 16)]


def make_tbe(tables=tuple(SAME_WIDTH_TABLES), features=None, **options):
    options.setdefault("optimizer", EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, dim in tables],
        feature_table_map=features,
        learning_rate=0.1,
        **options,
    )
    generator = torch.Generator().manual_seed(1)
    for table in tbe.split_embedding_weights():
        table.copy_(torch.rand(table.shape, generator=generator) - 0.5)
    return tbe


def make_pair(*args, **options):
    stock = make_tbe(*args, **options)
    fast = copy.deepcopy(stock)
    assert use_fast_cpu_lookup(fast) == 1
    return stock, fast


def make_batch(tbe, lengths_kind, seed=0):
    generator = torch.Generator().manual_seed(seed)
    num_bags = len(tbe.feature_table_map) * BATCH_SIZE
    lengths = {
        "one id": torch.ones(num_bags, dtype=torch.int64),
        "three ids": torch.full((num_bags,), 3),
        "ragged": torch.randint(0, 5, (num_bags,), generator=generator),
        "empty": torch.zeros(num_bags, dtype=torch.int64),
    }[lengths_kind]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    num_rows = tbe.rows_per_table.repeat_interleave(lengths.view(-1, BATCH_SIZE).sum(1))
    # Squared, so that low ids repeat in a batch.
    indices = (torch.rand(num_rows.numel(), generator=generator) ** 2 * num_rows).long()
    return indices, offsets


def train_step(tbe, indices, offsets, seed=0):
    pooled = tbe(indices.clone(), offsets)
    pooled.backward(torch.randn(pooled.shape, generator=torch.Generator().manual_seed(seed)))
    return pooled.detach()


@pytest.mark.parametrize(("pooling", "shape"), [(PoolingMode.SUM, (BATCH_SIZE, 32)), (PoolingMode.NONE, (0, 16))])
def test_tables_without_rows_give_zeros_that_have_a_gradient(pooling, shape):
    tbe = make_tbe([(0, 16), (0, 16)], pooling_mode=pooling, optimizer=EmbOptimType.EXACT_SGD)
    assert use_fast_cpu_lookup(tbe) == 1
    values = tbe(*make_batch(tbe, "empty"))
    assert values.shape == shape
    assert not values.any()
    values.sum().backward()


def assert_same_state(stock, fast, atol=1e-6):
    torch.testing.assert_close(fast.weights_host, stock.weights_host, rtol=0, atol=atol)
    torch.testing.assert_close(fast.momentum1_host, stock.momentum1_host, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("pooling", "lengths_kind"),
    [
        (PoolingMode.SUM, "one id"),
        (PoolingMode.SUM, "ragged"),
        (PoolingMode.MEAN, "ragged"),
        (PoolingMode.MEAN, "empty"),
    ],
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_equal_fbgemm_on_tables_of_mixed_widths(optimizer, pooling, lengths_kind):
    stock, fast = make_pair(MIXED_TABLES, MIXED_FEATURES, optimizer=optimizer, pooling_mode=pooling, eps=1e-3)
    for step, learning_rate in enumerate([0.1, 0.02, 0.0, 0.5]):
        batch = make_batch(stock, lengths_kind, seed=step)
        outputs = []
        for tbe in (stock, fast):
            tbe.set_learning_rate(learning_rate)
            outputs.append(train_step(tbe, *batch, seed=step))
        torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-6)
        assert_same_state(stock, fast, atol=2e-6)


@pytest.mark.parametrize("lengths_kind", ["one id", "ragged"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_half_precision_tables_stay_within_one_rounding_of_fbgemm(optimizer, lengths_kind):
    stock, fast = make_pair(optimizer=optimizer, weights_precision=SparseType.FP16)
    for step in range(3):
        batch = make_batch(stock, lengths_kind, seed=step)
        expected, pooled = (train_step(tbe, *batch, seed=step) for tbe in (stock, fast))
        assert pooled.dtype == torch.float32
        torch.testing.assert_close(pooled, expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(fast.weights_host, stock.weights_host, rtol=2e-3, atol=1e-3)


def test_half_precision_bags_are_summed_in_full_precision():
    stock, fast = make_pair(weights_precision=SparseType.FP16)
    indices, offsets = make_batch(stock, "ragged")
    torch.testing.assert_close(fast(indices, offsets), stock(indices, offsets), rtol=0, atol=1e-6)


def test_bf16_rows_are_updated_in_fp32_and_rounded_by_position():
    """FBGEMM stores them, and looks nothing up in them."""
    narrow, full = (make_tbe(MIXED_TABLES, MIXED_FEATURES, weights_precision=precision)
                    for precision in (SparseType.BF16, SparseType.FP32))
    full.weights_host.data.copy_(narrow.weights_host)
    starts = [sum(rows * dim for rows, dim in MIXED_TABLES[:at]) for at in range(len(MIXED_TABLES))]
    rounding = RowRounding(5, torch.tensor([3]), {start: (100 * at, 8 * at) for at, start in enumerate(starts)})
    assert use_fast_cpu_lookup(nn.ModuleList([narrow, full])) == 2
    round_stochastically(narrow, rounding)
    batch = make_batch(full, "ragged")
    assert torch.equal(*(train_step(tbe, *batch) for tbe in (narrow, full)))
    for at, (rows, exact) in enumerate(zip(*(tbe.split_embedding_weights() for tbe in (narrow, full)), strict=True)):
        one_table = RowRounding(5, torch.tensor([3]), {0: (100 * at, 8 * at)})
        expected = one_table(exact, torch.arange(len(exact)), torch.tensor([0]), [0])
        assert torch.equal(rows, expected)  # rows that no bag has are what they were: they have no digits to round
        assert not torch.equal(rows, exact.bfloat16())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_zero_learning_rate_moves_no_bit_of_a_weight(optimizer):
    tbe = make_tbe(optimizer=optimizer)
    assert use_fast_cpu_lookup(tbe) == 1
    tbe.weights_host.data[::3] = -0.0
    before = tbe.weights_host.detach().clone().view(torch.int32)
    tbe.set_learning_rate(0.0)
    train_step(tbe, *make_batch(tbe, "ragged"))
    assert torch.equal(tbe.weights_host.detach().view(torch.int32), before)


def test_rate_of_the_forward_pass_counts_as_in_fbgemm():
    stock, fast = make_pair()
    indices, offsets = make_batch(stock, "one id")
    for tbe in (stock, fast):
        pooled = tbe(indices, offsets)
        tbe.set_learning_rate(0.0)
        pooled.sum().backward()
    assert_same_state(stock, fast)


def test_bfloat16_output_takes_a_bfloat16_gradient():
    stock, fast = make_pair(output_dtype=SparseType.BF16)
    batch = make_batch(stock, "one id")
    pooled = fast(*batch)
    assert pooled.dtype == torch.bfloat16
    grad = torch.randn(pooled.shape).bfloat16()
    pooled.backward(grad)
    full = make_tbe()
    full(*batch).backward(grad.float())
    assert_same_state(full, fast)


@pytest.mark.parametrize("lengths_kind", ["one id", "three ids"])
def test_two_runs_are_equal_to_the_bit(lengths_kind):
    # Large enough that every operation here is split over threads.
    tables = [(500, 64)] * 8
    first = make_tbe(tables)
    second = copy.deepcopy(first)
    assert use_fast_cpu_lookup(nn.ModuleList([first, second])) == 2
    num_bags = 8 * 4096
    num_ids = 1 if lengths_kind == "one id" else 3
    offsets = torch.arange(num_bags + 1) * num_ids
    for step in range(3):
        indices = torch.randint(0, 500, (num_bags * num_ids,), generator=torch.Generator().manual_seed(step))
        for tbe in (first, second):
            train_step(tbe, indices, offsets, seed=step)
    assert torch.equal(first.weights_host, second.weights_host)
    assert torch.equal(first.momentum1_host, second.momentum1_host)


def test_looking_up_without_gradients_changes_nothing():
    stock, fast = make_pair()
    batch = make_batch(stock, "one id")
    before = fast.weights_host.detach().clone()
    with torch.no_grad():
        pooled = fast(*batch)
    assert not pooled.requires_grad
    torch.testing.assert_close(pooled, stock(*batch))
    assert torch.equal(fast.weights_host, before)


@pytest.mark.parametrize("lengths_kind", ["one id", "ragged"])
@pytest.mark.parametrize("bad_id", [-1, 13, 10**6])
def test_an_id_outside_of_its_table_is_refused_by_name(bad_id, lengths_kind):
    tbe = make_tbe(table_names=["users", "items", "places"])
    use_fast_cpu_lookup(tbe)
    indices, offsets = make_batch(tbe, lengths_kind)
    indices[offsets[BATCH_SIZE]] = bad_id
    with pytest.raises(DataError, match=r"table items is not in 0\.\.12"):
        tbe(indices, offsets)


def test_copied_tables_train_apart():
    _, fast = make_pair()
    twin = copy.deepcopy(fast)
    before = fast.weights_host.detach().clone()
    train_step(twin, *make_batch(fast, "one id"))
    assert torch.equal(fast.weights_host, before)
    assert not torch.equal(twin.weights_host, before)


@pytest.mark.parametrize("lengths_kind", ["one id", "ragged", "empty"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_of_rows_that_are_not_pooled_equal_fbgemm(optimizer, lengths_kind):
    options = {"optimizer": optimizer, "pooling_mode": PoolingMode.NONE, "eps": 1e-3}
    stock, fast = make_pair(SAME_WIDTH_TABLES, [0, 1, 2, 2], **options)
    for step in range(3):
        batch = make_batch(stock, lengths_kind, seed=step)
        outputs = [train_step(tbe, *batch, seed=step) for tbe in (stock, fast)]
        assert outputs[1].shape == (len(batch[0]), 16)
        torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-6)
        assert_same_state(stock, fast, atol=2e-6)


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Clicks(nn.Module):
    def __init__(self, is_weighted=False):
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=f"t{t}",
                num_embeddings=50 + t,
                embedding_dim=8,
                feature_names=[f"f{t}"],
                pooling=PoolingType.SUM if t < 3 else PoolingType.MEAN,
                data_type=DataType.FP32,
            )
            for t in range(4)
        ]
        self.ebc = EmbeddingBagCollection(tables, is_weighted=is_weighted, device=torch.device("meta"))
        self.head = nn.Linear(32, 1)

    def forward(self, batch):
        logits = self.head(self.ebc(batch).values())
        # Far from its minimum: Adagrad's first steps blow up the relative error of a tiny gradient.
        return (logits - 3).square().mean(), logits.detach()


def make_dmp(is_weighted=False):
    torch.manual_seed(0)
    model = Clicks(is_weighted)
    apply_optimizer_in_backward(RowWiseAdagrad, model.ebc.parameters(), {"lr": 0.1, "eps": 1e-6})
    # The planner likes data_parallel for small tables, which has no fused optimizer.
    sharding = {f"t{t}": table_wise(rank=0, device="cpu") for t in range(4)}
    sharder = EmbeddingBagCollectionSharder()
    module_plan = construct_module_sharding_plan(model.ebc, sharding, sharder, world_size=1, device_type="cpu")
    plan = ShardingPlan({"ebc": module_plan})
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=[sharder])


def make_kjt(seed, max_length):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0 if max_length > 1 else 1, max_length + 1, (4 * BATCH_SIZE,), generator=generator)
    values = torch.randint(0, 50, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor([f"f{t}" for t in range(4)], values, lengths=lengths)


@pytest.mark.parametrize("max_length", [1, 4])
def test_sharded_model_trains_as_before_under_the_pipeline(process_group, max_length):
    states, losses = [], []
    for fast in (False, True):
        dmp = make_dmp()
        if fast:
            # Sum and mean pooling go to FBGEMM as two batches of tables.
            assert use_fast_cpu_lookup(dmp) == 2
        head = KeyedOptimizerWrapper(
            {f"head.{name}": p for name, p in dmp.module.head.named_parameters()},
            lambda params: torch.optim.SGD(params, lr=0.1),
        )
        optimizer = CombinedOptimizer([dmp.fused_optimizer, head])
        pipeline = TrainPipelineSparseDist(dmp, optimizer, torch.device("cpu"))
        batches = iter([make_kjt(seed, max_length) for seed in range(6)])
        for learning_rate in (0.1, 0.1, 0.4, 0.0, 0.2, 0.2):
            for group in dmp.fused_optimizer.param_groups:
                group["lr"] = learning_rate
            pipeline.progress(batches)
        pipeline.detach()
        dmp.eval()
        with torch.no_grad():
            losses.append(dmp(make_kjt(99, max_length))[0])
        states.append((dmp.state_dict(), dmp.fused_optimizer.state_dict()["state"]))
    torch.testing.assert_close(losses[1], losses[0])
    (stock_weights, stock_state), (fast_weights, fast_state) = states
    assert stock_weights.keys() == fast_weights.keys()
    assert stock_state.keys() == fast_state.keys()
    for key, weights in stock_weights.items():
        torch.testing.assert_close(local(fast_weights[key]), local(weights), rtol=0, atol=1e-6)
    for table, state in stock_state.items():
        for name, value in state.items():
            assert local(value).abs().sum() > 0
            torch.testing.assert_close(local(fast_state[table][name]), local(value), rtol=1e-6, atol=1e-6)


def local(value):
    return value.local_tensor() if hasattr(value, "local_tensor") else value


def test_weighted_collection_keeps_fbgemm(process_group):
    assert use_fast_cpu_lookup(make_dmp(is_weighted=True)) == 0
