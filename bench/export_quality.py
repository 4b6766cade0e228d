"""What fewer bits cost: an exported run's AUC and size by the type of its tables, on the run's own held-out samples.

    embark train quickstart --set train.precision=fp32
    python bench/export_quality.py runs/quickstart
"""

import argparse
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from embark import evaluate, export_run
from embark.data import Batch, eval_batches
from embark.data.evaluation_rows import open_rows
from embark.data.prepared import Rows
from embark.export.artifact import open_artifact
from embark.export.quantize import TABLE_DTYPES
from embark.run.evaluation import exact_auc, halves_counter
from embark.store.checkpoint_inspect import find_trained
from embark.trainers.torch.scoring.cpu_model import ExportedModel


class OneRank:
    """This process alone."""

    def gathered(self, value: Any) -> list[Any]:
        return [value]


def rows_of(batch: Batch) -> Rows:
    ends = np.cumsum(batch.lengths.sum(axis=1))
    ids = tuple(batch.ids[end - lengths.sum() : end] for end, lengths in zip(ends, batch.lengths, strict=True))
    return Rows(batch.label, batch.dense, ids, tuple(batch.lengths))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    run = parser.parse_args().run
    trained = find_trained(run)
    of_trainer = evaluate(run)
    print(f"trainer's evaluation: AUC {of_trainer.auc:.7f}, log loss {of_trainer.log_loss:.7f}, "
          f"{of_trainer.num_samples:,} samples")
    with TemporaryDirectory() as folder, open_rows(trained.spec, trained.fingerprint) as held_out:
        batches = list(eval_batches(held_out.source, batch_size=trained.spec.train.batch_size, rank=0, world_size=1))
        label = np.concatenate([batch.label[: batch.num_samples] for batch in batches]) > 0.5
        exact = np.empty(0)
        for tables in TABLE_DTYPES:
            result = export_run(run, folder, tables=tables)
            model = ExportedModel(open_artifact(folder))
            logits = torch.cat([model.logits(rows_of(batch))[: batch.num_samples] for batch in batches]).numpy()
            auc, _ = exact_auc(OneRank(), logits[label], int((~label).sum()), halves_counter(logits[~label]))
            scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
            exact = scores if tables == "fp32" else exact
            loss = -np.log(np.where(label, scores, 1 - scores)).mean()
            print(f"{tables}: {result.num_bytes / 1e6:.1f} MB, tables {result.table_bytes / 1e6:.1f} MB, AUC {auc:.7f} "
                  f"({auc - of_trainer.auc:+.7f}), log loss {loss:.7f} ({loss - of_trainer.log_loss:+.7f}), scores "
                  f"differ from fp32 by at most {np.abs(scores - exact).max():.2e}")


if __name__ == "__main__":
    main()
