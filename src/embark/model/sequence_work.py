"""What DIN, SASRec and HSTU do for a sample: arithmetic by the mean length, memory by the longest sequence."""

from embark.spec import ModelSpec

NUM_TIME_BUCKETS = 32  # By powers of two of seconds: the last begins after 68 years.
DIN_UNITS = (64, 16)  # Of the layers that weigh one item of the history.


class Counts:
    """Adds up weights, arithmetic and what autograd keeps."""

    def __init__(self) -> None:
        self.num_values = self.num_layers = 0
        self.flops_per_sample = self.output_width = 0.0

    def linear(self, num_in: int, num_out: int, mean_rows: float = 1.0, max_rows: float = 1.0) -> None:
        """A dense layer over rows of a sample: there and back, a multiplication and an addition for each weight."""
        self.num_values += (num_in + 1) * num_out
        self.num_layers += 1
        self.flops_per_sample += 6 * mean_rows * num_in * num_out
        self.output_width += max_rows * num_out

    def products(self, mean_pairs: float, dim: int) -> None:
        """Dot products of rows."""
        self.num_layers += 1
        self.flops_per_sample += 6 * mean_pairs * dim

    def weights(self, num: int) -> None:
        """That take no arithmetic to speak of."""
        self.num_values += num

    def kept(self, values: float) -> None:
        """By autograd, besides what layers give."""
        self.output_width += values


def count_sequence_model(model: ModelSpec) -> Counts:
    """Of the network that the trainer builds."""
    counts, roles = Counts(), model.sequence
    history = model.feature(roles.history)
    dim, mean, longest = history.dim or 0, history.mean_ids, float(history.multi_hot)
    if model.kind == "din":
        width = 4 * dim
        counts.kept(longest * (4 + 2) * dim)  # the items beside the candidate; what is weighed
        for units in (*DIN_UNITS, 1):
            counts.linear(width, units, mean, longest)
            width = units
        _count_head(counts, model, 3 * dim)
        return counts
    change = -1 if roles.is_next_item else 1  # the last item is only predicted; the candidate comes behind the history
    mean, longest = max(1.0, mean + change), max(1.0, longest + change)
    _count_encoder(counts, model, dim, mean, longest)
    if roles.is_next_item:
        negatives = model.feature(roles.negatives)
        counts.products(mean * (negatives.mean_ids + 1), dim)
        counts.kept(2 * longest * negatives.multi_hot)
    else:
        _count_head(counts, model, dim)
    return counts


def _count_encoder(counts: Counts, model: ModelSpec, dim: int, mean: float, longest: float) -> None:
    """Causal attention: each row sees itself and those before it. Scores are not counted as kept: kernels on a GPU
    compute them again."""
    has_times = bool(model.sequence.times)
    counts.weights(int(longest) * dim + 2 * dim)  # positions, and the last normalization
    counts.weights(NUM_TIME_BUCKETS * dim if has_times and model.kind == "sasrec" else 0)
    counts.kept(3 * longest * dim)
    for _ in range(model.sequence.num_blocks):
        counts.weights(4 * dim)  # two normalizations
        counts.products(2 * mean * (mean + 1) / 2, dim)
        if model.kind == "hstu":
            counts.weights(2 * int(longest) - 1 + (NUM_TIME_BUCKETS if has_times else 0))
            counts.linear(dim, 4 * dim, mean, longest)
            counts.kept(longest * (4 + 5) * dim)  # after SiLU; normalized, attended, normalized, gated, dropped
            counts.linear(dim, dim, mean, longest)
        else:
            counts.linear(dim, 3 * dim, mean, longest)
            counts.kept(longest * 8 * dim)
            for _ in range(3):
                counts.linear(dim, dim, mean, longest)


def _count_head(counts: Counts, model: ModelSpec, width: int) -> None:
    roles = (model.sequence.history, model.sequence.candidate, model.sequence.times)
    if model.num_dense:
        _count_mlp(counts, model.num_dense, (*model.bottom_mlp, model.embedding_dim))
        width += model.embedding_dim
    width += sum(table.dim or 0 for table in model.table_list() if table.name not in roles)
    _count_mlp(counts, width, (*model.top_mlp, 1))


def _count_mlp(counts: Counts, width: int, sizes: tuple[int, ...]) -> None:
    for size in sizes:
        counts.linear(width, size)
        width = size
