"""The step compiles for TPUs where there is none, and the compiler's plan of memory is told."""

from __future__ import annotations

import pytest

from embark.errors import MissingPackage, UserError
from embark.spec import resolve
from embark.tpu import aot

SETS = ["model.num_tables=2", "model.rows_per_table=100000", "model.bottom_mlp=[16]", "model.top_mlp=[16]",
        "model.embedding_dim=64"]


def test_without_the_compiler_the_extra_that_brings_it_is_named(monkeypatch):
    monkeypatch.setattr(aot, "find_spec", lambda name: None if name == "libtpu" else object())
    with pytest.raises(MissingPackage, match="compiling for TPUs needs libtpu"):
        aot.compile_for(resolve({}), "v5e:2x4")


@pytest.mark.parametrize("topology", ["h100:8", "v5e", "", "v3:2x2"])
def test_what_is_no_kind_of_tpu_is_refused(topology):
    with pytest.raises(UserError, match="not a kind of TPU"):
        aot.compile_for(resolve({}), topology)


@pytest.mark.tpu
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x4", "v5p:2x2x1", "v6e:4x4"])
def test_the_whole_step_compiles_and_copies_no_table(topology):
    spec = resolve({}, [*SETS, "train.batch_size=4096"])
    compiled = aot.compile_for(spec, topology)
    table_bytes = 2 * 100_000 * 64 * 4 / compiled.num_chips
    assert table_bytes < compiled.argument_bytes < 1.5 * table_bytes + 2**20
    assert compiled.shared_bytes > table_bytes
    small = aot.compile_for(resolve({}, [*SETS, "train.batch_size=4096", "model.rows_per_table=1000"]), topology)
    assert compiled.temporary_bytes - small.temporary_bytes < table_bytes / 2


@pytest.mark.tpu
@pytest.mark.slow
def test_memory_during_a_step_goes_with_the_samples_of_a_chip_not_with_the_number_of_chips():
    found = [aot.compile_for(resolve({}, [*SETS, f"train.batch_size={1024 * chips}"]), topology)
             for chips, topology in ((4, "v5e:2x2"), (16, "v5e:4x4"))]
    assert found[0].batch_per_chip == found[1].batch_per_chip
    assert found[1].temporary_bytes < 1.25 * found[0].temporary_bytes
