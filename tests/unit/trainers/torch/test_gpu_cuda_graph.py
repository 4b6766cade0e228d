"""The captured engine as a graph on a GPU. Run by hand; what came of it is in bench/RESULTS.md."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from embark.errors import DataError, EmbarkError
from embark.trainers.torch.engines.cuda_graph import engine
from embark.trainers.torch.model import local_shards
from embark.trainers.torch.sharding import sharded_tables

pytestmark = pytest.mark.gpu
GPU = ("place.device=cuda", "train.num_steps=40", "data.num_train_samples=16384", "train.eps=1e-4")
QUICK = ("place.device=cuda", "train.num_steps=200", "data.num_train_samples=409600", "train.batch_size=2048",
         "model.num_dense=13", "model.embedding_dim=64", "model.bottom_mlp=[512, 256]", "model.top_mlp=[512, 256]",
         "model.num_tables=26", "model.rows_per_table=100000", "train.learning_rate=0.01")
RAGGED = ("data.ragged=true", "model.tables=[{name='a', rows=9, multi_hot=4, pooling='mean'}, "
          "{name='b', rows=60, multi_hot=3}, {name='c', rows=5}]")
SHARED = ("data.ragged=true", "model.tables=[{name='item', rows=40}, {name='shop', rows=9, pooling='mean', "
          "multi_hot=2}, {name='seen', multi_hot=3, shares='item'}, {name='last', shares='shop'}]")
RATES = ("model.tables=[{name='a', rows=9, learning_rate=0.2}, {name='b', rows=60}, {name='c', rows=5, "
         "learning_rate=0.0}, {name='d', rows=50, init_range=0.5}]", "train.warmup_steps=5")
WIDTHS = ("model.kind=dcnv2", "model.tables=[{name='a', rows=9, dim=8}, {name='b', rows=61, dim=12}, {name='c', "
          "rows=5, dim=8}, {name='d', rows=50, dim=20, multi_hot=2}]")
ALL = ("train.table_dtype=fp16", "train.optimizer=adam", "train.learning_rate=0.005", "train.weight_decay=0.1",
       "train.dense_optimizer=adam", "train.embedding_l2=0.01", "train.max_gradient_norm=0.05", "model.dropout=0.2")


@pytest.mark.parametrize("sets", [
    (), ("model.kind=dcnv2",), WIDTHS, ("model.num_dense=0",), RAGGED, ("model.top_mlp=[]", "model.bottom_mlp=[]"),
    ("model.embedding_dim=12",), ("model.embedding_dim=256",), ("model.num_tables=1",), ("model.num_tables=70",),
    ("train.optimizer=adagrad", "train.dense_optimizer=adam", "train.dense_learning_rate=0.01"),
    ("train.optimizer=sgd", "train.dense_optimizer=sgd"), ("train.warmup_steps=9", "train.decay=cosine"),
    ("train.optimizer=adam", "train.learning_rate=0.005"), SHARED, RATES, ("train.max_gradient_norm=0.02",),
    ("train.weight_decay=0.5", "train.dense_optimizer=adam", "train.dense_learning_rate=0.01"),
    ("train.embedding_l2=0.5",), ("model.dropout=0.3", "model.top_mlp=[16, 8]", "model.bottom_mlp=[16, 8]"),
], ids=str)
def test_in_fp32_the_losses_are_those_of_the_pipeline(train_tiny, sets):
    pipeline = train_tiny(*GPU, *sets, "train.engine=pipeline")
    captured = train_tiny(*GPU, *sets)
    assert captured.of("start")[0]["engine"] == "cuda_graph"
    assert captured.losses() == pytest.approx(pipeline.losses(), rel=2e-4)


@pytest.mark.parametrize("sets", [(), ("model.kind=dcnv2", "train.precision=bf16"), RAGGED,
                                  ("model.num_dense=0", "train.max_gradient_norm=0.02")], ids=str)
def test_captured_nccl_collectives_do_not_change_losses(train_tiny, monkeypatch, sets):
    """In a group of one: ids, pooled rows, their gradients and the dense gradients all go through NCCL."""
    alone = train_tiny(*GPU, *sets)
    num_calls = {"all_to_all_single": 0, "all_reduce": 0}

    def counted(name):
        call = getattr(dist, name)

        def counting(*arguments, **more):
            num_calls[name] += 1
            return call(*arguments, **more)

        return counting

    monkeypatch.setattr(engine, "needs_exchange", lambda world: True)
    for name in num_calls:
        monkeypatch.setattr(dist, name, counted(name))
    exchanged = train_tiny(*GPU, *sets)
    assert exchanged.losses() == alone.losses()
    num_bodies = num_calls["all_to_all_single"] // 3
    assert num_calls == {"all_to_all_single": 3 * num_bodies, "all_reduce": 2 * num_bodies}
    assert 0 < num_bodies < len(alone.losses())  # recorded, not called in every step


def test_over_200_steps_engines_differ_by_less_than_one_bit_makes(train_tiny, monkeypatch):
    """Adagrad turns the last bit of a small gradient into a whole step, so losses part whatever computes them; by SGD,
    which does not, they stay the same."""
    from embark.trainers.torch import trainer

    fill = trainer.fill_tables

    def fill_and_nudge(tables, model, seed):
        fill(tables, model, seed)
        with torch.no_grad():
            for _, shard, _, _ in local_shards(tables):
                shard.mul_(1 + 2**-23)

    def losses(engine, *sets):
        return train_tiny(*QUICK, f"train.engine={engine}", *sets).losses()

    sgd = ("train.optimizer=sgd", "train.dense_optimizer=sgd")
    assert losses("cuda_graph", *sgd) == pytest.approx(losses("pipeline", *sgd), abs=1e-6)
    pipeline, captured = losses("pipeline"), losses("cuda_graph")
    assert captured[:10] == pytest.approx(pipeline[:10], abs=1e-6)
    monkeypatch.setattr(trainer, "fill_tables", fill_and_nudge)
    nudged = losses("pipeline")
    assert _parted(pipeline, nudged) > 0
    assert _parted(pipeline, captured) <= 2 * _parted(pipeline, nudged)


@pytest.mark.parametrize("sets", [(), ("model.kind=dcnv2",), ("model.num_dense=0",), RAGGED])
def test_in_bf16_the_losses_are_close_and_repeat_to_the_bit(train_tiny, sets):
    sets = (*GPU, *sets, "train.precision=bf16")
    pipeline = train_tiny(*sets, "train.engine=pipeline")
    captured = train_tiny(*sets)
    assert captured.losses() == pytest.approx(pipeline.losses(), rel=0.03)
    assert train_tiny(*sets).losses() == captured.losses()


def test_in_bf16_both_engines_learn_alike(train_tiny):
    sets = ("place.device=cuda", "train.precision=bf16", "data.num_train_samples=400000", "data.num_eval_samples=65536",
            "train.batch_size=1024", "watch.every=50", "train.learning_rate=0.02")
    aucs = [train_tiny(*sets, f"train.engine={engine}").of("eval")[-1]["auc"] for engine in ("pipeline", "cuda_graph")]
    assert aucs[0] > 0.6
    assert aucs[1] == pytest.approx(aucs[0], abs=5e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_a_resumed_run_gives_the_same_losses_bit_for_bit(train_tiny, precision, optimizer):
    sets = (*GPU, f"train.precision={precision}", f"train.dense_optimizer={optimizer}", "store.checkpoint_every=8",
            "train.dense_learning_rate=0.01")
    reference = train_tiny(*sets, "name=whole")
    train_tiny(*sets, "name=parts", "train.num_steps=16", fresh=False)
    resumed = train_tiny(*sets, "name=parts", fresh=False)
    assert resumed.of("resume")[0]["step"] == 16
    assert resumed.losses() == reference.losses()


@pytest.mark.parametrize("sets", [
    ALL, ("train.optimizer=rowwise_adam", "train.table_dtype=fp16", "data.num_eval_samples=0"),
    ("train.table_dtype=fp16", *SHARED), ("train.table_dtype=fp16", *RATES), ("train.table_dtype=bf16", *SHARED),
    (*ALL, "train.table_dtype=bf16"),
], ids=str)
def test_with_every_option_a_resumed_run_is_bit_exact(train_tiny, sets):
    """And evaluates in between, which must leave no trace; by FBGEMM, a build of which may lack row-wise Adam; of rows
    in bf16 in plain torch."""
    sets = (*GPU, *sets, "train.precision=bf16", "store.checkpoint_every=8", "store.checkpoint_at_end=true")
    reference = train_tiny(*sets, "name=whole", "train.eval_every=5")
    assert reference.of("start")[0]["engine"] == "cuda_graph"
    train_tiny(*sets, "name=parts", "train.num_steps=16", fresh=False)
    resumed = train_tiny(*sets, "name=parts", fresh=False)
    assert resumed.losses() == reference.losses()
    assert [e["log_loss"] for e in resumed.of("eval")[-1:]] == [e["log_loss"] for e in reference.of("eval")[-1:]]
    assert resumed.losses() != train_tiny(*sets, "train.seed=2").losses()


# FBGEMM 1.6's Adam refuses rows in fp16, so there is nothing to compare it with.
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adagrad"])
def test_fp16_losses_differ_by_less_than_the_rounding_seed_makes(
    train_tiny, monkeypatch, optimizer
):
    """Against FBGEMM's pipeline, whose rounding draws other bits: both are random roundings of the same run. How far
    two of them part is measured by two of Embark's own, which differ in the seed of the rounding alone."""
    import zlib

    sets = (*QUICK, f"train.optimizer={optimizer}", "train.table_dtype=fp16", "train.precision=fp32")
    pipeline = train_tiny(*sets, "train.engine=pipeline").losses()
    captured = train_tiny(*sets)
    assert captured.of("start")[0]["engine"] == "cuda_graph"
    others = []
    for seed in (1, 2):
        monkeypatch.setattr(engine, "rounding_seed", lambda _, seed=seed: zlib.crc32(bytes([seed])))
        others.append(train_tiny(*sets).losses())
    assert captured.losses()[0] == pytest.approx(pipeline[0], rel=1e-6)
    apart = max(_parted(*others), *(_parted(captured.losses(), other) for other in others))
    assert apart > 0
    assert _parted(captured.losses(), pipeline) <= 2 * apart


@pytest.mark.parametrize(("dtype", "scale", "bits"), [
    (torch.float16, 1.0, 10), (torch.float16, 2e-5, 10), (torch.bfloat16, 1.0, 7)], ids=["normal", "subnormal", "bf16"])
def test_compiled_kernels_round_without_bias_to_a_neighbour(dtype, scale, bits):
    """One step of SGD on rows in 16 bits, a hundred times from the same rows."""
    from embark.trainers.torch.engines.cuda_graph import table_kernels as kernels

    num_rows, dim, device = 4096, 64, "cuda"
    generator = torch.Generator(device).manual_seed(1)
    start = (torch.randn(num_rows, dim, generator=generator, device=device) * scale).to(dtype)
    grads = torch.randn(num_rows, dim, generator=generator, device=device) * scale * 1e-2
    keys, order = (torch.arange(num_rows, device=device, dtype=dtype) for dtype in (torch.int32, torch.int64))
    slots = torch.tensor([[0, 0, 1, 0]], dtype=torch.int32, device=device)
    ids = kernels.SortedIds(keys, order, num_rows, slots, num_rows, 16)
    kernels.locate(ids, grads.stride(0))
    partial = torch.zeros(kernels.partial_shape(num_rows, dim), device=device)
    rounding = kernels.Rounding(torch.tensor([5], device=device), torch.zeros(1, 2, dtype=torch.int64, device=device))
    exact = (start.float() - torch.tensor(0.5, device=device) * grads).double()
    total = torch.zeros_like(exact)
    num_steps = 100
    for step in range(num_steps):
        weights = start.clone().view(-1)
        rows = kernels.Rows(weights, None, None, torch.zeros(1, dtype=torch.int64, device=device), None, 0, dim,
                            "sgd", 1e-8)
        kernels.update(ids, grads, partial, torch.tensor([0.5], device=device),
                       torch.tensor([step], device=device), rows, rounding, has_long_runs=False)
        rounded = weights.view(num_rows, dim).double()
        # Subnormal numbers have one step for all; of others none is larger than 2^-bits of the number.
        space = torch.clamp(exact.abs() * 2.0**-bits, min=2.0**-24)
        assert ((rounded - exact).abs() <= space).all()
        total += rounded
    error = (total / num_steps - exact) / space
    assert abs(error.mean().item()) < 5 * 0.5 / (num_steps * num_rows * dim) ** 0.5
    assert error.abs().max().item() < 7 * 0.5 / num_steps**0.5


def test_rowwise_adam_is_that_of_its_definition(built_on_gpu):
    """FBGEMM calls it partial row-wise Adam; a build of it may lack the kernel."""
    from embark.data import open_source

    moved = {}
    for optimizer, rate in (("sgd", 1.0), ("rowwise_adam", 0.005)):
        trainer = built_on_gpu(*GPU, f"train.optimizer={optimizer}", f"train.learning_rate={rate}")
        tables = sharded_tables(trainer.model)
        before = [shard.clone() for _, shard, _, _ in local_shards(tables)]
        with trainer.feed(open_source(trainer.spec), 0, 1) as batches:
            trainer.step(batches, 0)
        torch.cuda.synchronize()
        after = [shard for _, shard, _, _ in local_shards(tables)]
        moved[optimizer] = torch.cat([a - b for a, b in zip(after, before, strict=True)])
    grads = -moved["sgd"]
    is_clear = grads.abs().amin(1) > 3e-6  # below, the rounding of fp32 decides
    assert is_clear.any()
    expected = -0.005 * grads / (grads.square().mean(1, keepdim=True).sqrt() + 1e-4)
    assert torch.allclose(moved["rowwise_adam"][is_clear], expected[is_clear], rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize(("first", "then"), [("cuda_graph", "pipeline"), ("pipeline", "cuda_graph")])
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam"])
def test_a_checkpoint_of_one_engine_continues_in_the_other(train_tiny, first, then, optimizer):
    sets = (*GPU, "store.checkpoint_every=8", "train.dense_optimizer=adam", "train.dense_learning_rate=0.01",
            f"train.optimizer={optimizer}", "train.learning_rate=0.005")
    reference = train_tiny(*sets, "name=whole", "train.engine=pipeline")
    train_tiny(*sets, "name=parts", "train.num_steps=16", f"train.engine={first}", fresh=False)
    resumed = train_tiny(*sets, "name=parts", f"train.engine={then}", fresh=False)
    assert resumed.losses() == pytest.approx(reference.losses(), rel=2e-4)


def test_rows_of_prepared_data_are_decoded_on_the_device(train_tiny, tiny, tmp_path):
    from embark.data.make import make

    make(tiny("data.num_train_samples=16384"), tmp_path / "made")
    sets = (*GPU, "data.kind=prepared", f"data.path={tmp_path / 'made'}")
    pipeline = train_tiny(*sets, "train.engine=pipeline")
    captured = train_tiny(*sets)
    assert "decodes the rows" in captured.of("start")[0]["engine_reason"]
    assert captured.losses() == pytest.approx(pipeline.losses(), rel=2e-4)


def test_a_bad_id_is_found_on_the_device_and_reported(train_tiny, monkeypatch):
    """In what the device draws, and in what the host draws for the message."""
    from embark.data.synthetic import SyntheticSource
    from embark.trainers.torch.device_samples import DeviceSampler

    draw_rows, draw = SyntheticSource.train_rows, DeviceSampler.draw

    def spoilt_rows(self, epoch, start, stop):
        batch = draw_rows(self, epoch, start, stop)
        if start == 5 * 128:
            ids = batch.ids.copy()
            ids[128 + 7] = 50
            batch = dataclasses.replace(batch, ids=ids)
        return batch

    def spoilt(self, split, spans, to):
        drawn = draw(self, split, spans, to)
        for number, (start, _) in enumerate(spans):
            if start == 5 * 128:
                to.ids[number, 128 + 7] = 50
        return drawn

    monkeypatch.setattr(SyntheticSource, "train_rows", spoilt_rows)
    monkeypatch.setattr(DeviceSampler, "draw", spoilt)
    with pytest.raises(DataError, match=r"table cat_1: id 50 of sample 7 of the batch is not in 0 to 49, in step 6 "):
        train_tiny(*GPU, "watch.every=10")


def test_a_loss_that_is_no_number_names_its_first_step(train_tiny):
    with pytest.raises(EmbarkError, match=r"became NaN in step \d+ \(samples .*diverged"):
        train_tiny(*GPU, "train.optimizer=sgd", "train.dense_optimizer=sgd", "train.learning_rate=1e30",
                   "watch.every=20")


def test_tables_on_the_host_are_fetched_ahead(train_tiny, monkeypatch):
    from embark.trainers.torch import sharding
    from embark.trainers.torch.world import World

    monkeypatch.setattr(World, "device_bytes", 400_000)
    monkeypatch.setattr(sharding, "host_bytes", lambda: 10**9)
    result = train_tiny(*GPU, "model.rows_per_table=5000", "train.memory_reserve=0")
    start = result.of("start")[0]
    assert start["engine"] == "pipeline"
    assert "host's memory" in start["engine_reason"]
    assert "one batch ahead" in start["engine_reason"]
    assert result.losses()[-1] < result.losses()[0]


def test_too_little_memory_is_reported_with_what_would_help(train_tiny):
    with pytest.raises(EmbarkError, match="out of GPU memory") as caught:
        train_tiny(*GPU, "train.batch_size=65536", "data.num_train_samples=65536",
                   "model.top_mlp=[1000000]", "train.num_steps=1")
    assert "batch_size" in str(caught.value.fix)


@pytest.fixture
def built_on_gpu(tiny):
    """A function from settings to a model ready to train."""
    from embark.data import open_source
    from embark.spec import PlaceSpec
    from embark.trainers.torch.trainer import TorchTrainer
    from embark.trainers.torch.world import join

    with join(PlaceSpec(device="cuda")) as world:
        yield lambda *sets: TorchTrainer(tiny(*sets), world, 100, open_source(tiny(*sets)))


def _parted(losses, others):
    """How far apart, on average."""
    return sum(abs(a - b) for a, b in zip(losses, others, strict=True)) / len(losses)
