"""What the classes that Ray Data's map actors run have in common: tables in, tables with more columns out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Columns = dict[str, list[Any]]


class TableStage:
    """Adds columns to tables, or replaces them. The other columns stay as they are."""

    READS: Sequence[str] = ()
    """The columns that it looks at, as far as a table has them."""
    TAKES: Sequence[str] = ()
    """The columns that it removes."""

    def __call__(self, table: Any) -> Any:
        """Run a batch, a `pyarrow.Table`. Raises what `columns` raises."""
        from ray.data import block

        accessor: Any = block.BlockAccessor
        read = {name: table.column(name).to_pylist() for name in self.READS if name in table.column_names}
        made: Any = accessor.batch_to_arrow_block(self.columns(read, table.num_rows))
        for name in {*made.column_names, *self.TAKES} & {*table.column_names}:
            table = table.drop_columns([name])
        for name in made.column_names:
            table = table.append_column(name, made.column(name))
        return table

    def columns(self, batch: Columns, size: int) -> Columns:
        """The new columns of `size` rows. `batch`: the columns of `READS` that they have."""
        raise NotImplementedError
