"""What rounds cost is measured, told apart from graph making, and remembered."""

import json

import pytest

from mlx_gemma_mtp import calibration
from mlx_gemma_mtp.calibration import WIDTHS, calibrate_with, knowledge_file, load_knowledge, save_knowledge
from mlx_gemma_mtp.draft_length import LENGTHS, Fixed
from mlx_gemma_mtp.knowledge import Costs, Knowledge, octave
from mlx_gemma_mtp.speculative import Row, decode, prefill


@pytest.fixture
def engine(load_pair, tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_GEMMA_MTP_CACHE", str(tmp_path))
    return load_pair("e2b").engine


def test_what_was_learned_comes_back(engine):
    know = Knowledge({(1, octave(0)): Costs({1: 1.0, 5: 2.0}, 0.05, 99), (4, octave(9000)): Costs({1: 3.0}, 0.1, 2)})
    know.learn_outcome(2, True, 0.9)
    save_knowledge(engine, know)
    assert load_knowledge(engine) == know


def test_a_calibration_measures_every_length_once(engine, monkeypatch):
    know = Knowledge()
    calibrate_with(engine)(know)
    costs = know.costs_at(1, 0)
    assert set(costs.verify_seconds) == {length + 1 for length in LENGTHS} and costs.draft_seconds > 0
    assert load_knowledge(engine) == know
    monkeypatch.setattr(calibration, "measure", lambda _: pytest.fail("measured again"))
    calibrate_with(engine)(know)


GOOD = {"1": {"11": {"verify_seconds": {str(w): 1.0 for w in WIDTHS}, "draft_seconds": 0.1, "measured": 8}}}


@pytest.mark.parametrize(
    "changes",
    [
        {"costs": []},
        {"costs": {"one": {}}},
        {"costs": {"1": {"11": {"verify_seconds": {}, "draft_seconds": 1, "measured": 1}}}},
        {"costs": {"1": {"11": {"verify_seconds": {"1": float("nan")}, "draft_seconds": 1, "measured": 1}}}},
        {"costs": {"1": {"11": {"verify_seconds": {"1": -1}, "draft_seconds": 1, "measured": 1}}}},
        {"acceptance": [2.0] * 8},
        {"acceptance": None},
        {"acceptance": [0.5]},
        {"seen": ["many"]},
        {"seen": [float("inf")] * 8},
        {"probe_interval": 0},
    ],
)
def test_a_file_that_makes_no_sense_is_measured_anew(engine, changes):
    save_knowledge(engine, Knowledge())
    values = json.loads(knowledge_file(engine).read_text()) | {"costs": GOOD}
    knowledge_file(engine).write_text(json.dumps(values))
    assert load_knowledge(engine).costs
    knowledge_file(engine).write_text(json.dumps(values | changes))
    assert load_knowledge(engine) == Knowledge()


class Timed(Fixed):
    """A fixed draft length that keeps the seconds it is told."""

    def observe(self, drafted, drafts, accepted, seconds, context):
        SECONDS.append(seconds)


SECONDS: list = []


@pytest.mark.compiled
@pytest.mark.parametrize("drafts", [0, 2])
def test_a_round_that_made_a_graph_teaches_no_cost(load_pair, drafts):
    pair = load_pair("e2b", 9)  # a pair no other test has made graphs of
    SECONDS.clear()
    list(decode(pair.engine, prefill(pair.target, [5, 6, 7, 8]), [Row([5, 6, 7, 8], 40)], Timed(drafts)))
    assert SECONDS[0] is None
    assert sum(s is not None for s in SECONDS) > len(SECONDS) / 2
