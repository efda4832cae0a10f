"""The bench compares like with like: what it makes computes the same, and what differs is said."""

import subprocess
import sys

import pytest

import mlx_gemma_mtp
from bench import chips, decode, random_pair
from bench.context import EveryLayer
from bench.engines import Ours, Run, load, timed
from bench.inflate import inflate
from bench.prompts import prompts_of
from mlx_gemma_mtp import OptionError, Sampling
from mlx_gemma_mtp.hub import DEMO

OPTIONS = {"max_tokens": 24, "draft_length": 3, "sampling": Sampling(temperature=0), "ignore_eos": True}
PROMPT = [2, *range(300, 340)]


def test_an_inflated_pair_computes_what_the_demo_pair_computes(tmp_path):
    inflate(DEMO, tmp_path, hidden=320, width=640, vocab=2048)
    demo, wide = (mlx_gemma_mtp.load(d, dtype="float32").generate(PROMPT, **OPTIONS) for d in (DEMO, tmp_path))
    assert wide.tokens == demo.tokens and wide.stats.accepted == demo.stats.accepted > 0


@pytest.mark.parametrize(("size", "scale"), [("E2B", 0.1), ("26B-A4B", 0.05)])
def test_a_random_pair_has_the_structure_of_its_size_and_runs(tmp_path, size, scale):
    random_pair.write_pair(tmp_path / "pair", size, scale, vocab=2048)
    pair = mlx_gemma_mtp.load(tmp_path / "pair")
    published = {"E2B": (35, 262144 // 128), "26B-A4B": (30, 0)}[size]
    assert pair.target.args.num_hidden_layers == published[0]
    assert hasattr(pair.drafter.head, "ordering") == bool(published[1])
    plain = pair.generate(PROMPT, **OPTIONS | {"draft_length": 0, "max_tokens": 8})
    assert pair.generate(PROMPT, **OPTIONS | {"max_tokens": 8}).tokens == plain.tokens and len(set(plain.tokens)) > 2


def test_a_prefill_of_every_layer_gives_the_same_tokens():
    pair = load(DEMO, peers=[]).pair
    assert EveryLayer(pair).run(PROMPT, 8).tokens == Ours(pair, 0, "ours plain").run(PROMPT, 8).tokens


def run_of(tokens, seconds, rounds):
    return Run(tokens, [1 + seconds * i for i in range(len(tokens))], rounds, 0, 0, [2, 1])


def test_an_engine_that_differs_is_said_to_and_where():
    results = {
        "ours plain": [run_of([5, 6, 7, 8], 0.1, 3), run_of([5, 6, 7, 8], 0.1, 3)],
        "ours K=2": [run_of([5, 6, 7, 8], 0.05, 2), run_of([5, 6, 9, 8], 0.05, 2)],
    }
    plain, drafting = decode.summarise(results, "ours plain")
    assert plain["ms_per_token"] == pytest.approx(100) and plain["same_tokens"] == 1.0
    assert drafting["speed"] == pytest.approx(2) and drafting["tokens_per_round"] == 1.5
    assert drafting["ms_per_round"] == pytest.approx(75) and drafting["accepted_by_position"] == [1.0, 0.5]
    assert (drafting["same_tokens"], drafting["parted"]) == (0.5, [2])


def test_an_unknown_workload_is_refused():
    with pytest.raises(OptionError, match="repetition"):
        prompts_of("repitition", None, 1)


def test_a_run_tells_prompt_and_tokens_apart():
    run = timed(iter([5, 6, 7]))
    assert run.tokens == [5, 6, 7] and run.rounds == 2 and run.times == sorted(run.times)
    assert run_of([1, 2, 3, 4], 0.1, 3).milliseconds_per_round(skipped=2) == pytest.approx(100)


def test_a_projection_is_bandwidth_over_bytes():
    lines = {line["chip"]: line for line in chips.project(1e9, acceptance_length=3.0, round_cost=1.5)}
    assert lines["M1 Max"]["plain_tokens_per_second"] == pytest.approx(400)
    assert lines["M1 Max"]["mtp_tokens_per_second"] == pytest.approx(800)
    assert all(line["kind"] == "projection" and line["source"][1].startswith("https://") for line in lines.values())


def test_a_step_reads_neither_per_layer_tables_nor_idle_experts():
    sizes = {size: chips.planned_step(size, "8bit")[1] for size in ("E2B", "26B-A4B", "31B")}
    assert 1.8e9 < sizes["E2B"] < 2.6e9 and 3e9 < sizes["26B-A4B"] < 5e9 and sizes["31B"] > 30e9


@pytest.mark.skipif(sys.platform != "linux", reason="a Mac has a fast BLAS")
def test_times_of_a_slow_blas_are_refused_with_the_remedy():
    done = subprocess.run([sys.executable, "-m", "bench", "--peers"], capture_output=True, text=True, env={"PATH": "/usr/bin"})
    assert done.returncode == 1 and "libopenblas0-pthread" in done.stderr and "Traceback" not in done.stderr


def test_every_part_of_a_report_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from bench.plots import draw

    lines = [
        {"engine": name, "ms_per_token": 50.0, "accepted_by_position": [0.8, 0.5]} for name in ("ours K=2", "mlx-lm plain")
    ]
    point = {"engine": "ours K=2", "context": 1024, "first_token_seconds": 1.0, "round_ms": 50.0}
    rows = {"lines": [{"engine": "ours batch 0", "rows": n, "decode_tokens_per_second": 10.0 * n} for n in (1, 4)]}
    halves = {0: {"verify_ms": 50.0, "draft_ms": 0.0}, 2: {"verify_ms": 60.0, "draft_ms": 5.0}}
    draw({"workloads": {"code": lines}, "round": halves, "context": [point], "batch": rows}, tmp_path)
    assert {f.stem for f in tmp_path.iterdir()} == {"speed", "acceptance", "round", "context", "batch"}
