"""The live set of workers: who joins, who may be chosen, who is forgotten."""

import pytest

from proxy.core.lifecycle import Event, State
from proxy.core.speed import SpeedCurve
from proxy.fleet.registry import EngineLoad, Facts, Registry, Source, Worker


def model(*names):
    return tuple({"id": name} for name in names)


def worker(name="a", incarnation="1", *, models=("m",), source=Source.REGISTERED, **fields):
    return Worker(name, f"http://{name}:8000", incarnation, source, facts=Facts(models=model(*models)), **fields)


class Fleet(Registry):
    """A registry that keeps what its listeners were told."""

    def __init__(self, *workers, ready=True):
        super().__init__()
        self.told = []
        self.listen(lambda worker, event: self.told.append((worker.id, event)))
        for one in workers:
            self.upsert(one)
            if ready:
                self.apply(one, Event.PROBED)

    def chosen(self):
        return [view.id for view in self.snapshot().workers]


def test_only_ready_workers_may_be_chosen():
    fleet = Fleet(worker("a"), worker("b"), ready=False)
    assert (fleet.chosen(), len(fleet)) == ([], 2)
    fleet.apply(fleet.get("a"), Event.PROBED)
    assert fleet.chosen() == ["a"]
    fleet.failed("a")
    assert fleet.chosen() == []
    fleet.failed("nobody")
    assert fleet.told == [("a", Event.RESTARTED), ("b", Event.RESTARTED), ("a", Event.PROBED), ("a", Event.FAILED)]


def test_a_view_carries_what_a_choice_needs():
    fleet = Fleet(worker("a", identity={"name": "H200 SXM", "gpu_count": 1}))
    one = fleet.get("a")
    one.load = EngineLoad(3, 2, 0.5)
    one.facts = Facts(models=model("m", "n"), block_tokens=32, capacity_tokens=1000)
    view = fleet.snapshot().workers[0]
    assert (view.models, view.block_tokens, view.capacity_tokens) == (frozenset({"m", "n"}), 32, 1000)
    assert (view.engine_waiting, view.hardware, view.speed) == (2, "H200 SXM", SpeedCurve())


@pytest.mark.parametrize(
    "identity", [{}, {"name": None}, {"name": 5, "gpu_count": "x"}, {"name": ["x"]}, {"gpu_count": None}, {"name": "?"}]
)
def test_an_identity_that_says_little_is_no_obstacle(identity):
    view = worker(identity=identity).view()
    assert view.speed == SpeedCurve()


def test_registering_again_is_harmless():
    fleet = Fleet(worker("a"))
    lease = fleet.lease("a", 100, 1.0)
    again = fleet.upsert(worker("a", lease_until=50.0))
    assert fleet.chosen() == ["a"]
    assert (again.inflight, again.lease_until) == (1, 50.0)
    assert fleet.told == [("a", Event.RESTARTED), ("a", Event.PROBED)]
    lease.release()


def test_another_incarnation_ends_the_old_one():
    fleet = Fleet(worker("a"))
    fleet.upsert(worker("a", "2"))
    assert fleet.chosen() == []
    assert fleet.get("a").state is State.JOINING
    assert fleet.told[-1] == ("a", Event.RESTARTED)


def test_a_draining_worker_that_registers_again_asks_to_be_in():
    fleet = Fleet(worker("a"))
    fleet.apply(fleet.get("a"), Event.DRAIN)
    fleet.apply(fleet.get("a"), Event.PROBED)
    assert fleet.chosen() == []
    fleet.upsert(worker("a"))
    fleet.apply(fleet.get("a"), Event.PROBED)
    assert fleet.chosen() == ["a"]


def test_a_model_is_known_from_the_registration_on():
    fleet = Fleet(worker("a", models=("m",)), worker("b", models=("n",)), ready=False)
    assert fleet.snapshot().known_models == {"m", "n"}


def test_a_model_whose_workers_are_away_stays_known():
    fleet = Fleet(worker("a", models=("m",)), worker("b", models=("n",), lease_until=5.0))
    assert [one.id for one in fleet.expire(4.9)] == []
    assert [one.id for one in fleet.expire(5.0)] == ["b"]
    assert (fleet.chosen(), fleet.snapshot().known_models) == (["a"], {"m", "n"})
    assert fleet.told[-1] == ("b", Event.LAPSED)
    fleet.upsert(worker("c", models=("m", "o")))
    fleet.apply(fleet.get("c"), Event.REMOVED)
    assert fleet.snapshot().known_models == {"m", "n"}


def test_a_model_that_only_a_removed_worker_served_is_forgotten():
    fleet = Fleet(worker("a", models=("m", "n")), worker("b", models=("n",)))
    fleet.apply(fleet.get("a"), Event.REMOVED)
    assert fleet.snapshot().known_models == {"n"}
    assert fleet.get("a") is None


def test_models_learned_by_a_probe_are_known():
    fleet = Fleet(worker("a"))
    fleet.learned(fleet.get("a"), Facts(models=model("m", "adapter")))
    assert fleet.snapshot().known_models == {"m", "adapter"}
    assert fleet.told[-1] == ("a", Event.PROBED)
    told = len(fleet.told)
    fleet.learned(fleet.get("a"), Facts(models=model("m"), capacity_tokens=500))
    assert len(fleet.told) == told + 1  # its shelf has another bound


def test_a_static_worker_has_no_lease():
    fleet = Fleet(worker("a", source=Source.STATIC))
    assert fleet.expire(1e12) == []


def test_a_late_probe_of_a_worker_that_left_touches_nobody():
    fleet = Fleet(worker("a"))
    old = fleet.get("a")
    fleet.apply(old, Event.REMOVED)
    new = fleet.upsert(worker("a", models=("n",)))
    fleet.apply(new, Event.PROBED)
    told = len(fleet.told)
    for event in (Event.FAILED, Event.PROBED, Event.LAPSED):
        fleet.apply(old, event)
    assert fleet.get("a") is new
    assert (fleet.chosen(), fleet.snapshot().known_models, len(fleet.told)) == (["a"], {"n"}, told)


def test_who_has_left_cannot_be_leased_or_addressed():
    fleet = Fleet(worker("a"))
    assert fleet.address("a") == "http://a:8000"
    fleet.apply(fleet.get("a"), Event.REMOVED)
    with pytest.raises(KeyError):
        fleet.lease("a", 1, 1.0)
    with pytest.raises(KeyError):
        fleet.address("a")


def test_failures_count_until_a_probe_gets_through():
    fleet = Fleet(worker("a"))
    fleet.failed("a")
    fleet.failed("a")
    assert fleet.get("a").failures == 2
    fleet.apply(fleet.get("a"), Event.PROBED)
    assert fleet.get("a").failures == 0


def test_a_report_is_plain_and_says_null_for_what_is_unknown():
    told = worker("a").report()
    assert (told["state"], told["source"], told["url"]) == ("joining", "registered", "http://a:8000")
    assert told["engine"] == {
        "version": None,
        "models": ["m"],
        "block_size": None,
        "capacity_tokens": None,
        "prefix_caching": None,
        "kv_cache_dtype": None,
        "running": None,
        "waiting": None,
        "kv_usage": None,
    }


def test_the_set_may_change_while_it_is_walked():
    fleet = Fleet(worker("a"), worker("b"))
    for one in fleet:
        fleet.apply(one, Event.REMOVED)
    assert len(fleet) == 0
