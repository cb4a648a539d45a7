"""The largest batch that fits."""

from costmodel.model.memory import Method, peak_memory
from costmodel.model.quantisation import BF16
from costmodel.planning.batch import largest_batch
from costmodel.workloads.named import load_workload


def test_largest_batch_fits_and_one_more_does_not():
    def build(sequences):
        return load_workload("roberta_base_mnli", sequences)

    method, budget = Method("bf16", BF16), 10e9
    found = largest_batch(build, method, budget)
    assert peak_memory(build(found), method).peak <= budget < peak_memory(build(found + 1), method).peak
    assert largest_batch(build, method, 1e6) == 0
