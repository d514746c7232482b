"""Batches of Ray Data, whatever their blocks are, become columns, and errors say which row they are of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raycore.data.tables import BadRow, Columns, TableStage
from raycore.errors import InvalidRequest

pa = pytest.importorskip("pyarrow", reason="needs the extra data")
pd = pytest.importorskip("pandas", reason="needs the extra data")


class Noting(TableStage):
    READS = ("messages", "prompt", "model")
    TAKES = ("prompt",)

    def __init__(self, bad: int | None = None) -> None:
        self.seen: list[Columns] = []
        self._bad = bad

    def columns(self, batch: Columns, size: int) -> Columns:
        self.seen.append(batch)
        if self._bad is not None:
            raise BadRow(self._bad, InvalidRequest("temperature=-1 is negative"))
        return {"text": ["made"] * size}


def as_blocks(frame: Any) -> Any:
    """The frame as Ray Data has it in blocks: with columns of arrays as a type of its own."""
    from ray.data.extensions import TensorArray

    return frame.assign(messages=TensorArray(frame["messages"].to_numpy()))


CHATS = [[{"role": "user", "content": "a"}], [{"role": "system", "content": "b"}, {"role": "user", "content": "c"}]]


def test_chats_of_pandas_are_lists_and_missing_values_are_null() -> None:
    arrays = pd.Series([np.array(chat, dtype=object) for chat in CHATS])
    frame = pd.DataFrame({"id": [7, 8], "messages": arrays, "prompt": ["x", np.nan]})
    stage = Noting()
    made = stage(as_blocks(frame))
    assert stage.seen == [{"messages": CHATS, "prompt": ["x", None]}]
    assert made.column_names == ["id", "messages", "text"]
    assert made.to_pylist()[1] == {"id": 8, "messages": CHATS[1], "text": "made"}


def test_tables_keep_the_columns_that_a_stage_does_not_replace() -> None:
    made = Noting()(pa.table({"id": [1, 2], "prompt": ["a", "b"], "text": ["old", "old"]}))
    assert made.to_pylist() == [{"id": 1, "text": "made"}, {"id": 2, "text": "made"}]


@pytest.mark.parametrize("form", ["arrow", "pandas"])
def test_the_error_of_a_row_names_its_place_and_its_columns_those_of_the_request_last(form: str) -> None:
    frame = pd.DataFrame(
        {"prompt": ["x" * 500, "y" * 500], "source": ["a.txt", "b.txt"], "notes": ["n" * 500] * 2, "id": [40, 41]}
    )
    with pytest.raises(InvalidRequest) as caught:
        Noting(bad=1)(pa.Table.from_pandas(frame) if form == "arrow" else frame)
    message = str(caught.value)
    assert message.startswith("temperature=-1 is negative; it is row 1 of the 2 of its batch, and the row has id=41, ")
    assert "source='b.txt'" in message
    assert message.index("source=") < message.index("prompt='yyy")
    assert "n" * 100 not in message
    assert "y" * 100 not in message


def test_the_error_of_a_row_with_many_columns_has_a_limit() -> None:
    columns = {f"column_{number}": ["v" * 70] for number in range(200)} | {"id": ["mine"]}
    with pytest.raises(InvalidRequest, match="the row has id='mine'") as caught:
        Noting(bad=0)(pa.table(columns))
    assert len(str(caught.value)) < 2_200
