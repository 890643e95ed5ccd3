"""The cost model of buckets: what it weighs, and what it chooses."""

import pytest
from torchrelay.planning.bucket_cost import Link, plan_for_link, predict
from torchrelay.planning.bucket_plan import ParameterFacts, bucket_limits, plan_buckets

MIB = 1 << 20


def layers(number, mib):
    return [ParameterFacts(f"p{i}", int(mib * MIB) // 4, 4, "float32", "cpu") for i in range(number)]


def chosen(parameters, backward, link):
    arrival = list(reversed(range(len(parameters))))
    return plan_for_link(parameters, arrival, backward, link, world_size=2)


def test_a_slow_start_wants_large_buckets_and_a_thin_link_small_ones():
    parameters = layers(64, 0.5)
    by_latency = chosen(parameters, 0.1, Link(latency=0.02, per_byte=0))
    by_bytes = chosen(parameters, 0.1, Link(latency=1e-6, per_byte=0.1 / (32 * MIB)))
    assert len(by_latency.buckets) < len(plan_buckets(parameters, bucket_limits(1), world_size=2).buckets)
    assert len(by_bytes.buckets) > len(by_latency.buckets)


@pytest.mark.parametrize("latency", [0, 1e-4, 1e-2])
@pytest.mark.parametrize("rate", [1e7, 1e9, 1e11])
@pytest.mark.parametrize("backward", [0.001, 0.1])
def test_the_choice_is_never_predicted_to_be_worse_than_the_default(latency, rate, backward):
    parameters, link = layers(100, 1.3), Link(latency, 1 / rate)
    plan = chosen(parameters, backward, link)
    arrival = list(reversed(range(len(parameters))))
    default = plan_buckets(parameters, bucket_limits(), world_size=2)
    assert plan.predicted.exposed <= predict(default, parameters, arrival, backward, link).exposed


def test_the_prediction_by_hand():
    """Two buckets of 1 MiB, each of one gradient; a backward of 2 s; a link of 1 s a MiB and 0.5 s a message."""
    parameters = layers(2, 1)
    plan = plan_buckets(parameters, [0], world_size=2)
    prediction = predict(plan, parameters, [1, 0], 2.0, Link(0.5, 1 / MIB))
    # The first one is complete at 1 s and through at 2.5 s; the second takes until 4 s.
    assert prediction.exposed == pytest.approx(2.0)
    assert "2e+03 ms of the reduction are left when a backward of 2e+03 ms is over" in str(prediction)


def test_no_parameters_and_empty_ones():
    assert chosen([], 0.1, Link(1e-3, 1e-9)).buckets == ()
    assert len(chosen(layers(3, 0), 0.1, Link(1e-3, 1e-9)).buckets) == 1
