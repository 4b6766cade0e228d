"""`[model.two_tower]`: which features belong to the user and which to the item, and how retrieval is trained."""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from embark.errors import Mistakes, conflict, nearest
from .section import NonNegativeInt, PositiveInt, Section

if TYPE_CHECKING:
    from .model import ModelSpec
    from .run import RunSpec

SECTION = "model.two_tower"
TowerLayers = Annotated[tuple[Annotated[int, Field(gt=0, le=2**20)], ...], Field(strict=False, max_length=100)]
TableNames = Annotated[tuple[str, ...], Field(strict=False, max_length=10_000)]


class TwoTowerSpec(Section):
    """Retrieval: a user tower and an item tower, whose dot product is the score."""

    item: str = ""
    """The table whose ids are the items to retrieve."""
    user: str = ""
    """The table whose ids are the users: held-out samples are evaluated by user. Empty: each sample is a user."""
    item_tables: TableNames = ()
    """Further tables of the item tower, features of the item. All other tables belong to the user tower."""
    num_item_dense: NonNegativeInt = 0
    """The last so many dense features belong to the item tower, the others to the user tower."""
    user_layers: TowerLayers = ()
    """Layers of the user tower; the last is the width of its vectors. Empty: the sum of its pooled rows."""
    item_layers: TowerLayers = ()
    """Layers of the item tower, likewise."""
    normalize: bool = False
    """Scale the vectors of both towers to length 1."""
    temperature: float = Field(default=1.0, gt=0)
    """The dot product is divided by this; for normalized vectors 0.05 to 0.2."""
    num_sampled_negatives: NonNegativeInt = 0
    """Items drawn uniformly for each step, negatives of all its samples, beside the items of the other samples."""
    logq: bool = True
    """Subtract from each logit the logarithm of how often its item is expected among the candidates of a step, so that
    frequent items are not pushed down for being negatives more often."""
    eval_k: PositiveInt = Field(default=20, le=10_000)
    """K of Recall@K, NDCG@K and Hit@K."""
    exclude_seen: bool = True
    """Evaluation skips the items that the user has in the training data. Needs `user`."""


def is_item_table(model: "ModelSpec", name: str) -> bool:
    """Tell whether the item tower has this table."""
    return name == model.two_tower.item or name in model.two_tower.item_tables


def two_tower_mistakes(spec: "RunSpec") -> Mistakes:
    """Find conflicts of `[model.two_tower]`, and fields that two towers do not have."""
    model, two = spec.model, spec.model.two_tower
    if not spec.data.label and (model.kind != "two_tower" or spec.data.kind == "prepared"):
        yield conflict("data.label", "", 'only two towers on data.kind = "columns" do without a label',
                       "name the column that holds 0 or 1")
    if model.kind != "two_tower":
        yield from two.unused(SECTION, sorted(two.model_fields_set), f'while model.kind is "{model.kind}"',
                              'set model.kind = "two_tower"')
        return
    if not two.item:
        yield conflict(f"{SECTION}.item", "", "two towers need to know the items",
                       "name the table whose ids are the items")
    if two.num_item_dense > model.num_dense:
        yield conflict(f"{SECTION}.num_item_dense", two.num_item_dense,
                       f"is more than model.num_dense = {model.num_dense}", "make it smaller")
    if model.gives_tables:
        yield from _table_mistakes(model)
    if model.dropout:
        yield conflict("model.dropout", model.dropout, "has no effect on two towers", "leave it out")


def _table_mistakes(model: "ModelSpec") -> Mistakes:
    two, tables = model.two_tower, {table.name: table for table in model.table_list()}
    for field, names in (("item", (two.item,)), ("user", (two.user,)), ("item_tables", two.item_tables)):
        for name in names:
            if name and name not in tables:
                yield conflict(f"{SECTION}.{field}", name, "is no table", nearest(name, list(tables)))
    for field, name in (("item", two.item), ("user", two.user)):
        if name in tables and tables[name].multi_hot > 1:
            yield conflict(f"{SECTION}.{field}", name, "has several ids per sample",
                           "name a table with one id per sample")
    if two.user and is_item_table(model, two.user):
        yield conflict(f"{SECTION}.user", two.user, "belongs to the item tower", "name a table of the user tower")
    if all(is_item_table(model, name) for name in tables) and model.num_dense == two.num_item_dense:
        yield conflict(f"{SECTION}.item_tables", list(two.item_tables), "leaves the user tower without a feature",
                       "leave the user's tables out")
    widths = {}
    for tower, layers, num_dense in (("user", two.user_layers, model.num_dense - two.num_item_dense),
                                     ("item", two.item_layers, two.num_item_dense)):
        own = {table.dim or 0 for table in tables.values() if is_item_table(model, table.name) == (tower == "item")}
        if not layers and (num_dense > 0 or len(own) > 1):
            what = f"the {tower} tower has " + ("dense features" if num_dense > 0 else "rows of several widths")
            yield conflict(f"{SECTION}.{tower}_layers", list(layers), f"{what}, which need a layer",
                           f"such as [{model.embedding_dim}]")
        elif layers or own:
            widths[tower] = layers[-1] if layers else own.pop()
    if len(set(widths.values())) > 1:
        yield conflict(f"{SECTION}.item_layers", list(two.item_layers),
                       f"the item tower's vectors are {widths['item']} wide, the user tower's {widths['user']}",
                       "end both with the same width")
