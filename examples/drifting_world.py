"""Samples of a world that changes, to try streams and dynamic tables on: ids come and go, and what they mean drifts.

Put this file beside a spec. `stream.source = "drifting_world:Stream"` is a stream without end, and
`data.kind = "drifting_world:Samples"` a finite part of it, whose held-out samples follow the others in time.

A sample is a function of the seed and its position alone, so a run that is stopped continues with the same samples.
"""

import numpy as np

DAY_S = 86_400
FIRST_DAY_S = 1_700_000_000
SPREAD, BIAS = 1.8, -1.5  # About one sample in four has label 1.


class World:
    """A feature has `num_ids` ranks by popularity. Each is held by one id at a time, a random 63-bit number, which a
    new one replaces at some moment (`id_churn`: the share of the ids that a day replaces). The effect of an id, and of
    a dense column, becomes another one `preference_drift` times a day, gradually."""

    def __init__(self, num_features=6, num_dense=4, seed=1, samples_per_day=20_000, num_ids=2_000, id_churn=0.1,
                 preference_drift=0.2, rows=0):
        self.num_features, self.num_dense, self.seed = num_features, num_dense, seed
        self.samples_per_day, self.num_ids, self.rows = samples_per_day, num_ids, rows
        self.id_churn, self.preference_drift = id_churn, preference_drift
        self._mean, self._std = 0.0, 1.0
        logits = self._logits(*self._features(np.arange(8192) * samples_per_day // 256)) - BIAS
        self._mean, self._std = logits.mean(), logits.std() / SPREAD

    def days(self, positions):
        """Return the times of samples, in days."""
        return positions / self.samples_per_day

    def samples(self, positions):
        """Return the labels [n], dense values [n, num_dense] and ids [n, num_features] of samples."""
        days, dense, ranks, ids = self._features(positions)
        coin = uniform(self.seed, 1, positions)
        label = (coin < sigmoid(self._logits(days, dense, ranks, ids))).astype(np.float32)
        return label, dense.astype(np.float32), ids % self.rows if self.rows else ids

    def best_auc(self, positions):
        """Return the AUC that the true probabilities reach, in expectation over the labels."""
        clicks = np.sort(sigmoid(self._logits(*self._features(positions))))
        others = 1 - clicks
        in_order = (clicks * (np.cumsum(others) - others)).sum()
        return in_order / (clicks.sum() * others.sum() - (clicks * others).sum())

    def _features(self, positions):
        days, features = self.days(positions), np.arange(self.num_features)
        dense = 12**0.5 * (uniform(self.seed, 2, positions[:, None], np.arange(self.num_dense)) - 0.5)
        u = uniform(self.seed, 3, positions[:, None], features)
        ranks = (self.num_ids**u).astype(np.int64) - 1  # Zipf's law
        generation = np.floor(uniform(self.seed, 4, features, ranks) + days[:, None] * self.id_churn).astype(np.int64)
        ids = (random_bits(self.seed, 5, features, ranks, generation) >> np.uint64(1)).astype(np.int64)
        return days, dense, ranks, ids

    def _logits(self, days, dense, ranks, ids):
        weights = self._drifting(6, np.arange(self.num_dense), days)
        effects = self._drifting(7, ids, days) * 50 / (ranks + 50)  # popular ids matter most
        logits = (dense * weights).sum(axis=1) + effects.sum(axis=1)
        return (logits - self._mean) / self._std + BIAS

    def _drifting(self, what, names, days):
        """Return numbers of variance 1 that move from one random value to the next."""
        moment = uniform(self.seed, what, names) + days[:, None] * self.preference_drift
        knot = np.floor(moment).astype(np.int64)
        before, after = (12**0.5 * (uniform(self.seed, what, names, knot + step) - 0.5) for step in (0, 1))
        share = moment - knot
        return (before * (1 - share) + after * share) / np.sqrt((1 - share) ** 2 + share**2)


class Stream:
    """Sends the samples in order; the columns have the names of a model with `num_tables` tables."""

    settings = {"rows": 2_000}  # The tables' rows: ids are taken modulo this number.

    def __init__(self, stream):
        self.world = World(**self.settings)

    def poll(self, offset, timeout_s):
        """Return the (offset, row) pairs behind `offset`, which is None at first: the same pairs every time."""
        first = 0 if offset is None else offset + 1
        return list(enumerate(self.rows(first, first + 500), first))

    def rows(self, start, stop):
        """Return the samples `start` to `stop` as rows of a stream."""
        positions = np.arange(start, stop)
        label, dense, ids = self.world.samples(positions)
        times = FIRST_DAY_S + DAY_S * self.world.days(positions)
        return [{
            "time": float(times[i]), "label": int(label[i]),
            **{f"dense_{j}": float(value) for j, value in enumerate(dense[i])},
            **{f"cat_{j}": int(value) for j, value in enumerate(ids[i])},
        } for i in range(len(positions))]


class Samples:
    """The first samples of the world, for a model with one id per sample and table."""

    settings = {}

    def __init__(self, data, model):
        self.num_train_samples, self.num_eval_samples = data.num_train_samples, data.num_eval_samples
        self.names = [table.name for table in model.table_list()]
        shape = {"num_features": len(self.names), "num_dense": model.num_dense, "seed": data.seed}
        self.world = World(**{**shape, **self.settings})

    def rows(self, split, positions):
        first = self.num_train_samples if split == "eval" else 0
        label, dense, ids = self.world.samples(first + positions)
        return label, dense, dict(zip(self.names, ids.T, strict=True))


def random_bits(*parts):
    """Return 64 random bits for each combination of the parts, which broadcast (SplitMix64)."""
    bits = np.zeros(1, np.uint64)
    for part in parts:
        bits = (bits + np.asarray(part).astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits = bits ^ (bits >> np.uint64(31))
    return bits


def uniform(*parts):
    """Return random numbers in [0, 1)."""
    return (random_bits(*parts) >> np.uint64(11)) * 2.0**-53


def sigmoid(logits):
    return 1 / (1 + np.exp(-logits))
