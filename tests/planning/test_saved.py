"""Measurements in a file: what they say of other ranks and other sizes of micro-batches, and what is refused."""

from __future__ import annotations

import json

import pytest

from mpipipe.errors import ConfigError
from mpipipe.planning import Choice, LayerCosts, Link, Profile, RankCosts, SavedProfile, Sizes, predict
from mpipipe.schedules import Links

SIGNATURES = ("embedding", "block", "block", "block", "block", "head")
FACTS = {"seq_len": 64, "dtype": "float32"}


def measured(ranks=2, speed=(1.0, 3.0)):
    """A profile whose second rank is slower, of micro-batches of 2 and 4 sequences; a layer takes 1 + rows."""

    def costs(rows, slow):
        one = LayerCosts(*(slow * part * (1 + rows) for part in (1, 2, 1, 1)), 0.5 * slow * (1 + rows))
        return RankCosts((one,) * 3, loss=0.25 * rows, action=0.125)

    return Profile(
        kinds=(0, 1, 1, 1, 1, 2),
        costs={rows: tuple(costs(rows, slow) for slow in speed[:ranks]) for rows in (2, 4)},
        links={rows: (Link(0.25, 0.5 * rows), Link(9.0, 9.0))[:ranks] for rows in (2, 4)},
        sizes={rows: Sizes((100 * rows,) * 3, (120 * rows,) * 3, 10 * rows, 7) for rows in (2, 4)},
        states=(8,) * 6,
        trained=(3,) * 6,
        optimizer=(0.5, 1.5)[:ranks],
        sums=(0.0,) * ranks,
        step=0.75,
        scale=1.25,
        alone=0.9,
        process=1000,
    )  # fmt: skip


def saved_of(profile):
    return SavedProfile.of(profile, SIGNATURES, FACTS)


def on(saved, ranks, sizes=(2, 4), signatures=SIGNATURES, **more):
    count = len(signatures)
    return saved.profile(ranks, signatures, sizes, states=(8,) * count, trained=(3,) * count, **more)


def test_a_file_says_what_was_saved(tmp_path):
    saved = saved_of(measured())
    saved.save(tmp_path / "profile.json")
    assert SavedProfile.read(tmp_path / "profile.json") == saved
    assert (saved.layers, saved.ranks, saved.optimizer) == (("embedding", "block", "head"), 2, 1.0)


def test_ranks_are_like_the_mean_and_links_without_the_one_that_closes_the_ring():
    found = on(saved_of(measured()), 4)
    assert found.ranks == 4 and found.kinds == (0, 1, 1, 1, 1, 2)
    assert {rank.layers[1].forward for rank in found.costs[4]} == {2.0 * 5}
    assert set(found.links[4]) == {Link(0.25, 2.0)}
    assert (found.step, found.scale, found.alone, found.process) == (0.75, 1.25, 0.9, 1000)


def test_even_ranks_are_predicted_as_if_they_were_measured():
    profile = measured(speed=(2.0, 2.0))
    choice = Choice("one_f_one_b", 1, 4, (3, 3))
    assert predict(on(saved_of(profile), 2), choice, 8) == predict(
        Profile(**{**vars(profile), "optimizer": (1.0, 1.0)}), choice, 8
    )


@pytest.mark.parametrize(
    ("rows", "forward", "kept"), [(1, 1.5, 100), (2, 3, 200), (3, 4, 300), (4, 5, 400), (10, 12.5, 1000)]
)
def test_other_sizes_lie_on_the_line_through_the_measured_ones(rows, forward, kept):
    """Below the smallest one and above the largest one in proportion: half the rows, half the time."""
    found = on(saved_of(measured(1)), 3, [rows])
    assert found.costs[rows][0].layers[0].forward == pytest.approx(forward)
    assert found.sizes[rows].activation[0] == kept


def test_a_model_of_the_links_takes_the_place_of_measured_transfers():
    """Two ranks of a node are two ranks of a pipeline; with two replicas between them, none are."""
    links = Links(0.5, 100.0, node_size=2)
    saved = saved_of(measured())
    inside, between = Link(0.25, 0.0), Link(0.25, 0.5 + 40 / 100)
    assert on(saved, 4, links=links).links[4] == (inside, between, inside, between)
    assert on(saved, 4, links=links, stride=2).links[4] == (between,) * 4


def test_deeper_models_of_the_same_layers_need_no_measurement_and_others_do():
    saved = saved_of(measured())
    deep = ("embedding", *("block",) * 20, "head")
    saved.check(FACTS, deep)
    assert on(saved, 8, signatures=deep).kinds == (0, *(1,) * 20, 2)
    with pytest.raises(ConfigError, match="layer 1: wide block"):
        saved.check(FACTS, ["embedding", "wide block"])
    with pytest.raises(ConfigError, match=r"(?s)seq_len = 64.*expected: seq_len = 32"):
        saved.check({**FACTS, "seq_len": 32}, deep)


def changed(change):
    def write(path):
        saved_of(measured()).save(path)
        given = json.loads(path.read_text())
        change(given)
        path.write_text(json.dumps(given))

    return write


TABLES = ("costs", "links", "sizes")
WRONG = {
    "nothing there": lambda path: None,
    "a folder": lambda path: path.mkdir(),
    "no JSON": lambda path: path.write_text("dim = 3"),
    "a list": lambda path: path.write_text("[]"),
    "another format": changed(lambda given: given.update(format="mpipipe profile 1")),
    "NaN": changed(lambda given: given.update(step=float("nan"))),
    "negative": changed(lambda given: given["links"]["2"].update(message=-1.0)),
    "a text": changed(lambda given: given["costs"]["4"].update(loss="long")),
    "without links": changed(lambda given: given["links"].clear()),
    "without sums": changed(lambda given: given.pop("sums")),
    "no layers": changed(lambda given: given.update(costs={})),
    "null": changed(lambda given: given.update(scale=None)),
    "huge": changed(lambda given: given.update(step=10**400)),
    "deep": lambda path: path.write_text("[" * 100_000),
    "fewer layers": changed(lambda given: given["costs"]["4"]["layers"].pop()),
    "no facts": changed(lambda given: given.update(facts=None)),
    "no rank": changed(lambda given: given.update(ranks=0)),
    "no sequences": changed(lambda given: [given[name].update({"0": given[name]["2"]}) for name in TABLES]),
    "alone above all": changed(lambda given: given.update(alone=5)),
    "cores": changed(lambda given: given.update(oversubscribed=4)),
    "true": changed(lambda given: given.update(step=True)),
    "an unknown key": changed(lambda given: given.update(speed=3)),
}


@pytest.mark.parametrize("case", WRONG)
def test_another_file_is_refused(tmp_path, case):
    WRONG[case](tmp_path / "profile.json")
    with pytest.raises(ConfigError, match="no profile can be read there"):
        SavedProfile.read(tmp_path / "profile.json")


def test_what_a_prediction_leaves_out_is_said():
    one, two = saved_of(measured(1)), saved_of(measured())
    assert two.doubts(4, 1, 8, linked=False) == [] and one.doubts(1, 1, 8, linked=False) == []
    assert "messages" in one.doubts(4, 1, 8, linked=False)[0] and not one.doubts(4, 1, 8, linked=True)
    assert "2 replicas" in two.doubts(4, 2, 8, linked=False)[0]
    assert "micro-batches of 9 sequences, the largest had 4" in two.doubts(4, 1, 9, linked=False)[0]


def test_times_of_ranks_that_shared_cores_are_said_to_be_rough(tmp_path):
    saved = SavedProfile.of(measured(), SIGNATURES, FACTS, "4 ranks share 2 cores: predictions are rough")
    saved.save(tmp_path / "profile.json")
    read = SavedProfile.read(tmp_path / "profile.json")
    assert read.doubts(4, 1, 4, linked=False) == ["measured where 4 ranks share 2 cores: predictions are rough"]
