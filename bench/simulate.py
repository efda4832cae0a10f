"""The automatic draft length on simulated Macs: published cost curves, given acceptances, noise and outliers.

    python -m bench.simulate [--out regret.png]

Prints the regret against the best fixed length after 200 rounds, and plots it. Sources of the curves: reports of
llama.cpp and MLX users (M4 Pro: mlx #3839), linear in T for an M1 Max, 0.83 + 0.17 T for an M3 Ultra, experts for the 26B.
"""

import argparse
import random

from mlx_gemma_mtp.calibration import WIDTHS
from mlx_gemma_mtp.draft_length import LENGTHS, Auto
from mlx_gemma_mtp.knowledge import Costs, Knowledge, octave

# Seconds of verifying T tokens, in plain steps, and of one draft step.
CURVES = {
    "M1 Max": (lambda t: 0.55 + 0.45 * t, 0.06),
    "M4 Pro": (lambda t: {1: 1, 2: 1.03, 3: 1.22, 4: 1.47, 5: 1.7, 6: 2.07, 7: 2.4, 8: 2.69, 9: 2.95}[t], 0.06),
    "M3 Ultra": (lambda t: 0.83 + 0.17 * t, 0.02),
    "26B-A4B": (lambda t: 1 + 0.35 * (t - 1), 0.25),
    "free": (lambda t: 1 + 0.02 * (t - 1), 0.01),
}


class World:
    """Rounds of known cost and acceptance, with noise and outliers. Time is counted as if nothing else ran."""

    def __init__(self, curve, acceptance, informative, seed, restless=False):
        """informative: confidences are right on average.  restless: other programs slow the machine down now and then."""
        self.verify_seconds, self.draft_seconds = CURVES[curve] if isinstance(curve, str) else curve
        self.acceptance, self.informative, self.random = acceptance, informative, random.Random(seed)
        self.restless, self.load = restless, 1.0

    def calibrate(self, knowledge):
        seconds = {width: self.verify_seconds(width) * self.random.uniform(0.95, 1.05) for width in WIDTHS}
        knowledge.costs[1, octave(0)] = Costs(seconds, self.draft_seconds * self.random.uniform(0.9, 1.1), 8)

    def drafts(self, count):
        """Acceptance probability of each draft, as a confidence that is right on average, or says nothing."""
        if not self.informative:
            return [self.acceptance] * count
        return [min(max(self.random.betavariate(2 * self.acceptance, 2 - 2 * self.acceptance), 0.0), 1.0) for _ in range(count)]

    def play(self, controller, rounds):
        """Runs rounds; returns (tokens, seconds). While no drafts are in hand the next round starts before the last is read."""
        tokens = seconds = 0
        chances, ahead, following = [], False, 0
        for _ in range(rounds):
            confidence = chances if self.informative else [0.5] * len(chances)
            width = 1 + (0 if ahead else controller.verify(len(chances), [confidence]))
            drafts = following if ahead else controller.draft_length
            following, ahead = controller.draft_length, drafts == 0
            accepted = 0
            while accepted < width - 1 and self.random.random() < chances[accepted]:
                accepted += 1
            cost = self.verify_seconds(width) + drafts * self.draft_seconds
            tokens, seconds = tokens + accepted + 1, seconds + cost
            if self.restless and self.random.random() < 0.01:
                self.load = self.random.choice([1.0, 1.0, 1.2, 1.5, 2.0])
            measured = cost * self.load * self.random.gauss(1, 0.05) * (10 if self.random.random() < 0.01 else 1)
            controller.observe(width - 1, drafts, [accepted], measured, 0)
            chances = self.drafts(drafts)
        return tokens, seconds

    def best_fixed(self):
        """Tokens per second of the best fixed length."""
        expected = lambda k: sum(self.acceptance**i for i in range(k + 1))
        return max(expected(k) / (self.verify_seconds(k + 1) + k * self.draft_seconds) for k in LENGTHS)


def regret(world, controller, settle, rounds):
    world.play(controller, settle)
    tokens, seconds = world.play(controller, rounds)
    return 1 - tokens / seconds / world.best_fixed()


def main():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    parser = argparse.ArgumentParser(prog="python -m bench.simulate", description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="regret.png", help="file of the plot (regret.png)")
    options = parser.parse_args()
    acceptances = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
    figure, axis = plt.subplots(figsize=(6, 4))
    for curve in CURVES:
        regrets = []
        for acceptance in acceptances:
            world = World(curve, acceptance, False, 1)
            regrets.append(100 * regret(world, Auto(Knowledge(), world.calibrate).begin(), 200, 4000))
        print(f"{curve:<10}" + "".join(f"{r:7.1f}" for r in regrets))
        axis.plot(acceptances, regrets, marker="o", label=curve)
    axis.axhline(5, color="grey", linestyle="--", linewidth=1)
    axis.set(xlabel="probability that a draft is accepted", ylabel="regret against the best fixed length, %")
    axis.legend()
    figure.tight_layout()
    figure.savefig(options.out, dpi=120)


if __name__ == "__main__":
    main()
