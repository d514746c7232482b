"""What the classes that Ray Data's map actors run have in common: tables in, tables with more columns out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raycore.data.rows import plain
from raycore.errors import InvalidRequest, RequestFailed

Columns = dict[str, list[Any]]

_MAX_SHOWN = 80
"""How many characters of a value an error shows."""
_MAX_DESCRIBED = 2_000
"""How many characters of a row."""


class BadRow(Exception):
    """A row failed, and with it the dataset."""

    def __init__(self, index: int, error: InvalidRequest | RequestFailed) -> None:
        """`index`: of the row in its batch."""
        super().__init__(index, error)
        self.index = index
        self.error = error


class TableStage:
    """Adds columns to tables, or replaces them. The other columns stay as they are."""

    READS: Sequence[str] = ()
    """The columns that it looks at, as far as a table has them."""
    TAKES: Sequence[str] = ()
    """The columns that it removes."""

    def __call__(self, batch: Any) -> Any:
        """Run a batch, a `pyarrow.Table` or a `pandas.DataFrame`. Returns a `pyarrow.Table`.

        Raises:
            InvalidRequest, RequestFailed: a row failed. The message says which one.
            EngineDeadError: the engine has failed.
        """
        from ray.data import block

        accessor: Any = block.BlockAccessor
        table = _as_table(batch)
        read = {name: table.column(name).to_pylist() for name in self.READS if name in table.column_names}
        try:
            columns = self.columns(read, table.num_rows)
        except BadRow as bad:
            raise type(bad.error)(f"{bad.error}; {_described(table, bad.index, self.READS)}") from None
        made: Any = accessor.batch_to_arrow_block(columns)
        for name in {*made.column_names, *self.TAKES} & {*table.column_names}:
            table = table.drop_columns([name])
        for name in made.column_names:
            table = table.append_column(name, made.column(name))
        return table

    def columns(self, batch: Columns, size: int) -> Columns:
        """The new columns of `size` rows. `batch`: the columns of `READS` that they have. Raises BadRow."""
        raise NotImplementedError


def _as_table(batch: Any) -> Any:
    """A batch as a `pyarrow.Table`. Ray Data itself can't convert arrays of dicts, such as conversations, of pandas."""
    from ray.data import block

    if hasattr(batch, "column_names"):
        return batch
    accessor: Any = block.BlockAccessor
    of_objects = [name for name in batch.columns if str(getattr(batch[name].dtype, "element_dtype", "")) == "object"]
    lists = {name: [plain(each) for each in batch[name].array.to_numpy()] for name in of_objects}
    return accessor.for_block(batch.assign(**lists)).to_arrow()


def _described(table: Any, index: int, last: Sequence[str]) -> str:
    """Which row of a batch it is: its place, and its columns. `last`: those that come after the others."""
    names = sorted(table.column_names, key=lambda name: (name in last, name != "id"))
    values = [f"{name}={_shown(table.column(name).slice(index, 1).to_pylist()[0])}" for name in names]
    text = ", ".join(values)
    text = text if len(text) <= _MAX_DESCRIBED else f"{text[:_MAX_DESCRIBED]}…"
    return f"it is row {index} of the {table.num_rows} of its batch, and the row has {text}"


def _shown(value: object) -> str:
    text = " ".join(repr(plain(value)).split())
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
