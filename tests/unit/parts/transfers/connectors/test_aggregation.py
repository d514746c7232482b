from raycore.messages import StepResult, TransferResult
from raycore.parts.transfers.connectors.aggregation import TransferAggregator


def reported(aggregator: TransferAggregator, *reports: TransferResult | None) -> TransferResult | None:
    """What the reports of workers in one step come to."""
    outputs: list[StepResult | None] = [StepResult(1, transfer=each) for each in reports]
    return aggregator.aggregate(outputs).transfer


def test_a_request_counts_when_all_workers_have_reported_it() -> None:
    aggregator = TransferAggregator(2)
    first = reported(aggregator, TransferResult([5], [6], [3]), None)
    assert first == TransferResult([], [], [3])
    assert reported(aggregator, None, TransferResult([5], [6, 7], [3])) == TransferResult([5], [6], [3])
    assert reported(aggregator, None, None) is None
    assert reported(aggregator, TransferResult([], [7], []), None) == TransferResult([], [7], [])


def test_a_worker_that_reports_a_request_twice_counts_once_each_time() -> None:
    # its blocks were kept again before all workers had reported it
    aggregator = TransferAggregator(2)
    assert reported(aggregator, None, TransferResult([5, 5], [], [])) == TransferResult([], [], [])
    assert reported(aggregator, TransferResult([5], [], []), None) == TransferResult([5], [], [])
    assert reported(aggregator, TransferResult([5], [], []), None) == TransferResult([5], [], [])
    assert not aggregator._sent


def test_fewer_workers_may_be_enough() -> None:
    aggregator = TransferAggregator(1)
    assert reported(aggregator, None, TransferResult([5], [], [])) == TransferResult([5], [], [])
